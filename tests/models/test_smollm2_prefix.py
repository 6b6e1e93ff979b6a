"""Conversations on a real model share what they have in common, counted to the token."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformerskit as kit
from smollm2kit import Real, paragraph
from transformers import DynamicCache

BLOCK = 16
ANSWER = 20


def say(real: Real, ids: Any, past: Any) -> Any:
    """``[1, n]``: the prompt and an answer of ``ANSWER`` tokens."""
    options = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER}
    return kit.generate(real.model, ids, past, attention_mask=torch.ones_like(ids), **options)


def common(one: Any, two: Any) -> int:
    """Tokens that two rows ``[1, n]`` start with alike."""
    length = min(one.shape[1], two.shape[1])
    differ = (one[0, :length] != two[0, :length]).nonzero()
    return int(differ[0]) if len(differ) else length


def reusable(cached: int, shared: int, prompt: int) -> int:
    """What a prompt finds, when the longest match with ``cached`` computed tokens is ``shared``.

    Only full blocks are cached; the head of a partly matching one counts from a quarter of a block
    on; one token is left to compute.
    """
    end = min(shared, cached // BLOCK * BLOCK, prompt - 1)
    return end if end % BLOCK >= BLOCK // 4 else end - end % BLOCK


def system() -> dict[str, str]:
    text = " ".join(paragraph(number) for number in range(4))
    return {"role": "system", "content": f"Answer questions about this story. {text}"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("way", ["sdpa", "pagedcache"])
def test_two_conversations_with_one_system_prompt(smollm2: Real, way: str) -> None:
    first = smollm2.chat([system(), user("Who is Alice?")])
    second = smollm2.chat([system(), user("What did the White Rabbit say?")])
    shared = common(first, second)
    assert shared > 300  # the system prompt, and the words that open a question
    expected = [say(smollm2, ids, DynamicCache()).tolist() for ids in (first, second)]
    model = smollm2.model
    model.set_attn_implementation(way)
    with kit.pool_for(model, 200, block_size=BLOCK) as pool:
        with kit.paged(pool, first, model=model) as one:
            got = [say(smollm2, first, one).tolist()]
            assert one.num_cached_tokens == 0
            used = pool.num_blocks - pool.num_free_blocks
            assert used == -(-(first.shape[1] + ANSWER - 1) // BLOCK)
            with kit.paged(pool, second, model=model) as two:
                reused = two.num_cached_tokens
                got.append(say(smollm2, second, two).tolist())
                # SPEC F22, F40: to the token
                assert reused == reusable(first.shape[1] + ANSWER - 1, shared, second.shape[1])
                stats = pool.stats()
                assert stats.tokens_saved == reused
                # Blocks of the shared part exist once.
                both = pool.num_blocks - pool.num_free_blocks
                own = -(-(second.shape[1] + ANSWER - 1) // BLOCK) - reused // BLOCK
                assert both == used + own
                kit.whole(pool)
    assert got == expected


def test_a_second_turn_finds_the_first(smollm2: Real) -> None:
    """The answer included: its tokens were fed, all but the last."""
    model = smollm2.model
    messages = [system(), user("Who is Alice?")]
    first = smollm2.chat(messages)
    model.set_attn_implementation("pagedcache")
    with kit.pool_for(model, 200, block_size=BLOCK) as pool:
        with kit.paged(pool, first, model=model) as past:
            output = say(smollm2, first, past)
            assert past.get_seq_length() == output.shape[1] - 1
        # As an engine continues: the very tokens, then the next question.
        question = smollm2.ids("<|im_end|>\n<|im_start|>user\nAnd where is she?<|im_end|>\n")
        second = torch.cat([output, question], 1)
        with kit.paged(pool, second, model=model) as past:
            computed = output.shape[1] - 1
            assert past.num_cached_tokens == reusable(computed, output.shape[1], second.shape[1])
            assert past.num_cached_tokens > first.shape[1]
            got = say(smollm2, second, past)
    model.set_attn_implementation("sdpa")
    assert got.tolist() == say(smollm2, second, DynamicCache()).tolist()


@pytest.mark.parametrize("kv_format", ["q8_0", "q4k"])
def test_a_hit_reads_the_bytes_that_were_stored(smollm2: Real, kv_format: str) -> None:
    """Reuse changes no token, in quantised formats either: what is found is what was written."""
    model = smollm2.model
    model.set_attn_implementation("pagedcache")
    ids = smollm2.chat([system(), user("Who is Alice?")])
    with kit.pool_for(model, 200, kv_format, block_size=BLOCK) as pool:
        with kit.paged(pool, ids, model=model) as past:
            say(smollm2, ids, past)
            k, v = past.sequences[0].gather(17, 0, 128)
        with kit.paged(pool, ids, model=model) as past:
            reused = past.num_cached_tokens
            assert reused > ids.shape[1] - 2 * BLOCK
            again = past.sequences[0].gather(17, 0, 128)
            say(smollm2, ids, past)
            assert pool.stats().tokens_saved == reused
    assert (again[0] == k).all() and (again[1] == v).all()

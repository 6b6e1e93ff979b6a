"""Prefixes that several ``PagedCache`` objects share through one pool, and who may find what."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformerskit as kit

import pagedcache as pc

WAYS = ["sdpa", "pagedcache"]


def expected(ids: torch.Tensor, **options: Any) -> list[list[int]]:
    """What the model says with DynamicCache."""
    return kit.generate(kit.model_of("llama"), ids, **options).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_turns_of_a_chat_reuse_the_ones_before(way: str) -> None:
    model = kit.model_of("llama", way)
    text = kit.prompt(40)
    with kit.pool_for(model) as pool:
        for turn in range(3):
            with kit.paged(pool, text, model=model) as past:
                # turns 1 and 2 fed 55 and 75 tokens: the last of an answer never is
                assert past.num_cached_tokens == (0, 48, 64)[turn]
                answer = kit.generate(model, text, past, max_new_tokens=16)
                assert answer.tolist() == expected(text, max_new_tokens=16)
                kit.whole(pool)
            text = torch.cat([answer, kit.prompt(4, seed=turn)], dim=1)


@pytest.mark.parametrize("way", WAYS)
def test_other_conversations_find_the_system_prompt(way: str) -> None:
    model = kit.model_of("llama", way)
    system = kit.prompt(53)
    with kit.pool_for(model) as pool:
        for number in range(3):
            text = torch.cat([system, kit.prompt(9, seed=10 + number)], dim=1)
            with kit.paged(pool, text, model=model) as past:
                # three blocks and a part of the fourth
                assert past.num_cached_tokens == (0 if number == 0 else 53)
                with kit.counted_tokens(model) as computed:
                    answer = kit.generate(model, text, past, max_new_tokens=10)
                assert answer.tolist() == expected(text, max_new_tokens=10)
                assert computed[0] == (62 if number == 0 else 9)  # only the rest is computed
        assert pool.stats().hit_tokens == 106


def test_two_conversations_at_once_share_blocks() -> None:
    model = kit.model_of("llama", "pagedcache")
    system = kit.prompt(48)
    texts = [torch.cat([system, kit.prompt(5, seed=n)], dim=1) for n in range(2)]
    with kit.pool_for(model) as pool:
        with kit.paged(pool, texts[0], model=model) as first:
            one = kit.generate(model, texts[0], first, max_new_tokens=8)
            with kit.paged(pool, texts[1], model=model) as second:
                assert second.num_cached_tokens == 48
                shared = first.sequences[0].block_table[:3].tolist()
                assert second.sequences[0].block_table[:3].tolist() == shared
                two = kit.generate(model, texts[1], second, max_new_tokens=8)
                kit.whole(pool)
                more = torch.cat([one, kit.prompt(3, seed=9)], dim=1)
                assert kit.generate(model, more, first, max_new_tokens=8).tolist() == expected(
                    more, max_new_tokens=8
                )
        assert one.tolist() == expected(texts[0], max_new_tokens=8)
        assert two.tolist() == expected(texts[1], max_new_tokens=8)


@pytest.mark.parametrize("way", WAYS)
def test_one_cache_through_a_conversation(way: str) -> None:
    """As with DynamicCache: the same object is given to ``generate`` again, with more text."""
    model = kit.model_of("llama", way)
    with kit.pool_for(model) as pool:
        text = kit.prompt(20)
        with kit.paged(pool, text, model=model) as past:
            for turn in range(3):
                text = kit.generate(model, text, past, max_new_tokens=9)
                if turn == 0:
                    assert text.tolist() == expected(kit.prompt(20), max_new_tokens=9)
                text = torch.cat([text, kit.prompt(7, seed=turn)], dim=1)
            assert past.get_seq_length() == 20 + 3 * 9 + 2 * 7 - 1
        with kit.paged(pool, text, model=model) as past:
            assert past.num_cached_tokens == 48  # of 60 tokens, three full blocks


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_batch_reuse_what_all_have(way: str) -> None:
    model = kit.model_of("llama", way)
    known, other = kit.prompt(40, seed=1), kit.prompt(40, seed=2)
    mixed = torch.cat([known[:, :21], other[:, 21:]], dim=1)  # agrees with `known` in 21 tokens
    batch = torch.cat([known, mixed])
    with kit.pool_for(model) as pool:
        with kit.paged(pool, known, model=model) as past:
            kit.generate(model, known, past, max_new_tokens=10)
        with kit.paged(pool, batch, model=model) as past:
            assert past.num_cached_tokens == 21
            assert [seq.num_cached_tokens for seq in past.sequences] == [21, 21]
            assert [seq.num_blocks for seq in past.sequences] == [3, 3]  # room for all tokens
            got = kit.generate(model, batch, past, max_new_tokens=10)
            assert got.tolist() == expected(batch, max_new_tokens=10)
            kit.whole(pool)
        with kit.paged(pool, batch, model=model) as past:
            assert past.num_cached_tokens == 39  # the fourth block was filled by the answers


@pytest.mark.parametrize("way", WAYS)
def test_beam_search_reuses_and_is_reused(way: str) -> None:
    model = kit.model_of("llama", way)
    ids = kit.prompt(37)
    options = {"num_beams": 3, "max_new_tokens": 20}
    with kit.pool_for(model) as pool:
        answers = []
        for turn in range(2):
            with kit.paged(pool, ids, model=model) as past:
                assert past.num_cached_tokens == 36 * turn
                answers.append(kit.generate(model, ids, past, **options))
                kit.whole(pool)
        assert answers[0].tolist() == answers[1].tolist() == expected(ids, **options)
        with kit.paged(pool, answers[0], model=model) as past:
            assert past.num_cached_tokens >= 48  # the winning beam, as far as it lived to the end


@pytest.mark.parametrize("way", WAYS)
def test_assisted_decoding_reuses(way: str) -> None:
    """transformers 5.4 … 5.24 feeds the whole text to a cache that holds some of it."""
    model = kit.model_of("llama", way)
    assistant = kit.noisy(kit.make_model("llama"))
    ids = kit.prompt(37)
    options = {"assistant_model": assistant, "max_new_tokens": 12}
    with kit.pool_for(model) as pool:
        for turn in range(2):
            with kit.paged(pool, ids, model=model) as past:
                assert past.num_cached_tokens == 36 * turn
                answer = kit.generate(model, ids, past, **options)
                assert answer.tolist() == expected(ids, max_new_tokens=12)
                more = torch.cat([answer, kit.prompt(6, seed=turn)], dim=1)
                assert kit.generate(model, more, past, **options).tolist() == expected(
                    more, max_new_tokens=12
                )
        with kit.paged(pool, ids) as past:  # without the model nobody can put it right
            if kit.VERSION < (5, 4):
                answer = kit.generate(model, ids, past, **options)
                assert answer.tolist() == expected(ids, max_new_tokens=12)
            else:
                with pytest.raises(pc.InvalidArgumentError, match="model="):
                    kit.generate(model, ids, past, **options)


@pytest.mark.parametrize("way", WAYS)
def test_generated_tokens_are_reusable_once_recorded(way: str) -> None:
    model = kit.model_of("llama", way)
    ids = kit.prompt(30)
    with kit.pool_for(model) as pool:
        past = kit.paged(pool, ids)  # no model: nobody sees what is generated
        answer = kit.generate(model, ids, past, max_new_tokens=34)
        assert answer.tolist() == expected(ids, max_new_tokens=34)
        assert past.sequences[0].seq_len == 30  # the prompt; the rest waits for its names
        assert past.get_seq_length() == 63
        kit.whole(pool)
        past.record(answer)
        assert past.sequences[0].seq_len == 63
        assert past.sequences[0].tokens.tolist() == answer[0, :63].tolist()
        more = torch.cat([answer, kit.prompt(5)], dim=1)
        second = kit.generate(model, more, past, max_new_tokens=8)
        assert second.tolist() == expected(more, max_new_tokens=8)
        past.close(second)
        with kit.paged(pool, more, model=model) as past:
            assert past.num_cached_tokens == 64


def test_what_is_not_recorded_is_not_reused() -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(30)
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids) as past:
            answer = kit.generate(model, ids, past, max_new_tokens=34)
        with kit.paged(pool, answer) as past:
            assert past.num_cached_tokens == 16
        with kit.paged(pool, ids) as past:
            answer = kit.generate(model, ids, past, max_new_tokens=34)
            past.close(answer)
        with kit.paged(pool, answer) as past:
            assert past.num_cached_tokens == 48


def test_record_refuses_tokens_that_are_not_the_rows() -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(20)
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids) as past:
            answer = kit.generate(model, ids, past, max_new_tokens=8)
            wrong = answer.clone()
            wrong[0, 3] += 1
            with pytest.raises(pc.InvalidArgumentError, match="position 3 of row 0"):
                past.record(wrong)
            with pytest.raises(pc.InvalidArgumentError, match="1 rows, got 2"):
                past.record(torch.cat([answer, answer]))
            assert past.sequences[0].seq_len == 20
            past.record(answer)
            past.record(answer)  # nothing is left to name
            assert past.sequences[0].seq_len == 27
        # beams change places: whose output a row is nobody can say
        with kit.paged(pool, ids) as past:
            answer = kit.generate(model, ids, past, num_beams=3, max_new_tokens=12)
            with pytest.raises(pc.InvalidArgumentError, match="model="):
                past.record(answer.repeat(3, 1))
        # and rows without a prompt have no identity
        with kit.paged(pool) as past:
            answer = kit.generate(model, ids, past, max_new_tokens=8)
            with pytest.raises(pc.InvalidArgumentError, match="model="):
                past.record(answer)


def test_a_hook_alone_makes_tokens_known() -> None:
    """Without input_ids nothing is reused, but with ``model`` what is fed can be found later."""
    model = kit.model_of("llama")
    ids, mask = kit.padded([30, 22])
    with kit.pool_for(model) as pool:
        with kit.paged(pool, model=model) as past:
            answer = kit.generate(model, ids, past, attention_mask=mask, max_new_tokens=10)
        with kit.paged(pool, ids, mask, model=model) as past:
            assert past.num_cached_tokens == 29
            again = kit.generate(model, ids, past, attention_mask=mask, max_new_tokens=10)
        assert again.tolist() == answer.tolist()
        with kit.paged(pool, ids, model=model) as past:  # another mask: other tokens, in effect
            assert past.num_cached_tokens == 0


def test_salt_and_adapter_isolate() -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(49)
    found = {}
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model, salt="a", adapter="x") as past:
            kit.generate(model, ids, past, max_new_tokens=2)
        for salt, adapter in [("a", "x"), ("b", "x"), ("a", None), (b"", None)]:
            with kit.paged(pool, ids, model=model, salt=salt, adapter=adapter) as past:
                found[salt, adapter] = past.num_cached_tokens
    assert found == {("a", "x"): 48, ("b", "x"): 0, ("a", None): 0, (b"", None): 0}


# ---- padding -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_padded_rows_are_reused_under_the_same_padding_only(way: str) -> None:
    model = kit.model_of("llama", way)
    ids, mask = kit.padded([20, 40])
    options = {"attention_mask": mask, "max_new_tokens": 12}
    with kit.pool_for(model) as pool:
        answers = []
        for turn in range(2):
            with kit.paged(pool, ids, mask, model=model) as past:
                assert past.num_cached_tokens == 39 * turn
                answers.append(kit.generate(model, ids, past, **options).tolist())
        assert answers[0] == answers[1] == expected(ids, **options)
        # the same ids, their zeros meant as tokens
        with kit.paged(pool, ids[:1], model=model) as past:
            assert past.num_cached_tokens == 0
            assert kit.generate(
                model, ids[:1], past, max_new_tokens=12, attention_mask=torch.ones_like(ids[:1])
            ).tolist() == expected(
                ids[:1], max_new_tokens=12, attention_mask=torch.ones_like(ids[:1])
            )
        # ... and one zero fewer masked
        fewer = mask.clone()
        fewer[0, 19] = 1
        with kit.paged(pool, ids, fewer, model=model) as past:
            assert past.num_cached_tokens == 16  # a whole block of padding: nothing to tell apart
        # the unpadded row alone is the same row
        with kit.paged(pool, ids[1:], model=model) as past:
            assert past.num_cached_tokens == 39
        # ... and the tokens of the padded one alone are not: other positions
        with kit.paged(pool, ids[:1, 20:], model=model) as past:
            assert past.num_cached_tokens == 0


def test_masked_ranges_are_extra_keys() -> None:
    import numpy as np

    from pagedcache.integrations.transformers.prompts import masked_ranges

    def ranges(text: str) -> list[tuple[int, int]]:
        keys = masked_ranges(np.array([c == "1" for c in text]))
        return [(start, stop) for start, stop, _ in keys]

    assert ranges("1111") == []
    assert ranges("0011") == [(0, 2)]
    assert ranges("1001011000") == [(1, 3), (4, 5), (7, 10)]
    assert ranges("000") == [(0, 3)]


def test_another_mask_than_the_one_opened_with_is_refused() -> None:
    ids, mask = kit.padded([20, 40])
    for way, hooked in [("sdpa", True), ("pagedcache", True), ("pagedcache", False)]:
        model = kit.model_of("llama", way)
        with kit.pool_for(model) as pool:
            for given, used in [(None, mask), (mask, torch.ones_like(mask))]:
                with kit.paged(pool, ids, given, model=model if hooked else None) as past:
                    with pytest.raises(pc.InvalidArgumentError, match="attention_mask"):
                        kit.generate(model, ids, past, attention_mask=used, max_new_tokens=2)
                    kit.whole(pool)
                assert pool.num_cached_blocks == 0


def test_other_tokens_than_those_opened_with_are_refused() -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(40)
    other = ids.clone()
    other[0, 33] = 96 - other[0, 33]
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model) as past:
            with pytest.raises(pc.InvalidArgumentError, match="position 33 of row 0"):
                kit.generate(model, other, past, max_new_tokens=2)
            assert past.get_seq_length() == 0
            kit.whole(pool)
            # the right ones still work
            assert kit.generate(model, ids, past, max_new_tokens=4).tolist() == expected(
                ids, max_new_tokens=4
            )


def test_text_padded_in_the_middle_gets_no_names_behind() -> None:
    """A second turn of a batch, padded on its own left: zeros of the mask behind the prompt."""
    model = kit.model_of("llama")
    ids, mask = kit.padded([32, 32])
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, mask, model=model) as past:
            text = kit.generate(model, ids, past, attention_mask=mask, max_new_tokens=8)
            more, shown = kit.padded([12, 7], seed=4)
            text = torch.cat([text, more], dim=1)
            seen = torch.cat([torch.ones(2, 40, dtype=torch.long), shown], dim=1)
            got = kit.generate(model, text, past, attention_mask=seen, max_new_tokens=20)
            kit.whole(pool)
        assert got.tolist() == expected(text, attention_mask=seen, max_new_tokens=20)
        with kit.paged(pool, got, model=model) as past:
            assert past.num_cached_tokens == 32  # of the 39 tokens of the first turn


def test_a_mask_of_its_own_gets_no_names() -> None:
    """A four-dimensional mask gives the same tokens other values: nobody may find them."""
    model = kit.model_of("llama")
    ids = kit.prompt(20)
    mask = torch.ones(20, 20).tril().bool()
    mask[5:, 2] = False
    plain = kit.forward(model, ids, None, attention_mask=mask[None, None])
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model) as past:
            got = kit.forward(model, ids, past, attention_mask=mask[None, None])
            assert torch.equal(got, plain)
        with kit.paged(pool, ids, model=model) as past:
            assert past.num_cached_tokens == 0


def test_embeddings_get_no_names() -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(20)
    embeddings = model.get_input_embeddings()(ids).detach()
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model) as past:
            got = kit.forward(model, None, past, inputs_embeds=embeddings)
            assert torch.equal(got, kit.forward(model, ids, None))
        assert pool.num_cached_blocks == 0


# ---- content behind tokens ------------------------------------------------------------------


def test_extra_keys_name_what_stands_behind_tokens() -> None:
    """The same placeholder tokens for another image are another prompt."""
    model = kit.model_of("llama")
    ids = kit.prompt(49, rows=2)
    found = []
    with kit.pool_for(model) as pool:
        for keys in (
            [[(20, 30, b"cat")], []],
            [[(20, 30, b"cat")], []],
            [[(20, 30, b"dog")], []],
            None,
        ):
            with kit.paged(pool, ids, model=model, extra_keys=keys) as past:
                found.append(past.num_cached_tokens)
                kit.generate(model, ids, past, max_new_tokens=2)
        for bad in ([[(20, 30, b"cat")]], "ab", [[(20, 30)], []]):
            with pytest.raises(pc.InvalidArgumentError):
                kit.paged(pool, ids, extra_keys=bad)
    assert found == [0, 48, 16, 16]  # the block before the image is shared


def test_content_without_a_name_is_refused() -> None:
    model = kit.make_model("llama")
    ids = kit.prompt(20)
    inner = model.forward
    model.forward = lambda *args, pixel_values=None, **options: inner(*args, **options)
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model) as past:
            with pytest.raises(pc.InvalidArgumentError, match="extra_keys"):
                kit.forward(model, ids, past, pixel_values=torch.zeros(1))
        with kit.paged(pool, model=model) as past:  # without a prompt nothing is named
            kit.forward(model, ids, past, pixel_values=torch.zeros(1))
        assert pool.num_cached_blocks == 0
        with kit.paged(pool, ids, model=model, extra_keys=[[(3, 5, b"cat")]]) as past:
            kit.forward(model, ids, past, pixel_values=torch.zeros(1))
        assert pool.num_cached_blocks == 1


def test_two_threads_at_once() -> None:
    """Each runs its own model on its own cache, over one pool."""
    from concurrent.futures import ThreadPoolExecutor

    models = [kit.make_model("llama") for _ in range(2)]
    for model in models:
        model.set_attn_implementation("pagedcache")
    system = kit.prompt(32)
    texts = [torch.cat([system, kit.prompt(6, seed=n)], dim=1) for n in range(2)]

    def talk(number: int) -> list[list[int]]:
        answers = []
        for _ in range(3):
            with kit.paged(pool, texts[number], model=models[number]) as past:
                answers += kit.generate(
                    models[number], texts[number], past, max_new_tokens=8
                ).tolist()
        return answers

    with kit.pool_for(models[0]) as pool, ThreadPoolExecutor(2) as threads:
        for number, answers in enumerate(threads.map(talk, range(2))):
            assert answers == expected(texts[number], max_new_tokens=8) * 3


@pytest.mark.parametrize("way", WAYS)
def test_modes_of_torch(way: str) -> None:
    """Inference mode, and a pass that records gradients: none flows through the cache."""
    model = kit.model_of("llama", way)
    ids = kit.prompt(20)
    want = kit.forward(kit.model_of("llama"), ids, None)
    name = "cache" if kit.VERSION >= (5, 24) else "past_key_values"
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model) as past, torch.inference_mode():
            got = model(ids, use_cache=True, **{name: past}).logits
            assert (got - want).abs().max() < 1e-4
        with kit.paged(pool, model=model) as past:
            got = model(ids, use_cache=True, **{name: past}).logits
            assert got.requires_grad
            assert (got - want).abs().max() < 1e-4

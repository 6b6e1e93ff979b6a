"""``generate`` on a ``PagedCache`` gives the tokens that ``DynamicCache`` gives, in float32."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformerskit as kit
from transformers import DynamicCache

import pagedcache as pc

FAMILIES = list(kit.FAMILIES)
WAYS = ["sdpa", "eager", "pagedcache"]  # the first two gather, the last reads the pages
# transformers has no soft cap in sdpa
EACH = [(name, way) for name in FAMILIES for way in WAYS if (name, way) != ("gemma2", "sdpa")]


def both(family: str, way: str, ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """Tokens by DynamicCache and sdpa (or eager), and by a PagedCache."""
    plain = kit.model_of(family, "eager" if way == "eager" else _plain(family))
    model = kit.model_of(family, way)
    seed = options.pop("seed", 0)
    torch.manual_seed(seed)
    expected = kit.generate(plain, ids, **options)
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, options.get("attention_mask"), model=model) as past:
            torch.manual_seed(seed)
            got = kit.generate(model, ids, past, **options)
            kit.whole(pool)
            assert past.get_seq_length() == got.shape[1] - 1
    return expected, got


def _plain(family: str) -> str:
    return "eager" if family == "gemma2" else "sdpa"  # sdpa has no soft cap


@pytest.mark.parametrize(("family", "way"), EACH)
def test_greedy(family: str, way: str) -> None:
    expected, got = both(family, way, kit.prompt(37), max_new_tokens=24)
    assert got.tolist() == expected.tolist()
    assert len(set(got[0, 37:].tolist())) > 3  # the model says more than one thing


@pytest.mark.parametrize("way", WAYS)
def test_greedy_in_a_batch(way: str) -> None:
    expected, got = both("llama", way, kit.prompt(21, rows=3), max_new_tokens=24)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sampling_with_a_seed(family: str, way: str) -> None:
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 24}
    expected, got = both(family, way, kit.prompt(18), seed=5, num_return_sequences=3, **options)
    assert got.tolist() == expected.tolist()
    assert len({tuple(row) for row in got.tolist()}) == 3


@pytest.mark.parametrize(("family", "way"), EACH)
def test_beam_search(family: str, way: str) -> None:
    ids = kit.prompt(19, rows=2, seed=3)
    plain = kit.model_of(family, "eager" if way == "eager" else _plain(family))
    model = kit.model_of(family, way)
    options = {"num_beams": 3, "max_new_tokens": 20, "num_return_sequences": 2}
    expected = kit.generate(plain, ids, **options)
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model) as past:
            got = kit.generate(model, ids, past, **options)
            assert past.batch_size == 6
            kit.whole(pool)
        assert pool.stats().cow_copies > 0  # beams left each other
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(("family", "way"), EACH)
def test_left_padding(family: str, way: str) -> None:
    ids, mask = kit.padded([7, 33, 21, 1])
    expected, got = both(family, way, ids, attention_mask=mask, max_new_tokens=20)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_beam_search_with_left_padding(way: str) -> None:
    ids, mask = kit.padded([5, 18])
    options = {"num_beams": 3, "max_new_tokens": 12, "attention_mask": mask}
    expected = kit.generate(kit.model_of("llama"), ids, **options)
    model = kit.model_of("llama", way)
    with kit.pool_for(model) as pool, kit.paged(pool, ids, mask, model=model) as past:
        assert kit.generate(model, ids, past, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hook", [True, False])
def test_assisted_decoding_with_rejected_tokens(way: str, hook: bool) -> None:
    model, assistant = kit.model_of("llama", way), kit.noisy(kit.make_model("llama"))
    ids = kit.prompt(23)
    options = {"max_new_tokens": 40}
    expected = kit.generate(kit.model_of("llama"), ids, **options)
    crops: list[int] = []
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model if hook else None) as past:
            crop = past.crop
            past.crop = lambda n: (crops.append(int(n)), crop(n))[1]
            got = kit.generate(model, ids, past, assistant_model=assistant, **options)
            assert got.tolist() == expected.tolist()
            kit.whole(pool)
            past.close(got)
        # what was cached is what was accepted: a new cache finds all but the last token
        with kit.paged(pool, got, model=model) as past:
            assert past.num_cached_tokens == got.shape[1] - 1 - (got.shape[1] - 1) % 16
            assert kit.generate(model, got, past, max_new_tokens=8).tolist() == (
                kit.generate(kit.model_of("llama"), got, max_new_tokens=8).tolist()
            )
    removed = [n for n in crops if n < 0] if kit.VERSION >= (5, 24) else crops
    assert len(removed) >= 2  # drafts were rejected


@pytest.mark.parametrize("way", WAYS)
def test_prompt_lookup_decoding(way: str) -> None:
    ids = torch.cat([kit.prompt(12)] * 3, dim=1)
    options = {"max_new_tokens": 30, "prompt_lookup_num_tokens": 4, "eos_token_id": 1}
    expected, got = both("llama", way, ids, **options)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_without_a_prompt_it_is_a_drop_in(way: str) -> None:
    model = kit.model_of("llama", way)
    ids, mask = kit.padded([7, 20])
    options = {"attention_mask": mask, "max_new_tokens": 20}
    expected = kit.generate(kit.model_of("llama"), ids, **options)
    with kit.pool_for(model) as pool:
        with kit.paged(pool) as past:
            assert past.get_seq_length() == 0
            assert kit.generate(model, ids, past, **options).tolist() == expected.tolist()
            assert past.num_cached_tokens == 0
        assert pool.num_cached_blocks == 0  # nobody said what the tokens were


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [[50], [50, 27]])
def test_chunked_prefill(lengths: list[int], way: str) -> None:
    model = kit.model_of("llama", way)
    ids, mask = kit.padded(lengths)
    options = {"max_new_tokens": 12, "attention_mask": mask}
    with kit.pool_for(model) as pool:
        for turn in range(2):
            # the second time a prompt of 50 tokens lacks 2: no chunks then
            options["prefill_chunk_size"] = 16 if turn == 0 else None
            # on transformers 4.57 chunks of a padded prompt get other positions, always
            expected = kit.generate(kit.model_of("llama"), ids, DynamicCache(), **options)
            salt = str(turn) if kit.VERSION < (5, 0) and len(lengths) > 1 else ""
            with kit.paged(pool, ids, mask, model=model, salt=salt) as past:
                assert past.num_cached_tokens == (0 if salt else 48 * turn)
                got = kit.generate(model, ids, past, **options)
                assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("way", ["sdpa", "pagedcache"])
@pytest.mark.parametrize("kv_format", list(pc.FORMATS))
def test_every_format_runs(kv_format: str, way: str) -> None:
    """Quantised keys and values change numbers, not the course of events."""
    model = kit.model_of("llama", way)
    ids, mask = kit.padded([30, 37])
    options = {"attention_mask": mask, "max_new_tokens": 24}
    with kit.pool_for(model, kv_format=kv_format) as pool:
        with kit.paged(pool, ids, mask, model=model) as past:
            first = kit.generate(model, ids, past, **options)
            kit.whole(pool)
        assert first.shape == (2, 61)
        with kit.paged(pool, ids, mask, model=model) as past:
            assert past.num_cached_tokens >= 32
            again = kit.generate(model, ids, past, **options)
            kit.whole(pool)
        assert again.shape == first.shape


@pytest.mark.parametrize("way", ["sdpa", "pagedcache"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype, way: str) -> None:
    """The stored dtype being the model's, gathered values are those that were computed."""
    model = kit.make_model("llama").to(dtype)
    ids = kit.prompt(40)
    expected = kit.forward(model, ids, None)
    model.set_attn_implementation(way)
    name = str(dtype).removeprefix("torch.")
    with kit.pool_for(model, kv_format=name) as pool:
        with kit.paged(pool, ids, model=model) as past:
            got = kit.forward(model, ids, past)
            assert got.dtype == dtype
            bound = 0.1 if dtype == torch.bfloat16 else 0.02  # of scores of about 5
            assert (got - expected).abs().max() < bound * expected.abs().max()
            if way == "sdpa":
                assert torch.equal(got, expected)


OPEN = [("q4k", None, 16), ("q4k", None, 32), ("q8_0", "float16", 16), ("q4", "float16", 16)]


@pytest.mark.parametrize("way", ["sdpa", "pagedcache"])
@pytest.mark.parametrize(("kv_format", "open_blocks", "block_size"), OPEN)
@pytest.mark.parametrize("hook", [True, False])
def test_open_blocks_in_every_mode(
    kv_format: str, open_blocks: str | None, block_size: int, hook: bool, way: str
) -> None:
    """Beams, rejected drafts, padding and reuse where blocks stay open until they are full."""
    model = kit.model_of("llama", way)
    given = {} if open_blocks is None else {"open_blocks": open_blocks}
    ids, mask = kit.padded([30, 37])
    seen = model if hook else None
    assistant = kit.noisy(kit.make_model("llama"))
    with kit.pool_for(
        model, kv_format=kv_format, block_size=block_size, **given
    ) as pool:
        for options in ({}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}):
            with kit.paged(pool, ids, mask, model=seen) as past:
                kit.generate(model, ids, past, attention_mask=mask, max_new_tokens=30, **options)
                kit.whole(pool)
            kit.whole(pool, empty=True)
        prompt = kit.prompt(37, seed=9)
        with kit.paged(pool, prompt, model=seen) as past:
            answer = kit.generate(
                model, prompt, past, assistant_model=assistant, max_new_tokens=40
            )
            kit.whole(pool)
        with kit.paged(pool, answer, model=seen) as past:
            # 76 tokens were fed; what the pool was not told the names of is not found
            whole = 76 // block_size * block_size
            assert past.num_cached_tokens == (whole if hook else 32)
        # without names, what is full is sealed once it is a block behind the end
        assert pool.stats().blocks_sealed > 0 or (block_size > 16 and not hook)

"""``exact_prompts``: what the tokens of a prompt read of each other, and of all before them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import devicekit
import torch
import transformerskit as kit
from quantisedkit import Quantised
from transformers import DynamicCache

import pagedcache as pc

BLOCK = 16
WAYS = ["sdpa", "pagedcache"]
FORMATS = ["q4k", "q8_0", "q4", "float16"]  # what float32 does not fit into
# Grouped-query heads; soft cap and a scale, which sdpa does not do; a KV head for each head.
MODELS = [
    ("llama", "sdpa"), ("llama", "pagedcache"), ("gemma2", "eager"), ("gemma2", "pagedcache"),
    ("gpt2", "sdpa"), ("gpt2", "pagedcache"),
]  # fmt: skip
NEAR = 2e-4  # scores of up to 30, sums in another order


def stored(past: Any) -> DynamicCache:
    """What the pages of ``past`` hold, for a model without any of our code."""
    plain = DynamicCache()
    for index, layer in enumerate(past.layers):
        plain.update(layer.keys.clone(), layer.values.clone(), index)
    return plain


def difference(got: torch.Tensor, want: torch.Tensor, real: Any = slice(None)) -> float:
    return float((got - want)[real].abs().max())


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("family", "way"), MODELS)
def test_a_prompt_in_one_pass_is_that_of_a_dynamic_cache(
    family: str, kv_format: str, way: str
) -> None:
    """37 tokens: two full blocks that are quantised as they come, and a tail. The next 21 read
    those as they are stored, and each other as computed."""
    model, plain = kit.model_of(family, way), kit.model_of(family, "eager")
    first, second = kit.prompt(37), kit.prompt(21, seed=1)
    with kit.pool_for(model, kv_format=kv_format, block_size=BLOCK) as pool:
        with kit.paged(pool, first, model=model) as past:
            exact = DynamicCache()
            want = kit.forward(plain, first, exact)
            assert difference(kit.forward(model, first, past), want) < NEAR
            prefix = stored(past)
            want = kit.forward(plain, second, prefix)
            assert difference(kit.forward(model, second, past), want) < NEAR
            # the format does something: in float32 the second pass would say other things
            assert difference(want, kit.forward(plain, second, exact)) > 2 * NEAR
            kit.whole(pool)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_format", ["q4k", "q8_0"])
def test_what_follows_a_cached_prefix(kv_format: str, way: str) -> None:
    model, plain = kit.model_of("llama", way), kit.model_of("llama", "eager")
    text = kit.prompt(32 + 20)
    with kit.pool_for(model, kv_format=kv_format, block_size=BLOCK) as pool:
        with kit.paged(pool, text[:, :33], model=model) as past:
            kit.forward(model, text[:, :33], past)
        with kit.paged(pool, text, model=model) as past:
            assert past.num_cached_tokens == 32
            prefix = stored(past)
            got = kit.forward(model, text[:, 32:], past)
        assert difference(got, kit.forward(plain, text[:, 32:], prefix)) < NEAR


@pytest.mark.parametrize(("family", "way"), MODELS)
@pytest.mark.parametrize("kv_format", ["q4k", "q8_0"])
def test_left_padding_is_honoured(kv_format: str, family: str, way: str) -> None:
    """Two passes of a batch; one row starts in the middle of a block, one behind the first."""
    model, plain = kit.model_of(family, way), kit.model_of(family, "eager")
    ids, mask = kit.padded([40, 33, 17])
    more = kit.prompt(18, 3, seed=2)
    with kit.pool_for(model, kv_format=kv_format, block_size=BLOCK) as pool:
        with kit.paged(pool, ids, mask) as past:
            cache: Any = DynamicCache()
            for part in (ids, more):
                options, real = kit.padded_pass(part, past, mask)
                got = kit.forward(model, part, past, **options)
                want = kit.forward(plain, part, cache, **options)
                assert difference(got, want, real) < NEAR
                cache = stored(past)
            kit.whole(pool)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_format", ["q4k", "q8_0", "q4"])
def test_without_it_everything_is_read_back(kv_format: str, way: str) -> None:
    """One layer: its input is the same, so no value falls on another side of a rounding."""
    model = kit.make_model("llama", num_hidden_layers=1)
    ids = kit.prompt(3 * BLOCK)
    want = kit.forward(model, ids, Quantised(kv_format, BLOCK))
    exact = kit.forward(model, ids, DynamicCache())
    model.set_attn_implementation(way)
    with kit.pool_for(model, kv_format=kv_format, block_size=BLOCK) as pool:
        with kit.paged(pool, ids, model=model, exact_prompts=False) as past:
            assert difference(kit.forward(model, ids, past), want) < NEAR
        with kit.paged(pool, model=model, salt="other") as past:
            assert difference(kit.forward(model, ids, past), exact) < NEAR
    assert difference(want, exact) > 10 * NEAR


@pytest.mark.parametrize("way", WAYS)
def test_less_than_a_block_is_read_back(way: str) -> None:
    """15 tokens read each other as stored, 16 do not; so behind a prefix as well."""
    model = kit.make_model("llama", num_hidden_layers=1)
    plain = copy.deepcopy(model)
    model.set_attn_implementation(way)
    for count in (BLOCK - 1, BLOCK):
        for before in (0, 20):
            ids, past_ids = kit.prompt(count), kit.prompt(max(before, 1), seed=3)
            with kit.pool_for(model, kv_format="q4", block_size=BLOCK) as pool:
                with kit.paged(pool, model=model) as past:
                    read: Any = Quantised("q4", BLOCK)
                    computed: Any = DynamicCache()
                    if before:
                        kit.forward(model, past_ids, past)
                        computed = stored(past)
                        kit.forward(plain, past_ids, read)
                        assert torch.equal(read.layers[0].keys, past.layers[0].keys)
                    got = kit.forward(model, ids, past)
            wants = [kit.forward(plain, ids, cache) for cache in (read, computed)]
            right, wrong = wants if count < BLOCK else wants[::-1]
            assert difference(got, right) < NEAR < difference(got, wrong) / 10


# ---- what it costs --------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    return kit.counted_calls(monkeypatch)


@devicekit.cpu_memory("a model on the CPU reads pages of the CPU")
@pytest.mark.parametrize(
    ("kv_format", "dtype", "held"),
    [
        ("float32", torch.float32, True),
        ("float32", torch.bfloat16, True),
        ("bfloat16", torch.bfloat16, True),
        ("bfloat16", torch.float16, False),
        ("float16", torch.float16, True),
        ("float16", torch.float32, False),
        ("q8_0", torch.bfloat16, False),
    ],
)
def test_pages_that_hold_what_was_computed_are_read(
    kv_format: str, dtype: torch.dtype, held: bool, calls: dict[str, int]
) -> None:
    """Prompt, decode and chunk: 3 layers each; of other pages a prompt reads only what it has to,
    and what is below a block always comes from the pages."""
    model = kit.make_model("llama").to(dtype)
    model.set_attn_implementation("pagedcache")
    with kit.pool_for(model, kv_format=kv_format, block_size=BLOCK) as pool:
        with kit.paged(pool, model=model) as past:
            for count, attended, gathered in ((33, 3 * held, 0), (1, 3, 0), (16, 3 * held, 3)):
                before = dict(calls)
                kit.forward(model, kit.prompt(count), past)
                assert calls["attend"] - before["attend"] == attended
                assert calls["gather"] - before["gather"] == (0 if held else gathered)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_from_an_empty_cache_copies_nothing_and_needs_no_mask(
    way: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sdpa's own causal attention; behind a prefix one mask for all layers."""
    model = kit.model_of("llama", way)
    masks: list[Any] = []

    def watch(layer: Any) -> None:
        inner = layer.forward

        def watched(*args: Any, **options: Any) -> Any:
            masks.append(options["attention_mask"])
            return inner(*args, **options)

        monkeypatch.setattr(layer, "forward", watched)

    for layer in model.model.layers:
        watch(layer.self_attn)
    with kit.pool_for(model, kv_format="q8_0") as pool, kit.paged(pool, model=model) as past:
        kit.forward(model, kit.prompt(40), past)
        assert masks == [None] * 3 and calls == {"attend": 0, "gather": 0}
        kit.forward(model, kit.prompt(17), past)
        assert masks[3] is not None and all(mask is masks[3] for mask in masks[3:])
        k = torch.randn(1, 2, 16, 16, requires_grad=True)
        assert not any(x.requires_grad for x in past.update(k, k * 2, 0))
        past.crop(0)


def test_what_an_empty_cache_gives_back_is_what_it_was_given() -> None:
    model = kit.model_of("llama")
    k, v = (torch.randn(2, 16, 2, 16, requires_grad=True).transpose(1, 2) for _ in range(2))
    with kit.pool_for(model, kv_format="q8_0") as pool, kit.paged(pool) as past:
        got = past.update(k, v, 0)
        assert all(x.data_ptr() == given.data_ptr() for x, given in zip(got, (k, v), strict=True))
        assert not any(x.requires_grad for x in got)  # nor does anything else from the cache
        assert not torch.equal(past.layers[0].keys, k)  # the pages hold its rounded form


# ---- the option ----------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_a_fork_goes_on_alike(exact: bool) -> None:
    model = kit.model_of("llama")
    k, v = (torch.randn(1, 2, 16, 16) for _ in range(2))
    with kit.pool_for(model, kv_format="q4") as pool:
        with kit.paged(pool, exact_prompts=exact) as past, past.fork() as fork:
            for twin in (fork, copy.deepcopy(past)):
                assert torch.equal(twin.update(k, v, 0)[0], k) is exact
                twin.close()


@pytest.mark.parametrize("value", [1, 0, None, "yes", 16])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    model = kit.model_of("llama")
    with kit.pool_for(model) as pool:
        with pytest.raises(pc.InvalidArgumentError, match="exact_prompts must be True or False"):
            kit.paged(pool, kit.prompt(4), exact_prompts=value)
        kit.whole(pool, empty=True)

"""``attn_implementation="pagedcache"``: when it reads the pages, and what it does otherwise."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import devicekit
import torch
import transformerskit as kit
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import pagedcache as pc
from pagedcache.integrations.transformers import attention, masks, tensors
from pagedcache.integrations.transformers.layers import PagedLayer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    return kit.counted_calls(monkeypatch)


@devicekit.cpu_memory("a model on the CPU reads pages of the CPU")
@pytest.mark.parametrize("family", list(kit.FAMILIES))
@pytest.mark.parametrize("rows", [1, 3])
def test_pages_are_read_and_nothing_is_gathered(
    family: str, rows: int, calls: dict[str, int]
) -> None:
    """Prefill, chunk and decode; left padding too."""
    model, plain = kit.model_of(family, "pagedcache"), kit.model_of(family, "eager")
    ids, mask = kit.padded([20, 7, 13][:rows])
    more = [kit.prompt(5, rows, seed=1), kit.prompt(1, rows, seed=2)]
    with kit.pool_for(model) as pool, kit.paged(pool, ids, mask) as past:
        cache = DynamicCache()
        for part in (ids, *more):
            options, real = kit.padded_pass(part, past, mask)
            got = kit.forward(model, part, past, **options)
            want = kit.forward(plain, part, cache, **options)
            assert (got - want)[real].abs().max() < 2e-4  # scores of up to 30
    assert calls == {"attend": 9, "gather": 0}


@devicekit.cpu_memory("a model on the CPU reads pages of the CPU")
@pytest.mark.parametrize("changed", ["k", "v", "kv"])
@pytest.mark.parametrize("lengths", [[20], [20, 7, 13]])
def test_models_may_change_keys_and_values_behind_the_cache(
    lengths: list[int], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They attend to what they made of them, by the mask that was left to the pages."""
    model, plain = kit.model_of("llama", "pagedcache"), kit.model_of("llama", "eager")

    def change(update: Any) -> Any:
        def changing(self: Any, *args: Any, **options: Any) -> Any:
            k, v = update(self, *args, **options)
            return (k.flip(-1) if "k" in changed else k), (v * 0.5 if "v" in changed else v)

        return changing

    for layer in (DynamicLayer, PagedLayer):
        monkeypatch.setattr(layer, "update", change(layer.update))
    ids, mask = kit.padded(lengths)
    more = [kit.prompt(5, len(lengths), seed=1), kit.prompt(1, len(lengths), seed=2)]
    with kit.pool_for(model) as pool, kit.paged(pool, ids, mask) as past:
        cache = DynamicCache()
        for part in (ids, *more):
            options, real = kit.padded_pass(part, past, mask)
            got = kit.forward(model, part, past, **options)
            want = kit.forward(plain, part, cache, **options)
            assert (got - want)[real].abs().max() < 2e-4


def test_values_that_a_model_changes_behind_a_prefix_hit() -> None:
    """DiffLlama splits its values behind the cache and attends twice."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = kit.make_model("diffllama", **config)
    ids, found = kit.prompt(36), {}
    with kit.pool_for(model) as pool:
        for way in ("eager", "pagedcache", "pagedcache"):
            model.set_attn_implementation(way)
            with kit.paged(pool, ids, model=model) as past:
                got = kit.forward(model, ids[:, past.num_cached_tokens :], past)[:, -1]
                found[way, past.num_cached_tokens] = got
    assert len(found) == 2 and max(cached for _, cached in found) == 32
    values = list(found.values())
    assert (values[0] - values[1]).abs().max() < 1e-4


def test_no_mask_is_made_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.model_of("llama", "pagedcache")
    made: list[Any] = []
    layer = model.model.layers[0].self_attn
    inner = layer.forward

    def watched(*args: Any, **options: Any) -> Any:
        made.append(options["attention_mask"])
        return inner(*args, **options)

    monkeypatch.setattr(layer, "forward", watched)
    ids, mask = kit.padded([20, 7])
    with kit.pool_for(model) as pool, kit.paged(pool, ids, mask) as past:
        kit.generate(model, ids, past, attention_mask=mask, max_new_tokens=4)
    assert made == [None] * 4


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_every_other_implementation_gathers(way: str, calls: dict[str, int]) -> None:
    model = kit.model_of("llama", way)
    with kit.pool_for(model) as pool, kit.paged(pool) as past:
        kit.forward(model, kit.prompt(4), past)
    assert calls == {"attend": 0, "gather": 3}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("family", list(kit.FAMILIES))
def test_other_caches_work_under_the_same_name(
    family: str, cached: bool, calls: dict[str, int]
) -> None:
    model, plain = kit.model_of(family, "pagedcache"), kit.model_of(family, "eager")
    ids, mask = kit.padded([20, 7])
    options = {"attention_mask": mask, "max_new_tokens": 12, "use_cache": cached}
    got, want = kit.generate(model, ids, **options), kit.generate(plain, ids, **options)
    assert got.tolist() == want.tolist()
    assert calls == {"attend": 0, "gather": 0}


def test_a_mask_of_another_cache_is_not_taken_for_this_one(calls: dict[str, int]) -> None:
    """A model on DynamicCache runs in between, in the same thread."""
    paged, plain = kit.model_of("llama", "pagedcache"), kit.model_of("llama")
    ids = kit.prompt(9)
    with kit.pool_for(paged) as pool, kit.paged(pool) as past:
        past.get_mask_sizes(9 if kit.VERSION >= (5, 5) else torch.arange(9), 0)  # asked, not used
        cache = DynamicCache()
        want = kit.forward(plain, ids, cache)
        assert torch.equal(kit.forward(plain, ids, past), want)
        assert calls["attend"] == 0
        assert (kit.forward(paged, ids, DynamicCache()) - want).abs().max() < 1e-4
        assert calls["attend"] == 0


@devicekit.cpu_memory("a model on the CPU reads pages of the CPU")
@pytest.mark.parametrize("change", ["holes", "right", "4d", "dropout"])
def test_what_pages_cannot_express_is_gathered(change: str, calls: dict[str, int]) -> None:
    model, plain = kit.model_of("llama", "pagedcache"), kit.model_of("llama", "eager")
    ids = kit.prompt(12, rows=2)
    mask = torch.ones(2, 12, dtype=torch.long)
    if change == "holes":
        mask[0, 4:6] = 0
    elif change == "right":
        mask[1, 9:] = 0
    elif change == "4d":
        mask = torch.ones(12, 12).tril().bool()[None, None].repeat(2, 1, 1, 1)
        mask[:, :, 5:, 1] = False
    given = mask if mask.ndim == 2 else None
    with kit.pool_for(model) as pool, kit.paged(pool, ids, given) as past:
        shown = mask
        if change == "4d":
            shown = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        got = kit.forward(model, ids, past, attention_mask=mask)
        want = kit.forward(plain, ids, DynamicCache(), attention_mask=shown)
        real = torch.ones(2, 12, dtype=torch.bool) if given is None else given.bool()
        assert (got - want)[real].abs().max() < 1e-4
        if change == "dropout":
            assert calls == {"attend": 3, "gather": 0}
            q = torch.randn(2, 8, 12, 16)
            plan = masks.Plan(12, None)
            key, value = tensors.stand_ins(past._rows, 0, plan, q)
            module = plain.model.layers[0].self_attn
            out, _ = attention.paged_attention(module, q, key, value, None, dropout=1e-9)
            full = masks.causal_mask(12, 12, None, None, q.device)
            ref = torch.nn.functional.scaled_dot_product_attention(
                q, *(x.repeat_interleave(4, 1) for x in key.pages.gathered()), attn_mask=full
            )
            assert (out - ref.transpose(1, 2)).abs().max() < 1e-5
        else:
            assert calls == {"attend": 0, "gather": 6}


def test_a_window_of_some_layers_falls_back_for_them(calls: dict[str, int]) -> None:
    """A model whose configuration nobody checked: its windows are honoured all the same."""
    options = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    plain = kit.make_model("gemma2", **options)
    plain.set_attn_implementation("eager")
    model = kit.make_model("gemma2", **options)
    model.set_attn_implementation("pagedcache")
    ids, mask = kit.padded([30, 21])
    run = {"attention_mask": mask, "max_new_tokens": 10}
    want = kit.generate(plain, ids, **run)
    spec = kit.spec_for(kit.config_of("gemma2"), "float32")
    with pc.PagedKVCache(spec, 32) as pool, kit.paged(pool, ids, mask) as past:
        assert kit.generate(model, ids, past, **run).tolist() == want.tolist()
        kit.whole(pool)
    assert calls == {"attend": 2 * 10, "gather": 2 * 10}


# ---- the function itself --------------------------------------------------------------------


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor,
    scale: float, cap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention in float64, by its definition."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q.double() @ k.transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    weights = torch.exp(scores) * mask
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double())[None, :, None, None]
    return (weights / total @ v).transpose(1, 2)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(
    ("cap", "sunk", "window", "scale"),
    [(None, False, None, None), (2.0, False, None, 0.3), (None, True, None, None),
     (1.5, True, 6, 0.2), (None, False, 6, None)],
)  # fmt: skip
@pytest.mark.parametrize("starts", [None, [0, 7]])
def test_soft_cap_sinks_window_and_scaling(
    cap: float | None, sunk: bool, window: int | None, scale: float | None,
    starts: list[int] | None, paged: bool,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    spec = pc.CacheSpec(1, 2, 16, kv_format="float32")
    k, v = torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)
    q = torch.randn(2, 6, 5, 16)
    sinks = torch.randn(6) if sunk else None
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    mask = masks.causal_mask(5, 20, starts, window, q.device)
    options: dict[str, Any] = {"softcap": cap, "s_aux": sinks, "sliding_window": window}
    with pc.PagedKVCache(spec, 8) as pool, kit.paged(pool) as past:
        past.update(k, v, 0)
        if paged:
            key, value = tensors.stand_ins(past._rows, 0, masks.Plan(20, starts), q)
            out, weights = attention.paged_attention(
                module, q, key, value, None, scaling=scale, **options
            )
        else:
            out, weights = attention.paged_attention(
                module, q, k, v, mask, scaling=scale, **options
            )
    assert weights is None
    assert out.shape == (2, 5, 6, 16)
    expected = reference(q, k, v, mask, 0.25 if scale is None else scale, cap, sinks)
    assert (out - expected).abs().max() < 1e-5


def test_a_position_bias_goes_with_no_soft_cap() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    module = torch.nn.Module()
    with pytest.raises(pc.InvalidArgumentError, match="position_bias"):
        attention.paged_attention(
            module, q, k, k, None, softcap=2.0, position_bias=torch.zeros(1, 2, 3, 3)
        )


def test_stand_ins_are_the_values_for_everybody_else() -> None:
    torch.manual_seed(2)
    spec = pc.CacheSpec(1, 2, 16, kv_format="float32")
    k, v = torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    with pc.PagedKVCache(spec, 8) as pool, kit.paged(pool) as past:
        past.update(k, v, 0)
        key, value = tensors.stand_ins(past._rows, 0, masks.Plan(9, None), k)
        assert isinstance(key, torch.Tensor)
        assert (key.shape, key.dtype, key.device) == (k.shape, k.dtype, k.device)
        assert (key.ndim, key.size(2), key.dim()) == (4, 9, 4)
        assert key.pages._pair is None  # nothing was gathered to tell all this
        assert torch.equal(key + 0, k)
        assert torch.equal(value[:, 1], v[:, 1])
        assert torch.equal(torch.cat([key, value], dim=2), torch.cat([k, v], dim=2))
        q = torch.randn(2, 2, 4, 16)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        assert torch.equal(sdpa(q, key, value), sdpa(q, k, v))
        assert torch.equal(torch.einsum("bhtd,bhld->bhtl", q, key), q @ k.transpose(2, 3))
        assert torch.equal(key.contiguous(), k)
        assert torch.equal(torch.ops.aten.mul.Tensor(key, 2.0), k * 2)  # below torch's functions
        fresh, _ = tensors.stand_ins(past._rows, 0, masks.Plan(9, None), k)
        past.crop(3)
        with pytest.raises(pc.InvalidArgumentError, match="earlier forward pass"):
            fresh + 0


def test_left_padding_is_told_from_other_masks() -> None:
    import numpy as np

    def starts(rows: list[str]) -> list[int] | None:
        return masks.left_padding(np.array([[c == "1" for c in row] for row in rows]))

    assert starts(["1111", "0011", "0001"]) == [0, 2, 3]
    assert starts(["1111", "0110"]) is None
    assert starts(["1101"]) is None
    assert starts(["0000"]) is None  # a row without tokens

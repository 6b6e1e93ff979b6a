"""A real model on quantised keys and values: what an independent quantiser would give, and how far
that is from float32."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformerskit as kit
from quantisedkit import Quantised
from smollm2kit import Real, paragraph
from transformers import DynamicCache

BLOCK = 32
TOKENS = 96  # full blocks of one prompt: quantised as they come, none is open
FORMATS = ["float16", "q8", "q8_0", "q4", "q4_0", "q4_1", "q4k"]


def logits(real: Real, ids: Any, past: Any) -> Any:
    return kit.forward(real.model, ids, past)[0].double()


def rms(x: Any) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("kv_format", FORMATS)
def test_logits_are_those_of_an_independent_quantiser(smollm2: Real, kv_format: str) -> None:
    """Gathered: the same numbers go the same way through the same model, so every bit is the same.

    Read from the pages, attention sums in another order. A value of the next layer that then falls
    on the other side of a rounding is off by a whole step, which moves more of them, so that after
    some layers the errors of quantising are other ones of the same size: logits then differ from
    the oracle's by at most what two independent errors do, sqrt(2) of one, and from float32's by
    as much as the oracle's do."""
    ids = smollm2.ids(paragraph(2))[:, :TOKENS]
    exact = logits(smollm2, ids, DynamicCache())
    expected = logits(smollm2, ids, Quantised(kv_format, BLOCK))
    moved = rms(expected - exact)
    assert moved > 1e-4  # the format does something
    got = {}
    for way in ("sdpa", "pagedcache"):
        smollm2.model.set_attn_implementation(way)
        with kit.pool_for(smollm2.model, 8, kv_format, block_size=BLOCK) as pool:
            with kit.paged(pool, model=smollm2.model, exact_prompts=False) as past:
                got[way] = logits(smollm2, ids, past)
    assert torch.equal(got["sdpa"], expected)
    assert rms(got["pagedcache"] - expected) < 1.5 * moved
    assert 0.6 < rms(got["pagedcache"] - exact) / moved < 1.6


def test_logits_move_as_far_as_keys_and_values_do(smollm2: Real) -> None:
    """Small errors of K and V act linearly, and independent ones add by their squares: so logits
    move in proportion to the relative error of what is stored. float16 gives the factor; q8_0 has
    errors some 30 times larger, and must move logits by no more than as many times as K or V."""
    ids = smollm2.ids(paragraph(2))[:, :TOKENS]
    expected = logits(smollm2, ids, exact := DynamicCache())
    moved, errors = {}, {}
    for name in ("float16", "q8_0"):
        with kit.pool_for(smollm2.model, 8, name, block_size=BLOCK) as pool:
            with kit.paged(pool, model=smollm2.model, exact_prompts=False) as past:
                moved[name] = rms(logits(smollm2, ids, past) - expected)
                pairs = zip(first_layer(past), first_layer(exact), strict=True)  # the same input
                errors[name] = [rms(got - given) / rms(given) for got, given in pairs]
    growth = [big / small for small, big in zip(errors["float16"], errors["q8_0"], strict=True)]
    assert min(growth) > 10
    ratio = moved["q8_0"] / moved["float16"]
    assert min(growth) / 2 < ratio < max(growth) * 2


def first_layer(past: Any) -> tuple[Any, Any]:
    layer = past.layers[0]
    return layer.keys.double(), layer.values.double()


@pytest.mark.parametrize("way", ["sdpa", "pagedcache"])
@pytest.mark.parametrize(("kv_format", "agreeing"), [("q8_0", 0.95), ("q4k", 0.85)])
def test_the_next_token_is_nearly_always_the_same(
    smollm2: Real, kv_format: str, agreeing: float, way: str
) -> None:
    """Over the tokens of a text, fed a few at a time as in a conversation (open blocks at work)."""
    ids = smollm2.ids(paragraph(4))[:, :120]
    expected = logits(smollm2, ids, DynamicCache())
    smollm2.model.set_attn_implementation(way)
    with kit.pool_for(smollm2.model, 16, kv_format, block_size=16) as pool:
        with kit.paged(pool, model=smollm2.model) as past:
            parts = [kit.forward(smollm2.model, part, past) for part in ids.split(6, 1)]
            kit.whole(pool)
    got = torch.cat(parts, 1)[0].double()
    same = (got.argmax(1) == expected.argmax(1)).double().mean().item()
    assert same >= agreeing


@pytest.mark.parametrize("way", ["sdpa", "pagedcache"])
@pytest.mark.parametrize("kv_format", ["q8_0", "q4k"])
def test_it_generates_with_quantised_pages(smollm2: Real, kv_format: str, way: str) -> None:
    """What it says is text and not noise: the model in float32 finds it about as likely as what it
    says itself."""
    ids = smollm2.ids(paragraph(7))
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "attention_mask": torch.ones_like(ids)}
    best = loss(smollm2, kit.generate(smollm2.model, ids, DynamicCache(), **options), ids.shape[1])
    smollm2.model.set_attn_implementation(way)
    with kit.pool_for(smollm2.model, 32, kv_format) as pool:
        with kit.paged(pool, ids, model=smollm2.model) as past:
            said = kit.generate(smollm2.model, ids, past, **options)
            kit.whole(pool)
    assert said.shape[1] == ids.shape[1] + 20
    smollm2.model.set_attn_implementation("sdpa")
    assert loss(smollm2, said, ids.shape[1]) < best + 0.5  # a token at random costs 10 and more


def loss(real: Real, ids: Any, start: int) -> float:
    """Mean negative log-likelihood of the tokens from ``start`` on, in nats."""
    rows = logits(real, ids, DynamicCache())[start - 1 : -1]
    return float(torch.nn.functional.cross_entropy(rows, ids[0, start:]))

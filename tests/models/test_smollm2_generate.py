"""A real model says the same on a ``PagedCache`` as on a ``DynamicCache``, in float32."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformerskit as kit
from smollm2kit import Real, paragraph
from transformers import DynamicCache

WAYS = ["sdpa", "pagedcache"]  # gathered keys and values; the pages themselves


def both(real: Real, way: str, ids: Any, mask: Any = None, **options: Any) -> tuple[Any, Any]:
    """What it generates with a DynamicCache (by sdpa), and with a PagedCache."""
    model = real.model
    options["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    expected = kit.generate(model, ids, DynamicCache(), **options)
    model.set_attn_implementation(way)
    with kit.pool_for(model, 320) as pool, kit.paged(pool, ids, mask, model=model) as past:
        got = kit.generate(model, ids, past, **options)
        kit.whole(pool)
        assert past.get_seq_length() == got.shape[1] - 1  # the last token was not fed
    return expected, got


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [0, 7])
def test_greedy(smollm2: Real, way: str, number: int) -> None:
    ids = smollm2.ids(paragraph(number))
    expected, got = both(smollm2, way, ids, max_new_tokens=40, min_new_tokens=40)
    assert got.tolist() == expected.tolist()
    assert len(set(got[0, ids.shape[1] :].tolist())) > 10  # sentences, not one word


@pytest.mark.parametrize("way", WAYS)
def test_logits_of_a_prompt(smollm2: Real, way: str) -> None:
    """In chunks of other lengths than blocks have. Attention sums in another order: float32
    rounding, 2^-24 of values of size 20 at each of some 100 additions in a row of layers."""
    ids = smollm2.ids(paragraph(3))[:, :101]
    with torch.no_grad():
        expected = smollm2.model(ids).logits
    smollm2.model.set_attn_implementation(way)
    with kit.pool_for(smollm2.model) as pool, kit.paged(pool, ids, model=smollm2.model) as past:
        parts = [kit.forward(smollm2.model, part, past) for part in ids.split([7, 64, 1, 29], 1)]
    off = (torch.cat(parts, 1) - expected).abs().max().item()
    assert off < 100 * 20 * 2**-24 * 10


@pytest.mark.parametrize("way", WAYS)
def test_batch_with_left_padding(smollm2: Real, way: str) -> None:
    texts = [paragraph(1)[:400], paragraph(2)[:150], "Alice was"]
    batch = smollm2.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    ids, mask = batch.input_ids, batch.attention_mask
    assert mask[0].all() and not mask[1:, 0].any()  # one row full, two padded on the left
    expected, got = both(smollm2, way, ids, mask, max_new_tokens=24, min_new_tokens=24)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_beam_search(smollm2: Real, way: str) -> None:
    ids = smollm2.ids(paragraph(5))[:, :60]
    expected, got = both(smollm2, way, ids, num_beams=3, max_new_tokens=20, num_return_sequences=3)
    assert got.tolist() == expected.tolist()
    assert len({tuple(row) for row in got.tolist()}) == 3


@pytest.mark.parametrize("way", WAYS)
def test_sampling_with_a_seed(smollm2: Real, way: str) -> None:
    ids = smollm2.ids("The Queen of Hearts said to Alice:")
    options = {"do_sample": True, "temperature": 0.8, "top_k": 50, "max_new_tokens": 24}
    expected, got = [], []
    model = smollm2.model
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected += kit.generate(model, ids, DynamicCache(), **options).tolist()
    model.set_attn_implementation(way)
    with kit.pool_for(model) as pool:
        for seed in (1, 2):
            torch.manual_seed(seed)
            with kit.paged(pool, ids, model=model) as past:
                got += kit.generate(model, ids, past, **options).tolist()
                # The second run finds the prompt, and leaves one token of it to compute.
                assert past.num_cached_tokens == (0 if seed == 1 else ids.shape[1] - 1)
    assert got == expected and got[0] != got[1]

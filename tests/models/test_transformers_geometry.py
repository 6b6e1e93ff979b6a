"""``spec_for``: the spec of a model, and the models that one pool cannot hold."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
import transformerskit as kit
from transformers import DynamicCache

import pagedcache as pc
from pagedcache.integrations.transformers import spec_for


@pytest.mark.parametrize("family", list(kit.FAMILIES))
def test_the_spec_is_what_the_model_writes(family: str) -> None:
    model = kit.model_of(family, "eager")
    plain = DynamicCache()
    kit.forward(model, kit.prompt(5), plain)
    keys = plain.layers[0].keys
    for source in (model, model.config):
        spec = spec_for(source, "q8_0", 32, max_seq_len=100)
        assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (
            len(plain.layers), keys.shape[1], keys.shape[3],
        )  # fmt: skip
        assert (spec.block_size, spec.max_seq_len) == (32, 100)
        assert spec.kv_format == pc.get_format("q8_0")
    assert spec_for(model, k_format="q8", v_format="q4").v_format.name == "q4"
    assert spec_for(model) == pc.CacheSpec(len(plain.layers), keys.shape[1], keys.shape[3])


def config(name: str, **options: Any) -> Any:
    return getattr(transformers, name)(**options)


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


def test_one_kv_head_for_all() -> None:
    falcon = config(
        "FalconConfig", num_hidden_layers=2, num_attention_heads=4, hidden_size=64,
        multi_query=True, new_decoder_architecture=False,
    )  # fmt: skip
    assert spec_for(falcon).num_kv_heads == 1
    bigcode = config("GPTBigCodeConfig", n_layer=2, n_head=4, n_embd=64, multi_query=True)
    assert spec_for(bigcode).num_kv_heads == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FalconConfig", {"num_kv_heads": 2, "new_decoder_architecture": True}),
        ("FalconConfig", {"multi_query": True, "new_decoder_architecture": False}),
        ("FalconConfig", {"multi_query": False, "new_decoder_architecture": False}),
        ("PersimmonConfig", {"num_key_value_heads": 2}),
        ("BertConfig", {"is_decoder": True}),
    ],
)
def test_the_spec_is_what_unusual_models_write(name: str, options: Any) -> None:
    """Some repeat their K and V for every query head before these are cached."""
    given = {"vocab_size": kit.VOCAB, "pad_token_id": 0, **SMALL, **options}
    model = transformers.AutoModelForCausalLM.from_config(config(name, **given)).eval()
    ids, cache = kit.prompt(7), transformers.DynamicCache()
    want = kit.forward(model, ids, cache)
    assert spec_for(model).num_kv_heads == cache.layers[0].keys.shape[1]
    with kit.pool_for(model) as pool, kit.paged(pool, ids, model=model) as past:
        assert (kit.forward(model, ids, past) - want).abs().max() < 1e-4


def test_the_text_part_of_a_multimodal_model() -> None:
    text = kit.config_of("llama")
    vision = config("CLIPVisionConfig", hidden_size=32, num_hidden_layers=5, num_attention_heads=2)
    both = config("LlavaConfig", text_config=text, vision_config=vision)
    assert spec_for(both) == spec_for(text)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("T5Config", {}, "encoder-decoder"),
        ("BertConfig", {}, "an encoder"),
        ("XLMRobertaConfig", {}, "an encoder"),
        ("XLNetConfig", {}, "no keys and values"),
        ("MistralConfig", {**SMALL, "num_key_value_heads": 2, "sliding_window": 16}, "16 tokens"),
        ("Gemma2Config", {**SMALL, "num_key_value_heads": 2}, "sliding_attention"),
        ("Gemma3TextConfig", {**SMALL, "num_key_value_heads": 2}, "sliding_attention"),
        ("GptOssConfig", {**SMALL, "num_key_value_heads": 2}, "sliding_attention"),
        ("Llama4TextConfig", {**SMALL, "num_key_value_heads": 2}, "chunked_attention"),
        ("Qwen3NextConfig", {**SMALL, "num_key_value_heads": 2}, "linear_attention"),
        ("JambaConfig", {**SMALL, "num_key_value_heads": 2}, "Cannot|hybrid|layers"),
        ("MambaConfig", {"num_hidden_layers": 2, "hidden_size": 64}, "state-space|linear_att"),
        ("DeepseekV3Config", {"num_hidden_layers": 2}, "latent"),
    ],
)
def test_models_that_one_pool_cannot_hold(name: str, options: Any, words: str) -> None:
    with pytest.raises(pc.InvalidArgumentError, match=words) as error:
        spec_for(config(name, **options))
    assert "supported are decoder-only models whose layers all have full attention" in str(
        error.value
    )


def test_a_window_that_is_not_used_is_none() -> None:
    qwen = config(
        "Qwen2Config", **SMALL, num_key_value_heads=2, use_sliding_window=False, sliding_window=16
    )
    assert spec_for(qwen).num_kv_heads == 2


def test_layers_that_differ() -> None:
    """In the configuration (a list, or one of its own for a layer) or in the modules."""
    listed = {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}
    with pytest.raises(pc.InvalidArgumentError, match=r"differ in num_key_value_heads: \[2, 2, 4"):
        spec_for(config("PretrainedConfig", **listed, num_key_value_heads=[2, 2, 4]))
    assert spec_for(config("PretrainedConfig", **listed, num_key_value_heads=[2, 2, 2])) == (
        pc.CacheSpec(3, 2, 16)
    )
    model = kit.make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(64, 4 * 16)
    with pytest.raises(pc.InvalidArgumentError, match="layers.1.self_attn makes K of 64 values"):
        spec_for(model)
    attention.head_dim = 8
    with pytest.raises(pc.InvalidArgumentError, match="layers.1.self_attn has head_dim 8"):
        spec_for(model)


@pytest.mark.skipif(kit.VERSION < (5, 24), reason="transformers has no per_layer_config")
def test_layers_with_configurations_of_their_own() -> None:
    alike = kit.config_of("llama", per_layer_config={1: {"intermediate_size": 48}})
    assert spec_for(alike) == spec_for(kit.config_of("llama"))
    other = kit.config_of("llama", per_layer_config={1: {"num_key_value_heads": 4}})
    with pytest.raises(pc.InvalidArgumentError, match=r"differ in KV heads: \[2, 4\]"):
        spec_for(other)


def test_layers_that_differ_are_refused_before_a_byte_of_them_is_written() -> None:
    """The shapes that ``update`` sees, where no model was given."""
    pool = pc.PagedKVCache(pc.CacheSpec(2, 2, 16, kv_format="float32"), 8)
    good, bad = torch.ones(1, 2, 3, 16), torch.ones(1, 4, 3, 16)
    with pool, kit.paged(pool, [[5, 6, 7]]) as past:
        past.update(good, good, 0)
        for wrong in (bad, torch.ones(1, 2, 3, 8), torch.ones(2, 3, 16)):
            with pytest.raises(pc.ShapeError, match="layer 1"):
                past.update(wrong, wrong, 1)
        with pytest.raises(pc.ShapeError, match="layer 1"):
            past.update(good, good[..., :8], 1)
        with pytest.raises(pc.ShapeError, match="1 rows of 3 tokens"):
            past.update(good[:, :, :2], good[:, :, :2], 1)
        with pytest.raises(pc.FormatError, match="float64"):
            past.update(good.double(), good.double(), 1)
        with pytest.raises(pc.InvalidArgumentError, match="layer 2"):
            past.update(good, good, 2)
        assert past.layers[1].get_seq_length() == 0
        assert pool.num_cached_blocks == 0
        kit.whole(pool)


def test_what_is_no_model() -> None:
    llama = kit.config_of("llama")
    with pc.PagedKVCache(spec_for(llama), 8) as pool:
        for wrong in (llama, "llama", 7):
            with pytest.raises(pc.InvalidArgumentError, match="the model itself"):
                kit.paged(pool, model=wrong)
    with pytest.raises(pc.FormatError, match="str"):
        spec_for("llama")
    with pytest.raises(pc.InvalidArgumentError):
        spec_for(kit.config_of("llama"), block_size=0)

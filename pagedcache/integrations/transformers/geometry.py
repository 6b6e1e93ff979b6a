"""What a model's configuration says about its KV cache, and whether one pool can hold it.

One pool has one geometry: every layer the same number of KV heads and the same ``head_dim``, K and
V alike, and every layer attends to all earlier tokens. Whatever keeps another state (a sliding
window, a convolution, a recurrent state, a compressed latent) is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from pagedcache.errors import FormatError, InvalidArgumentError, ShapeError
from pagedcache.spec import CacheSpec

_SUPPORTED = (
    "decoder-only models whose layers all have full attention, with one number of KV heads and "
    "one head_dim (K and V alike)"
)

# Attributes by which configurations without layer_types name layers of another kind.
_LAYER_LISTS = ("layers_block_type", "block_types", "_block_types", "attn_layer_indices")
# ... and by which they say that layers keep a state that is no K and V of every token.
_OTHER_STATE = {
    "kv_lora_rank": "multi-head latent attention (K and V of different sizes)",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "num_kv_shared_layers": "layers that share another layer's K and V",
    "kv_sharing_modes": "layers that share another layer's K and V",
}
# Models without keys and values of all tokens before.
_NO_CACHE = {"xlnet", "xlm", "reformer"}


class Geometry(NamedTuple):
    """The part of a ``CacheSpec`` that a model decides."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def spec_for(
    model_or_config: Any,
    kv_format: Any = None,
    block_size: int = 16,
    **options: Any,
) -> CacheSpec:
    """The ``CacheSpec`` of a Hugging Face model, or of its configuration.

    ``kv_format``, ``block_size`` and ``options`` (``k_format``, ``v_format``, ``layout``,
    ``max_seq_len``, ``on_nonfinite``, …) are those of ``CacheSpec``. ``"q8_0"`` is the recommended
    format of 8 bits, ``"float32"`` gives the very numbers of ``DynamicCache``.

    Raises ``InvalidArgumentError`` for a model that one pool cannot hold: encoder-decoder,
    sliding-window, chunked, hybrid or linear-attention layers, layers that differ in KV heads or
    ``head_dim``; ``FormatError`` for an object that is no model and no configuration; and what
    ``CacheSpec`` raises.
    """
    geometry = geometry_of(model_or_config)
    return CacheSpec(*geometry, block_size=block_size, kv_format=kv_format, **options)


def check_model(model_or_config: Any, spec: CacheSpec) -> None:
    """Raise ``ShapeError`` unless ``spec`` has the model's geometry; also what ``geometry_of``
    raises."""
    needed = geometry_of(model_or_config)
    for name, value in needed._asdict().items():
        if getattr(spec, name) != value:
            raise ShapeError(
                f"{name} {value}, as the model has (spec_for(model) makes the spec)",
                f"{getattr(spec, name)} in the spec of the pool",
                "model",
            )


def geometry_of(model_or_config: Any) -> Geometry:
    """Layers, KV heads and ``head_dim``; raises as ``spec_for`` does."""
    config = getattr(model_or_config, "config", model_or_config)
    if not hasattr(config, "get_text_config"):
        kind = type(model_or_config).__name__
        raise FormatError("a transformers model or its configuration", kind, "model_or_config")
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(config, "it is an encoder-decoder model (cross-attention)")
    kind = getattr(config, "model_type", "")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise _refused(config, "it is an encoder (is_decoder is not set)")
    if kind in _NO_CACHE:
        raise _refused(config, "it keeps no keys and values of the tokens before")
    text = config.get_text_config(decoder=True)
    layers = _layer_configs(text)
    for layer in {id(layer): layer for layer in layers}.values():
        _refuse_other_layers(layer)
    heads = {_kv_heads(layer) for layer in layers}
    dims = {_head_dim(layer) for layer in layers}
    for name, values in (("KV heads", heads), ("head_dim", dims)):
        if len(values) > 1:
            raise _refused(text, f"its layers differ in {name}: {sorted(values)}")
    geometry = Geometry(len(layers), heads.pop(), dims.pop())
    _check_modules(model_or_config, text, geometry)
    return geometry


def _refuse_other_layers(config: Any) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        other = sorted({str(kind) for kind in kinds} - {"full_attention"})
        if other:
            raise _refused(config, f"it has layers of type {', '.join(other)}")
    else:
        window = getattr(config, "sliding_window", None)
        if window is not None and getattr(config, "use_sliding_window", True):
            raise _refused(config, f"its layers attend to a sliding window of {window} tokens")
        chunk = getattr(config, "attention_chunk_size", None)
        if chunk is not None:
            raise _refused(config, f"its layers attend to chunks of {chunk} tokens")
    for name in _LAYER_LISTS:
        if getattr(config, name, None):
            raise _refused(config, f"it is a hybrid of several kinds of layers ({name})")
    for name, what in _OTHER_STATE.items():
        if getattr(config, name, None):
            raise _refused(config, f"it has {what} ({name})")


def _layer_configs(config: Any) -> list[Any]:
    """One configuration per layer; transformers 5 can say what single layers have of their own."""
    number = getattr(config, "num_hidden_layers", None)
    if not isinstance(number, int) or number < 1:
        raise _refused(config, f"num_hidden_layers is {number!r}")
    if getattr(config, "block_configs", None):
        raise _refused(config, "its layers have configurations of their own (block_configs)")
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * number


def _kv_heads(config: Any) -> int:
    kind = getattr(config, "model_type", "")
    repeats = kind == "falcon" and getattr(config, "new_decoder_architecture", False)
    if repeats or kind == "persimmon":  # every query head gets K and V before they are cached
        return _one(config, "num_attention_heads", config.num_attention_heads)
    if getattr(config, "multi_query", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        value = getattr(config, name, None)
        if value is not None:
            return _one(config, name, value)
    return _one(config, "num_attention_heads", getattr(config, "num_attention_heads", None))


def _head_dim(config: Any) -> int:
    value = getattr(config, "head_dim", None)
    if value is not None:
        return _one(config, "head_dim", value)
    width = getattr(config, "hidden_size", None)
    heads = _one(config, "num_attention_heads", getattr(config, "num_attention_heads", None))
    return _one(config, "hidden_size", width) // heads


def _one(config: Any, name: str, value: Any) -> int:
    """A positive number that a configuration gives once, or alike for every layer."""
    if isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise _refused(config, f"its layers differ in {name}: {list(value)}")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise _refused(config, f"{name} is {value!r}")
    return value


def _check_modules(model: Any, config: Any, geometry: Geometry) -> None:
    """Where a model was given: its attention modules must be what its configuration says."""
    for name, module in getattr(model, "named_modules", list)():
        if getattr(module, "layer_idx", None) is None:
            continue
        dim = getattr(module, "head_dim", None)
        if isinstance(dim, int) and dim != geometry.head_dim:
            raise _refused(config, f"{name} has head_dim {dim}, others {geometry.head_dim}")
        width = getattr(getattr(module, "k_proj", None), "out_features", None)
        if isinstance(width, int) and width != geometry.num_kv_heads * geometry.head_dim:
            raise _refused(
                config,
                f"{name} makes K of {width} values, others of "
                f"{geometry.num_kv_heads} heads * {geometry.head_dim}",
            )


def _refused(config: Any, reason: str) -> InvalidArgumentError:
    kind = getattr(config, "model_type", "") or type(config).__name__
    return InvalidArgumentError(
        f"{kind}: {reason}, which PagedCache cannot hold; supported are {_SUPPORTED}"
    )

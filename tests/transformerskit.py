"""Tiny models with random weights, and runs of ``generate`` on them, for tests/models.

Imported only where torch and transformers are installed. Everything is seeded, float32, and on one
thread of torch: two collapse on a busy machine.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import devicekit
import torch
import transformers

import pagedcache as pc
from pagedcache.integrations.transformers import PagedCache, spec_for

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)

VOCAB = 97
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What makes a configuration of each family; grouped-query heads unless said.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": None},
    "gemma": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24},
    "gemma2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,  # a scaling of its own
        "attn_logit_softcapping": 3.0,  # low enough to bend these scores
        "layer_types": ["full_attention"] * 3,
        "sliding_window": 8,  # no layer uses it, the model makes its mask all the same
    },
    "gpt2": {"n_head": 4, "n_embd": 64, "n_layer": 3, "n_positions": 512},
}

_CLASSES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral",
    "gemma": "Gemma", "gemma2": "Gemma2", "gpt2": "GPT2", "diffllama": "DiffLlama",
}  # fmt: skip


def config_of(family: str, **changes: Any) -> Any:
    """A small configuration of a family."""
    options = {**FAMILIES.get(family, {}), **changes}
    if family == "gpt2":
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"):
            options.setdefault(name, _COMMON[name])
    else:
        options = {**_COMMON, **options}
    return getattr(transformers, f"{_CLASSES[family]}Config")(**options)


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of its own; weights large enough that greedy choices are far apart."""
    torch.manual_seed(seed)
    kind = _CLASSES[family] + ("LMHeadModel" if family == "gpt2" else "ForCausalLM")
    model = getattr(transformers, kind)(config_of(family, **changes)).eval().float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1 and "norm" not in name:
                weights.copy_(torch.randn_like(weights) * 1.5 / weights.shape[-1] ** 0.5)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # run to the length asked for
    model.generation_config.do_sample = False
    return model


def noisy(model: Any) -> Any:
    """Nearly the same model: as an assistant, some of its drafts are accepted, some are not."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weights in model.parameters():
            noise = torch.randn(weights.shape, generator=generator)
            weights += noise * 0.02 * weights.std()
    return model


@cache
def model_of(family: str, attention: str = "sdpa") -> Any:
    """A model shared by the tests of a process; the same weights for every ``attention``."""
    model = make_model(family)
    model.set_attn_implementation(attention)
    return model


def prompt(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids ``[rows, length]`` that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch padded on the left, and its mask."""
    ids = prompt(max(lengths), len(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return ids, mask


@contextlib.contextmanager
def pool_for(
    model: Any, num_blocks: int = 96, kv_format: Any = "float32", **options: Any
) -> Iterator[pc.PagedKVCache]:
    """A pool that must be whole and empty again at the end."""
    spec = spec_for(model, kv_format, **options)
    device = devicekit.placement(spec.num_layers)  # PAGEDCACHE_TEST_DEVICE; the model is on the CPU
    with pc.PagedKVCache(spec, num_blocks, device=device) as pool:
        yield pool
        whole(pool, empty=True)


def whole(pool: pc.PagedKVCache, *, empty: bool = False) -> None:
    """The bookkeeping agrees; with ``empty`` every block is free again."""
    pool.check()
    if empty:
        assert pool.stats().sequences_active == 0
        assert pool.num_free_blocks == pool.num_blocks


def generate(model: Any, ids: torch.Tensor, past: Any = None, **options: Any) -> torch.Tensor:
    """``model.generate`` with the cache under the name that this version wants."""
    if past is not None:
        options["cache" if VERSION >= (5, 24) else "past_key_values"] = past
    return model.generate(ids, **options)


def forward(model: Any, ids: torch.Tensor, past: Any, **options: Any) -> torch.Tensor:
    """Logits of one forward pass."""
    options["cache" if VERSION >= (5, 24) else "past_key_values"] = past
    with torch.no_grad():
        return model(ids, use_cache=True, **options).logits


def padded_pass(
    part: torch.Tensor, past: Any, mask: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Mask and positions of a pass behind ``past``, whose prompt was padded like ``mask``; and
    which tokens of ``part`` are none of the padding."""
    seen = past.get_seq_length() + part.shape[1]
    shown = torch.nn.functional.pad(mask, (0, seen - mask.shape[1]), value=1)
    positions = (shown.cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
    options = {"attention_mask": shown, "position_ids": positions}
    return options, shown[:, -part.shape[1] :].bool()


def counted_calls(monkeypatch: Any) -> dict[str, int]:
    """How often pages were read by attention, and gathered, from now on."""
    counts = {"attend": 0, "gather": 0}

    def count(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return call(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(pc.PagedKVCache, "attend")
    count(pc.Sequence, "gather")
    return counts


@contextlib.contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """How many tokens of each row every forward pass of ``model`` computes."""
    counts: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        counts.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    hook.remove()


def paged(pool: pc.PagedKVCache, *args: Any, **options: Any) -> PagedCache:
    """A ``PagedCache`` (kept short for the tests)."""
    return PagedCache(pool, *args, **options)

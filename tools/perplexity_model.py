"""The model of ``perplexity.py``: how it is loaded, and its losses with K and V in a cache."""

from __future__ import annotations

import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from perplexity_cases import Case
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import pagedcache as pc
from pagedcache.integrations.transformers import PagedCache, spec_for

Array = np.ndarray[Any, Any]

_TOKENS_PER_PASS = 512  # logits of one pass: 100 MB with a vocabulary of 49,152


def find_gguf(name: str) -> Path | None:
    """The GGUF file that ``name`` is, or that the installed package ``name`` carries."""
    if name.endswith(".gguf"):
        return Path(name)
    if not name.isidentifier():
        return None
    spec = importlib.util.find_spec(name)  # does not import it
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def load(name: str, dtype: str = "float32", threads: int = 1) -> tuple[Any, Any]:
    """``(model, tokenizer)``, in evaluation mode. Raises ``SystemExit`` for an unknown dtype."""
    if threads:
        torch.set_num_threads(threads)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise SystemExit(f"--dtype: torch has no {dtype!r}")
    options: dict[str, Any] = {}
    file = find_gguf(name)
    if file is not None:
        if not file.is_file():
            raise SystemExit(f"{file}: no such file")
        name, options["gguf_file"] = str(file.parent), file.name
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all of it is in the file
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=kind, **options)
    return model.eval(), tokenizer


def windows_of(tokenizer: Any, text: str, tokens: int, window: int) -> Array:
    """The first ``tokens`` tokens as int64 ``[windows, window]``; a rest that fills none is left.

    Raises ``SystemExit`` for a text too short for one window, and for windows without prediction.
    """
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)[:tokens]
    count = len(ids) // window
    if count < 1 or window < 2:
        raise SystemExit(f"{len(ids)} tokens make no window of {window} (2 at least)")
    return ids[: count * window].reshape(count, window)


def losses_of(
    model: Any, windows: Array, case: Case, *, attention: str = "auto", batch: int = 0
) -> tuple[Array, pc.CacheSpec]:
    """Negative log-likelihood in nats of all tokens but each window's first, float64
    ``[windows, window - 1]``, with K and V stored as ``case`` says; and the spec of the cache."""
    count, length = windows.shape
    step = min(case.chunk or length, length)
    batch = min(batch or max(1, _TOKENS_PER_PASS // step), count)
    geometry = spec_for(model)
    spec = case.spec(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    num_blocks = batch * -(-length // spec.block_size)
    # The last block, the one before it, and a third while a step crosses into it.
    num_open = 3 * batch if spec.has_open_blocks else None
    if attention == "auto":  # each where it is faster
        attention = "sdpa" if step == length else "pagedcache"
    model.set_attn_implementation(attention)
    out = np.empty((count, length - 1))
    with (
        pc.PagedKVCache(
            spec, num_blocks, device=_device(model), num_open_blocks=num_open
        ) as pool,
        tqdm(total=windows.size, desc=case.label, unit=" tokens", leave=False, disable=None) as bar,
    ):
        for first in range(0, count, batch):
            part = torch.from_numpy(windows[first : first + batch]).to(model.device)
            # Without input_ids nothing gets a name, so that no window finds another's blocks.
            with PagedCache(pool, exact_prompts=case.exact) as past:
                for start in range(0, length, step):
                    losses = _losses(model, past, part, start, min(start + step, length))
                    out[first : first + len(part), start : start + losses.shape[1]] = losses
                    bar.update(len(part) * (min(start + step, length) - start))
    return out, spec


@torch.inference_mode()
def _losses(model: Any, past: PagedCache, ids: torch.Tensor, start: int, stop: int) -> Array:
    """Losses of tokens ``start + 1 … stop`` (less one behind the end), from one forward pass."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = model(ids[:, start:stop], use_cache=True, **{name: past}).logits
    targets = ids[:, start + 1 : stop + 1, None]
    logits = logits[:, : targets.shape[1]].float()
    chosen = logits.gather(2, targets)[..., 0].double()
    return (logits.logsumexp(2).double() - chosen).cpu().numpy()


def _device(model: Any) -> str:
    """Where the cache's layers go: with the model; models spread over devices are not split."""
    return "cpu" if model.device.type == "cpu" else f"cuda:{model.device.index or 0}"

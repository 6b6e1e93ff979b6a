"""Optional packages to compare with: imported when installed, ``None`` otherwise."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from types import ModuleType
from typing import Any

from ..output import note
from . import ggml_peer

_threads = 1


@cache
def optional(name: str) -> ModuleType | None:
    """The module ``name``, or ``None`` (with a note on stderr) when it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a half-installed peer must not stop the benchmark
        note(f"peer {name}: not used ({type(error).__name__}: {error})")
        return None


@cache
def torch() -> Any:
    """PyTorch, told to use as many threads as everybody else, or ``None``."""
    module = optional("torch")
    if module is not None:
        module.set_num_threads(_threads)
    return module


def use_threads(count: int) -> None:
    """Let torch, and vLLM through it, use ``count`` threads, now or as soon as it is loaded."""
    global _threads
    _threads = count
    module = sys.modules.get("torch")
    if module is not None:
        module.set_num_threads(count)


@cache
def ggml() -> ggml_peer.Ggml | None:
    """ggml's own kernels, or ``None`` (with a note on stderr) where no package brings them."""
    try:
        return ggml_peer.find()
    except ImportError as error:
        note(f"peer ggml: not used ({error})")
        return None


@cache
def gguf_types() -> dict[str, Any]:
    """gguf's quantisation types by our format names; empty when gguf is not installed.

    q8 and q4 differ from ggml's formats in their scale, not in the work: they are compared with
    the nearest one.
    """
    if optional("gguf") is None:
        return {}
    types = importlib.import_module("gguf").GGMLQuantizationType
    names = {"q8": "Q8_0", "q4": "Q4_0", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
    return {ours: getattr(types, theirs) for ours, theirs in names.items()}


@cache
def vllm() -> Any:
    """Our adapter around vLLM's block pool and cache manager, or ``None``."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if optional("vllm.v1.core.kv_cache_manager") is None:
        return None
    try:
        from . import vllm_peer

        vllm_peer.self_check()
    except Exception as error:  # another version with another API
        note(f"peer vllm: not used ({type(error).__name__}: {error})")
        return None
    return vllm_peer

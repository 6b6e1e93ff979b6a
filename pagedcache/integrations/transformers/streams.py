"""The CUDA stream that torch works on, as the pool's calls take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def stream_of(pool: Any) -> Callable[[], Any]:
    """A function that gives the current stream: None where every layer is on the CPU, a handle for
    one GPU, a mapping from device names to handles for several."""
    gpus = sorted(set(pool.devices) - {"cpu"})
    if not gpus:
        return _none
    if len(gpus) == 1:
        return lambda: _current(gpus[0])
    return lambda: {name: _current(name) for name in gpus}


def _none() -> None:
    return None


def _current(device: str) -> int | None:
    if not torch.cuda.is_available():
        return None  # torch works on the CPU only: the pool's default stream
    return int(torch.cuda.current_stream(torch.device(device)).cuda_stream)

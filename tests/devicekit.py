"""The device that the tests put their caches on, and arrays on their way back from it.

``PAGEDCACHE_TEST_DEVICE`` names it: ``cpu`` (the default), ``cuda:0``, or ``mixed``, which puts
every other layer on the CPU. The same tests judge all of them: values are compared through
``host``, and a test about the CPU's memory itself is left out elsewhere, with its reason.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

NAMES = ("cpu", "cuda:0", "mixed")
DEVICE = os.environ.get("PAGEDCACHE_TEST_DEVICE", "cpu")
if DEVICE not in NAMES:
    raise ValueError(f"PAGEDCACHE_TEST_DEVICE={DEVICE!r}: expected one of {', '.join(NAMES)}")

ON_CPU = DEVICE == "cpu"
MIXED = DEVICE == "mixed"


def placement(num_layers: int) -> Any:
    """``device=`` of a cache of that many layers; mixed ones begin on the GPU."""
    if MIXED:
        return ["cpu" if layer % 2 else "cuda:0" for layer in range(num_layers)]
    return DEVICE


def host(array: Any) -> np.ndarray:
    """An array that a cache gave out, as a NumPy array: itself, or a copy from the device."""
    return np.asarray(array)


def overwrite(array: Any, values: np.ndarray) -> None:
    """Copy C-contiguous values over all of a C-contiguous device array."""
    from pagedcache._cuda.driver import get_device

    assert values.flags.c_contiguous and values.nbytes == array.nbytes
    device = get_device(int(array.device.partition(":")[2]))
    device.call("pc_cuda_copy", array.address, values.ctypes.data, values.nbytes, None)
    device.call("pc_cuda_stream_synchronize", None)


def cpu_memory(what: str) -> Any:
    """Mark of a test that is about the CPU's memory itself."""
    return pytest.mark.skipif(not ON_CPU, reason=f"about the CPU's memory: {what}")

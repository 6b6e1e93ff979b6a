"""The kernels with bugs on purpose of bugs.cu, as the emulation's own tests use them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from cuda_emulation import build, run

REVERSE, REVERSE_NO_BARRIER = 0, 1
SWAP, SWAP_NO_BARRIER = 2, 3
WRITE_PAST_SHARED, READ_PAST_SHARED = 4, 5
HALF_A_WARP_SHUFFLES, TWO_BARRIERS = 6, 7
CTAS_WRITE_ONE_WORD = 8
COPY_AND_WAIT, COPY_NO_WAIT = 9, 10
MISALIGNED, NOT_IN_ITS_MASK, WARP_OPERATIONS = 11, 12, 13
PRODUCT, PASS_ON, PASS_ON_NO_FENCE, MUCH_SHARED, MUCH_SHARED_UNASKED = 18, 19, 20, 21, 22
TOO_MANY_THREADS, TOO_MUCH_DYNAMIC_SHARED, TRAP, TOO_MUCH_STATIC_SHARED = 14, 15, 16, 17

THREADS = 128
ORDERS = ("fwd", "rev", "1", "2")


def library(path: str | Path) -> ctypes.CDLL:
    """An emulated library with its bugs; ``pc_cuda_error_text`` only where cuda/ is compiled in."""
    loaded = ctypes.CDLL(str(path))
    loaded.pc_cuda_bug.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 3]
    return loaded


def source_line(text: str, nth: int = 0) -> int:
    """Number of the nth line of bugs.cu that contains a text."""
    lines = (build.HERE / "bugs.cu").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line][nth]


def built(sanitizer: str | None) -> Path:
    """A library of these kernels only, compiled with a sanitizer; its folder is beside the rest."""
    folder = Path(os.environ["PAGEDCACHE_CUDA_EMULATION"]) / "bugs"
    none = folder / "kernels"
    none.mkdir(parents=True, exist_ok=True)
    build.Builder(folder, none).build([sanitizer or "plain"])
    return folder


# A child has no driver: the kernel runs on host memory, at once.
CHILD = """
import ctypes, sys
import numpy as np
bug = ctypes.CDLL(sys.argv[1]).pc_cuda_bug
given = np.arange(280, dtype=np.float32)
out = np.zeros(280, np.float32)
address = lambda array: ctypes.c_void_p(array.ctypes.data)
print("code", bug(int(sys.argv[2]), address(given), address(out), None))
"""


def in_a_child(which: int, sanitizer: str | None, order: str = "fwd") -> tuple[int, str]:
    """Exit status and all output of a process that runs one kernel on host memory."""
    folder = built(sanitizer)
    environment = {**os.environ, **run.environment(folder, sanitizer, order)}
    environment["LD_LIBRARY_PATH"] = ""  # no stub
    if sanitizer == "thread":
        run.fix_addresses()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder / build.LIBRARIES[sanitizer or "plain"]),
         str(which)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def values(n: int = THREADS + 32) -> np.ndarray:
    """1, 2, 3, … as float32."""
    return np.arange(1, n + 1, dtype=np.float32)

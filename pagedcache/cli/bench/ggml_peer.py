"""ggml's kernels, called by ctypes out of the libraries that other packages bring along.

Searched in this order: the folder that ``PAGEDCACHE_GGML`` names (where a build of llama.cpp has
its libraries), llama-cpp-python (compiled for the machine that installs it), pywhispercpp (wheels
with AVX2 kernels). Only the vector kernels of ``libggml-cpu`` are used, and what has none there
(reading q8_0, q4_0 and q4_1) from ``libggml-base``.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("llama-cpp-python", "pywhispercpp")
FOLDER = "PAGEDCACHE_GGML"
QUANTISED = {"q8": "q8_0", "q4": "q4_0", "q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1"}
"""ggml's type by our format; q8 and q4 differ from it in their scale, not in the work."""

_NAME = re.compile(r"libggml-(base|cpu)(-[0-9a-f]{8})?\.(so|dylib)[.\d]*")
_SETS = ("avx2", "f16c", "avx512", "avx512_vnni", "avx512_bf16", "neon", "sve")
_NARROW = {"float16": "fp16", "bfloat16": "bf16"}

Array = np.ndarray[Any, Any]
Kernel = Callable[[Array, Array], None]
"""kernel(given, out): both contiguous; the number of values is that of the float32 one."""


class Ggml:
    """Both libraries of one origin. Raises ``OSError`` or ``AttributeError`` when they lack
    something."""

    def __init__(self, base: Path, cpu: Path, origin: str) -> None:
        self._base = ctypes.CDLL(str(base))  # first: the other one needs it
        self._cpu = ctypes.CDLL(str(cpu))
        self._cpu.ggml_cpu_init()
        self.origin = f"ggml {_version(self._base)} of {origin}"
        self.instruction_sets = [
            name for name in _SETS if getattr(self._cpu, f"ggml_cpu_has_{name}")()
        ]
        for name in _NARROW:
            self.encoder(name), self.decoder(name)
        for name in QUANTISED:
            self.encoder(name), self.decoder(name)

    def encoder(self, name: str) -> Kernel:
        """From float32 to one of our formats, or to ggml's nearest one."""
        if name in _NARROW:
            return _kernel(getattr(self._cpu, f"ggml_cpu_fp32_to_{_NARROW[name]}"), 0)
        return _kernel(getattr(self._cpu, f"quantize_row_{QUANTISED[name]}"), 0)

    def decoder(self, name: str) -> Kernel:
        """Back to float32."""
        if name in _NARROW:
            return _kernel(getattr(self._cpu, f"ggml_cpu_{_NARROW[name]}_to_fp32"), 1)
        return _kernel(getattr(self._base, f"dequantize_row_{QUANTISED[name]}"), 1)

    def __str__(self) -> str:
        return f"{self.origin} ({', '.join(self.instruction_sets) or 'no vectors'})"


def _version(base: ctypes.CDLL) -> str:
    """What the library calls itself; older ones do not."""
    function = getattr(base, "ggml_version", None)
    if function is None:
        return "(version unknown)"
    function.restype = ctypes.c_char_p
    return str(function().decode())


def _kernel(function: Any, wide: int) -> Kernel:
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None

    def run(given: Array, out: Array) -> None:
        function(given.ctypes.data, out.ctypes.data, (given, out)[wide].size)

    return run


def find() -> Ggml:
    """The first that loads. Raises ``ImportError`` with the reasons when none does."""
    reasons = []
    for origin, paths in _candidates():
        kinds: dict[str, list[Path]] = {"base": [], "cpu": []}
        for path in paths:
            match = _NAME.fullmatch(path.name)
            if match is not None:
                kinds[match[1]].append(path)
        if not (kinds["base"] and kinds["cpu"]):
            reasons.append(f"{origin}: no libggml-base and libggml-cpu")
            continue
        try:
            return Ggml(min(kinds["base"]), min(kinds["cpu"]), origin)
        except (OSError, AttributeError) as error:
            reasons.append(f"{origin}: {error}")
    raise ImportError("; ".join(reasons) or f"none of {', '.join(PACKAGES)} is installed")


def _candidates() -> Iterator[tuple[str, list[Path]]]:
    folder = os.environ.get(FOLDER)
    if folder:
        yield f"the folder {FOLDER}", sorted(Path(folder).glob("libggml-*"))
    for name in PACKAGES:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        files = [Path(str(package.locate_file(file))) for file in package.files or ()]
        yield f"{name} {package.version}", files

"""The package as a thing: its version, its typing marker, and what importing it costs."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import profiles
import pytest

import pagedcache
from pagedcache._version import __version__

# Runs in an interpreter of its own: what does `import pagedcache` load and read?
IMPORT_PROBE = """
import json, os, sys, types
import numpy, ml_dtypes
before = set(sys.modules)
reads = []

class Watched(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename.endswith(("os.py", "_collections_abc.py")):
            frame = frame.f_back
        where = frame.f_code.co_filename if frame else "?"
        if "pagedcache" in where or "importlib" in where:
            reads.append([str(key), where])
        return super().__getitem__(key)

os.environ.__class__ = Watched
import pagedcache
print(json.dumps({"loaded": sorted(set(sys.modules) - before), "reads": reads,
                  "file": pagedcache.__file__}))
"""


def probe(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_version_is_one_fact() -> None:
    assert pagedcache.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)
    try:
        installed = importlib.metadata.version("pagedcache")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pagedcache is not installed here (source tree): no metadata to compare")
    assert installed == __version__


def test_typed_and_with_stubs() -> None:
    package = Path(pagedcache.__file__).parent
    assert (package / "py.typed").is_file()
    # The library of CUDA kernels, where it was built, is no module.
    compiled = [path for path in package.rglob("*.so") if not path.name.startswith("lib")]
    assert compiled
    for path in compiled:
        name = ".".join([*path.parent.relative_to(package.parent).parts, path.name.split(".")[0]])
        module = importlib.import_module(name)
        public = [key for key, value in vars(module).items()
                  if not key.startswith("_") and getattr(value, "__module__", None) == name]
        if public:  # modules that only other compiled modules call have nothing to describe
            stub = path.with_name(path.name.split(".")[0] + ".pyi")
            assert stub.is_file(), f"{name} has no stub for {public}"
            for key in public:
                assert key in stub.read_text(encoding="utf-8"), f"{stub.name} lacks {key}"


def test_everything_named_is_there() -> None:
    assert len(set(pagedcache.__all__)) == len(pagedcache.__all__)
    for name in pagedcache.__all__:
        thing = getattr(pagedcache, name)
        if callable(thing):
            assert thing.__doc__, f"{name} has no docstring"
    assert set(pagedcache.__all__) <= set(dir(pagedcache))


def test_sample_ships_with_the_package() -> None:
    with files("pagedcache").joinpath("data/smollm2_kv_sample.npz").open("rb") as file:
        sample = np.load(file)
        assert sample["k"].shape == sample["v"].shape == (3, 320, 3, 64)
        assert sample["k"].dtype == sample["v"].dtype == np.float32
        assert sample["layers"].tolist() == [0, 14, 29]


def test_import_is_cheap_and_looks_at_nothing() -> None:
    found = json.loads(probe(IMPORT_PROBE))
    assert Path(found["file"]).parent == Path(pagedcache.__file__).parent
    heavy = {"torch", "pycuda", "cupy", "numba", "tqdm", "matplotlib", "argparse", "subprocess",
             "multiprocessing", "asyncio", "gguf", "pytest", "hypothesis", "tabulate"}  # fmt: skip
    assert not heavy & {name.partition(".")[0] for name in found["loaded"]}
    front_ends = [name for name in found["loaded"]
                  if name.startswith(("pagedcache.cli", "pagedcache.checks"))]  # fmt: skip
    assert not front_ends
    assert found["reads"] == []


def test_import_opens_no_driver() -> None:
    program = (
        "import pagedcache\n"
        "maps = open('/proc/self/maps').read()\n"
        "print([name for name in ('libcuda', 'libcudart', 'libnvidia') if name in maps])\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc/self/maps on this system")
    assert probe(program).strip() == "[]"


def test_import_survives_hostile_environment() -> None:
    out = probe(
        "import pagedcache; print(pagedcache.__version__)",
        CUDA_VISIBLE_DEVICES="nonsense",
        PAGEDCACHE_DEVICE="nonsense",
        LC_ALL="C",
    )
    assert out.strip() == __version__


@pytest.mark.skipif(profiles.SHORT, reason="short profile: times mean nothing when instrumented")
def test_import_time() -> None:
    """At most 0.15 s beyond NumPy's own, the best of seven."""
    program = (
        "import time, numpy\n"
        "start = time.perf_counter()\n"
        "import pagedcache\n"
        "print(time.perf_counter() - start)\n"
    )
    assert min(float(probe(program)) for _ in range(7)) <= 0.15


def test_module_and_script_are_one_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pagedcache", "--version"], capture_output=True, text=True
    )
    assert result.returncode == 0
    assert __version__ in result.stdout

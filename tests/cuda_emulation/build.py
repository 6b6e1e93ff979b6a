"""Builds the stub driver and the emulated kernel libraries; only what is out of date.

    python tests/cuda_emulation/build.py [--output FOLDER] [--kernels FOLDER] [PART ...]

Parts: ``stub`` (libcuda.so.1), ``plain``, ``address`` and ``thread`` (the kernels, without and with
sanitizers). Needs g++ with C++20, nothing of NVIDIA's.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / "build" / "cuda_emulation"
KERNELS = ROOT / "cuda"

PARTS = ("stub", "plain", "address", "thread")
LIBRARIES = {
    "plain": "libpagedcache_cuda_emulated.so",
    "address": "libpagedcache_cuda_emulated_asan.so",
    "thread": "libpagedcache_cuda_emulated_tsan.so",
}
SANITIZERS = {
    "plain": ["-O2"],
    "address": [
        "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
        "-fno-omit-frame-pointer", "-Wno-maybe-uninitialized",
    ],
    "thread": ["-O1", "-fsanitize=thread"],
}  # fmt: skip
COMMON = ["-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
# One rounding per operation, as nvcc is told; memory read under several types, as kernels do.
ARITHMETIC = ["-ffp-contract=off", "-fno-strict-aliasing"]


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def kernel_flags(part: str, kernels: Path) -> list[str]:
    """How the .cu files of a folder are compiled for a part; the source follows."""
    includes = [f"-I{path}" for path in (kernels, ROOT / "include", HERE)]
    return [*COMMON, *ARITHMETIC, *SANITIZERS[part], *includes, "-x", "c++"]


def link(library: Path, objects: Sequence[Path], flags: Sequence[str]) -> None:
    """Link a shared library; programs that have an old one open keep it."""
    fresh = library.with_name(f".{library.name}.new")
    command = [compiler(), "-shared", "-pthread", *flags, *map(str, objects), "-ldl"]
    subprocess.run([*command, "-o", str(fresh)], check=True)
    os.replace(fresh, library)


class Builder:
    """Compiles into one folder. ``kernels``: the folder of the .cu files."""

    def __init__(self, folder: Path = FOLDER, kernels: Path = KERNELS) -> None:
        self.folder, self.kernels = folder, kernels

    def build(self, parts: Iterable[str] = PARTS) -> Path:
        """Bring the named parts up to date. Raises CalledProcessError where the compiler fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run side by side build once
            for part in parts:
                self._build_stub() if part == "stub" else self._build_kernels(part)
        return self.folder

    def _build_stub(self) -> None:
        sources = sorted((HERE / "stub").glob("*.cc"))
        headers = sorted((HERE / "stub").glob("*.h"))
        flags = [*COMMON, "-O1"]
        library = self.folder / "libcuda.so.1"
        self._link(library, self._compile("stub", sources, headers, flags),
                   ["-Wl,-soname,libcuda.so.1"])  # fmt: skip
        link = self.folder / "libcuda.so"  # the name that linkers look for
        if not link.is_symlink():
            link.symlink_to(library.name)

    def _build_kernels(self, part: str) -> None:
        sources = [*sorted(self.kernels.glob("*.cu")), HERE / "bugs.cu"]
        headers = [
            *self.kernels.glob("*.h"),
            *(ROOT / "include").rglob("*.h"),
            *HERE.glob("*.h"),
            *(HERE / "emulation").glob("*.h"),
        ]
        flags = kernel_flags(part, self.kernels)
        objects = self._compile(part, sources, headers, flags)
        self._link(self.folder / LIBRARIES[part], objects, SANITIZERS[part])

    def objects(self, part: str) -> list[Path]:
        """The object files of a part that was built."""
        return sorted((self.folder / "objects" / part).glob("*.o"))

    def _compile(
        self, part: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]
    ) -> list[Path]:
        folder = self.folder / "objects" / part
        folder.mkdir(parents=True, exist_ok=True)
        newest_header = max(path.stat().st_mtime_ns for path in headers)
        objects, stale = [], []
        for source in sources:
            command = [compiler(), *flags, "-c", str(source), "-o"]
            made, note = folder / f"{source.stem}.o", folder / f"{source.stem}.command"
            objects.append(made)
            newest = max(newest_header, source.stat().st_mtime_ns)
            if not (
                made.exists()
                and made.stat().st_mtime_ns > newest
                and note.exists()
                and note.read_text() == shlex.join(command)
            ):
                stale.append((command, made, note))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compile_one, stale))
        return objects

    def _link(self, library: Path, objects: Sequence[Path], flags: Sequence[str]) -> None:
        made_of = library.with_name(f".{library.name}.objects")
        inputs = "\n".join(map(str, objects))
        if (
            library.exists()
            and all(library.stat().st_mtime_ns > each.stat().st_mtime_ns for each in objects)
            and made_of.exists()
            and made_of.read_text() == inputs
        ):
            return
        link(library, objects, flags)
        made_of.write_text(inputs)


def _compile_one(task: tuple[list[str], Path, Path]) -> None:
    command, made, note = task
    note.unlink(missing_ok=True)
    fresh = made.with_suffix(".new.o")
    subprocess.run([*command, str(fresh)], check=True)
    os.replace(fresh, made)
    note.write_text(shlex.join(command))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--kernels", type=Path, default=KERNELS, metavar="FOLDER")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    try:
        print(Builder(arguments.output.resolve(), arguments.kernels.resolve()).build(parts))
    except subprocess.CalledProcessError as error:
        print(f"failed: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

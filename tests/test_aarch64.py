"""The kernels for 64-bit ARM: compiled for it, and run by an emulator where this machine is not it.

Needs a compiler for aarch64 with its C library, and qemu's user-mode emulator (on Debian:
gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static).
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import programkit
import pytest
from profiles import SHORT

#: Together they include every header that is different there.
UNITS = [f"pagedcache/{name}.h" for name in ("attend", "codecs", "sync", "threads")]


@pytest.fixture(scope="module")
def gcc() -> str:
    if platform.machine() in ("aarch64", "arm64"):
        return programkit.tool("gcc")
    return programkit.tool("aarch64-linux-gnu-gcc")


@pytest.fixture(scope="module")
def emulator() -> list[str]:
    if platform.machine() in ("aarch64", "arm64"):
        return []
    return [programkit.tool("qemu-aarch64-static", "qemu-aarch64")]


def build(gcc: str, name: str, folder: Path, *flags: str) -> Path:
    program, errors = programkit.compiled(gcc, name, folder, "-O2", "-static", *flags)
    assert errors == ""
    return program


# SPEC F1 F2 F3 F4 F5 F6
def test_neon_stores_the_same_bytes(gcc: str, emulator: list[str], tmp_path: Path) -> None:
    program = build(gcc, "codecs", tmp_path)
    rounds = 2_000 if SHORT else 20_000
    assert programkit.run(*emulator, program, str(rounds)) == (0, "neon plain 0 wrong\n")


@pytest.mark.parametrize("readings", ((), ("-DPC_READ_ALL_AS_OTHERS",)), ids=("own", "others"))
def test_neon_attends_as_float64_does(
    readings: tuple[str, ...], gcc: str, emulator: list[str], tmp_path: Path
) -> None:
    program = build(gcc, "attention_values", tmp_path, *readings)
    assert programkit.run(*emulator, program) == (0, "close\n")


def test_threads_get_the_bits_of_one(gcc: str, emulator: list[str], tmp_path: Path) -> None:
    program = build(gcc, "attention_races", tmp_path)
    assert programkit.run(*emulator, program) == (0, "the same\n")


# SPEC F10
@pytest.mark.parametrize("header", UNITS)
def test_headers_compile_clean(header: str, gcc: str, tmp_path: Path) -> None:
    source = tmp_path / "unit.c"
    source.write_text(f'#include "{header}"\nint main(void) {{ return 0; }}\n')
    done = subprocess.run(
        [gcc, *programkit.FLAGS, "-Wall", "-Wextra", "-Wconversion", "-Werror", "-fsyntax-only",
         str(source)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

"""Every codec of this build against the text that is for all machines, in a C program.

Rows of all dtypes at odd addresses and strides, of ordinary and of the worst values, into every
format and back, under both policies: the bytes must be those of ``pc_encode_row`` and the values
those of ``pc_decode_row``, rounded; nothing outside a row may change.
"""

from __future__ import annotations

import platform
from pathlib import Path

import programkit
import pytest
from profiles import SHORT

#: What a compiler that knows no vectors sees: the C library is included before, as it is here.
OTHER_COMPILER = """
#include <float.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef __GNUC__
#undef __SSE2__
#define __forceinline inline
"""


def check(folder: Path, rounds: int, *flags: str) -> str:
    """Compile and run the program; the names of the codecs it tried."""
    program, errors = programkit.compiled(programkit.tool("gcc"), "codecs", folder, *flags)
    if "-m32" in flags and ("cannot find" in errors or "No such file" in errors):
        pytest.skip("no 32-bit C library on this machine")
    assert errors == ""
    status, text = programkit.run(program, str(rounds))
    assert status == 0 and text.endswith(" 0 wrong\n"), text
    return text.removesuffix(" 0 wrong\n")


# SPEC F1 F2 F3 F4 F5 F6
def test_every_codec_stores_the_same_bytes(tmp_path: Path) -> None:
    check(tmp_path, 10_000 if SHORT else 100_000, "-O3")


# SPEC F10
def test_without_vector_types(tmp_path: Path) -> None:
    """As with a compiler that has none: the plain text is the only codec."""
    prelude = tmp_path / "other.h"
    prelude.write_text(OTHER_COMPILER)
    names = check(tmp_path, 500 if SHORT else 5_000, "-O2", "-include", str(prelude))
    assert names == "baseline plain"


# SPEC F10
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86")
def test_with_the_vectors_of_any_compiler(tmp_path: Path) -> None:
    """A 32-bit machine, for which no intrinsics are used."""
    names = check(tmp_path, 500 if SHORT else 5_000, "-O2", "-m32", "-msse2", "-mfpmath=sse")
    assert names == "baseline plain"

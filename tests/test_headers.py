"""The headers compile clean as C11 and as C++, alone and together, and hold what they assert."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).resolve().parent.parent / "include"
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
#: Usable from device code later: no Python, no operating system.
PORTABLE = [
    f"pagedcache/{name}.h"
    for name in ("config", "status", "round", "groups", "ggml", "dense", "formats", "geometry",
                 "flat")
]  # fmt: skip
FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-O2", "-ffp-contract=off",
         f"-I{INCLUDE}"]  # fmt: skip

# Uses every public function, so that nothing is judged only as an unused template.
PROGRAM = """
#include "pagedcache/flat.h"
#include "pagedcache/geometry.h"

int main(void) {
    float values[40], back[40];
    uint8_t data[256], scales[64];
    int failures = 0;
    for (int i = 0; i < 40; i++) {
        values[i] = (float)(i - 20) * 0.5f;
    }
    for (int code = 0; code < PC_NUM_FORMATS; code++) {
        pc_geometry g;
        pc_address last;
        pc_geometry_init(&g, code, PC_NHD, 2, 3, 40);
        last = pc_row_address(&g, g.block_nbytes, 1, 1, 2);
        failures += last.data + g.row_data_nbytes > 2 * g.block_nbytes;
        failures += pc_row_groups(code, 40) * pc_format_of(code).group_size < 40;
        failures += pc_encode_row(code, values, 40, data, scales, PC_NONFINITE_RAISE) != PC_OK;
        pc_decode_row(code, data, scales, 40, back);
        for (int i = 0; i < 40; i++) {
            const float error = back[i] - values[i];
            failures += error > 1.0f || error < -1.0f;
        }
        failures += pc_flat_write(code, data, scales, 40, 3, 30, values, PC_NONFINITE_RAISE) != 0;
        pc_flat_read(code, data, scales, 3, 30, back);
        failures += back[0] > -8.0f;
    }
    values[5] = pc_bits_float(0x7FC00000u);
    failures += pc_encode_row(PC_FORMAT_q8, values, 40, data, scales, PC_NONFINITE_RAISE) !=
                PC_E_NONFINITE;
    failures += pc_encode_row(PC_FORMAT_q8, values, 40, data, scales, PC_NONFINITE_SATURATE) != 0;
    failures += pc_encode_row(99, values, 40, data, scales, PC_NONFINITE_RAISE) != PC_E_FORMAT;
    pc_decode_row(99, data, scales, 40, back);
    failures += back[0] < 0.0f || back[0] > 0.0f || pc_row_groups(99, 40) != 0;
    return failures;
}
"""


def compiler(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def compile_text(text: str, suffix: str, command: list[str], folder: Path) -> Path:
    source, program = folder / f"test{suffix}", folder / "program"
    source.write_text(text)
    done = subprocess.run(
        [*command, *FLAGS, str(source), "-o", str(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return program


def test_no_portable_header_is_missing() -> None:
    assert set(PORTABLE) <= set(HEADERS)


# SPEC F10
@pytest.mark.parametrize(
    ("name", "standard", "suffix"),
    [("gcc", "c11", ".c"), ("g++", "c++17", ".cpp"), ("clang", "c11", ".c"),
     ("clang++", "c++17", ".cpp")],
)  # fmt: skip
def test_the_headers_compile_clean_and_work(
    name: str, standard: str, suffix: str, tmp_path: Path
) -> None:
    command = [compiler(name), f"-std={standard}"]
    program = compile_text(PROGRAM, suffix, command, tmp_path)
    assert subprocess.run([str(program)]).returncode == 0


@pytest.mark.parametrize("header", HEADERS)
def test_each_header_stands_alone(header: str, tmp_path: Path) -> None:
    text = f'#include "{header}"\n#include "{header}"\nint main(void) {{ return 0; }}\n'
    compile_text(text, ".c", [compiler("gcc"), "-std=c11"], tmp_path)


def test_fast_math_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "test.c"
    source.write_text('#include "pagedcache/config.h"\n')
    done = subprocess.run(
        [compiler("gcc"), "-c", "-ffast-math", f"-I{INCLUDE}", str(source), "-o", "/dev/null"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0 and "fast-math" in done.stderr


# SPEC F10
def test_undefined_behaviour_is_not_used(tmp_path: Path) -> None:
    """The program again with huge, tiny and non-finite values under the sanitizers."""
    text = PROGRAM.replace("(float)(i - 20) * 0.5f", "pc_bits_float((uint32_t)i * 0x06543211u)")
    text = text.replace("failures += error > 1.0f || error < -1.0f;", "(void)error;")
    text = text.replace("failures += back[0] > -8.0f;", "")
    text = text.replace("PC_NONFINITE_RAISE) != PC_OK", "PC_NONFINITE_SATURATE) != PC_OK")
    text = text.replace("3, 30, values, PC_NONFINITE_RAISE)", "3, 30, values, 1)")
    text = text.replace("return failures;", "return 0;")
    command = [compiler("gcc"), "-std=c11", "-fsanitize=undefined,address,float-cast-overflow",
               "-fno-sanitize-recover=all"]  # fmt: skip
    program = compile_text(text, ".c", command, tmp_path)
    done = subprocess.run([str(program)], capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr

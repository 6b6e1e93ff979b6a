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
                 "flat", "channels", "space", "rows", "copies", "codec",
                 "codec_plain", "tools", "streamed", "bulk", "nonfinite", "tasks")
]  # fmt: skip
FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-O2", "-ffp-contract=off",
         f"-I{INCLUDE}"]  # fmt: skip

# Uses every public function, so that nothing is judged only as an unused template.
PROGRAM = """
#include "pagedcache/codec_plain.h"
#include "pagedcache/copies.h"
#include "pagedcache/flat.h"
#include "pagedcache/nonfinite.h"

/* Store a block of 3 tokens straight and by way of an open slot, reopen it, read it. */
static int open_and_seal(int code, float *values, float *back) {
    static uint8_t sealed[2 * 8192], opened[8192];
    static float buffer[3 * 40];
    const int64_t straight[3] = {0, 1, 2}, open_slots[3] = {6, 7, 8};
    const int32_t places[3] = {1, 0, 2};
    int failures = 0; /* padding is never written, so it has to be alike from the start */
    const pc_tools tools = {&pc_plain_codec, 0, 1, PC_LEAST_SHARED_NBYTES, 0, buffer};
    pc_space space;
    pc_slab slabs[2];
    pc_rows rows = {(uint8_t *)values, 4 * 40, 4 * 40, 4, PC_FORMAT_float32};
    pc_rows outside = {(uint8_t *)back, 4 * 40, 0, 4, PC_FORMAT_float32};
    memset(sealed, 0, sizeof sealed);
    failures += pc_space_check(code, code < 3 ? code : 1, PC_NHD, 1, 3, 40) != PC_OK;
    failures += pc_space_check(code, 99, PC_NHD, 1, 3, 40) != PC_E_FORMAT;
    pc_space_init(&space, code, code < 3 ? code : 1, PC_NHD, 1, 3, 40, 2, 1);
    slabs[0].base = sealed;
    slabs[0].block_stride = space.geometry[0].block_nbytes;
    slabs[1] = pc_open_slab(&space, opened, space.geometry[1].block_nbytes);
    failures += pc_buffer_values(&space) > 3 * 40 || pc_num_places(&space) != 3;
    failures += pc_find_nonfinite(&tools, &rows, 3, 1, 40) != -1;
    failures += pc_store_rows(&tools, &space, slabs, &rows, straight, 3, PC_NONFINITE_RAISE);
    failures += pc_store_rows(&tools, &space, slabs, &rows, open_slots, 3, PC_NONFINITE_RAISE);
    pc_copy_block(&tools, &space, slabs, 2, 1, 3);
    failures += memcmp(sealed, sealed + slabs[0].block_stride, (size_t)slabs[0].block_stride) != 0;
    pc_copy_block(&tools, &space, slabs, 1, 2, 3);
    pc_copy_tokens(&tools, &space, slabs, 0, 1, 2, 2, 1);
    pc_load_rows(&tools, &space, slabs, places, 2, &outside, 7);
    return failures;
}

int main(void) {
    float values[40], back[40], block[3 * 40], read[7 * 40];
    uint8_t data[256], scales[64];
    const pc_tools tools = {&pc_plain_codec, 0, 1, PC_LEAST_SHARED_NBYTES, 0, 0};
    int failures = 0;
    for (int i = 0; i < 3 * 40; i++) {
        block[i] = (float)(i % 61 - 30);
    }
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
        failures += pc_flat_encode(&tools, code, values, 40, data, scales, 0) != PC_OK;
        pc_flat_decode(&tools, code, data, scales, 40, back);
        failures +=
            pc_flat_write(&tools, code, data, scales, 40, 3, 30, values, PC_NONFINITE_RAISE) != 0;
        pc_flat_read(&tools, code, data, scales, 3, 30, back);
        failures += back[0] > -8.0f;
        failures += open_and_seal(code, block, read);
        for (int i = 0; i < 40; i++) {
            const float error = read[i] - block[2 * 40 + i];
            const float other = read[6 * 40 + i] - block[40 + i];
            failures += error > 5.0f || error < -5.0f || other > 5.0f || other < -5.0f;
        }
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

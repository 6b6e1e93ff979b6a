"""Faults put into the kernels on purpose, and what must find each: the proof that tests can fail.

A mutant is one change of text in one file of cuda/. ``source`` names the .cu file that is compiled
again; the rest of the library stays as it was built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cuda_emulation import build, run

#: What a caught mutant's process may end with: failed tests, or a sanitizer's report or abort.
CAUGHT = (1, run.REPORTED, -6)


@dataclass(frozen=True)
class Mutant:
    """The nth ``before`` in ``file`` becomes ``after``."""

    name: str
    file: str
    source: str
    before: str
    after: str
    tests: str  # selected with -k from the kernel tests
    sanitizer: str | None = None  # which build finds it
    order: str = "fwd"
    nth: int = 0


TILE_READY = "tile.groups[tile.lane] = group;\n        __syncwarp();\n"
MUTANTS = (
    Mutant(
        "tile used before all lanes have described their groups",
        "group_kernels.h", "store.cu",
        TILE_READY, TILE_READY.replace("        __syncwarp();\n", ""),
        "same_bytes and q8",
    ),
    Mutant(
        "tile described anew while lanes still read it",
        "group_kernels.h", "store.cu",
        "        __syncwarp(); /* the tile before this one has left */\n", "",
        "test_kernels_store and any_order",
    ),
    Mutant(
        "values written out before all lanes have decoded",
        "group_kernels.h", "load.cu",
        "        __syncwarp();\n        pc_tile_store_values", "        pc_tile_store_values",
        "same_values and q4_1", order="rev",
    ),
    Mutant(
        "shared tile of half the size",
        "tile.h", "store.cu",
        "PC_TILE_WARPS *PC_TILE_NBYTES / 16", "PC_TILE_WARPS *PC_TILE_NBYTES / 32",
        "same_bytes and q8",
    ),
    Mutant(
        "values exchanged with the next lane's row",
        "tile.h", "store.cu",
        "uint8_t *const to = pc_tile_row(tile, unit / per_group)",
        "uint8_t *const to = pc_tile_row(tile, (unit / per_group + 1) % PC_WARP)",
        "same_bytes and q4_0",
    ),
    Mutant(
        "one column copied behind the block",
        "columns.h", "copy.cu",
        "if (column < call.num_columns) {\n                pc_store_bytes",
        "if (column <= call.num_columns) {\n                pc_store_bytes",
        "copies_in_any_order and q8",
    ),
    Mutant(
        "bounds of the work not checked",
        "store.cu", "store.cu",
        "if (unit < call.walk.units) {", "if (unit <= call.walk.units) {",
        "same_bytes and float16", "address",
    ),
    Mutant(
        "one slot read behind the list",
        "places.h", "store.cu",
        "const int64_t slot = call.slots[spot.token];",
        "const int64_t slot = call.slots[spot.token] +\n"
        "                         0 * ((const volatile int64_t *)call.slots)[spot.token + 1];",
        "same_bytes and q4_0", "address",
    ),
    Mutant(
        "distance of blocks in 32 bits",
        "places.h", "store.cu",
        "pc_row_address(&geometry, block_stride, block, head, offset)",
        "pc_row_address(&geometry, (int32_t)(block_stride * block), 1, head, offset)",
        "test_kernels_store and gigabytes",
    ),
    Mutant(
        "moves in the wrong order",
        "copy.cu", "copy.cu",
        "for (int64_t move = 0; move < m; move++) {",
        "for (int64_t move = m - 1; move >= 0; move--) {",
        "test_moves and q4_0",
    ),
    Mutant(
        "copies in order done by all CTAs at once",
        "copy.cu", "copy.cu",
        "pc_column_grid<PC_COLUMNS>(call, in_order ? 1 : n)", "pc_column_grid<PC_COLUMNS>(call, n)",
        "copies_in_order and q8", "thread",
    ),
    Mutant(
        "fault reported without an atomic",
        "places.h", "store.cu",
        "atomicCAS(words, 0ULL, (unsigned long long)code) == 0ULL",
        "*words == 0ULL && (*words = (unsigned long long)code) != 0ULL",
        "out_of_range and q8", "thread",
    ),
    Mutant(
        "groups of tokens never part-filled",
        "channel_store.h", "store.cu",
        "(int)(g.block_size - first < PC_GROUP ? g.block_size - first : PC_GROUP)", "PC_GROUP",
        "test_kernels_channels and same_bytes",
    ),
    Mutant(
        "tokens read behind a block's last one",
        "channel_store.h", "store.cu",
        "if (columns.count == TOKENS) {", "if (columns.count <= TOKENS) {",
        "test_kernels_channels and not_aligned", "address",
    ),
    Mutant(
        "the first token left out of the extremes",
        "channel_store.h", "store.cu",
        "for (int i = 1; i < TOKENS; i++) {", "for (int i = 2; i < TOKENS; i++) {",
        "test_kernels_channels and same_bytes",
    ),
    Mutant(
        "two scales written where there is one channel",
        "channel_store.h", "store.cu",
        "        if (both) {\n            pc_unit<8> unit;",
        "        if (true) {\n            pc_unit<8> unit;",
        "test_kernels_channels and same_bytes",
    ),
    Mutant(
        "one entry read behind the list of blocks",
        "channel_store.h", "store.cu",
        "block = call.entries[2 * entry + 1];",
        "block = call.entries[2 * entry + 1] +\n"
        "                  0 * ((const volatile int64_t *)call.entries)[2 * entry + 2];",
        "test_kernels_channels and same_bytes", "address",
    ),
    Mutant(
        "high halves of bytes taken for low ones",
        "channel_load.h", "load.cu",
        "channel % 2 ? quants >> 4 : quants & 0xF", "quants & 0xF",
        "test_kernels_load and same_values and q4k",
    ),
    Mutant(
        "channels saturated by another row's largest",
        "channel_load.h", "convert.cu",
        "one.load(place, channel);",
        "one.load({place.data, place.scales + 4}, channel);",
        "test_kernels_channels and reopened",
    ),
    Mutant(
        "open rows not cut to what float16 holds",
        "store.cu", "store.cu",
        "    pc_clamp_values<COUNT>(call.geometry.code, values);\n", "",
        "test_kernels_open and open_slots_hold",
    ),
    Mutant(
        "open rows saturated by all of the row",
        "settle.h", "store.cu",
        "const int64_t start = first - first % PC_GROUP;", "const int64_t start = 0;",
        "test_kernels_open and open_slots_hold",
    ),
    Mutant(
        "one row more than a pair has",
        "places.h", "convert.cu",
        "if (row >= call.counts[pair]) {", "if (row > call.counts[pair]) {",
        "test_kernels_open and reopened and q8",
    ),
    Mutant(
        "all layers converted in the first one's slab",
        "places.h", "convert.cu",
        "const pc_slab stored = call.stored_slabs[slab];",
        "const pc_slab stored = call.stored_slabs[0 * slab];",
        "test_kernels_open and reopened and q4_0",
    ),
    Mutant(
        "reopened values written before all lanes have decoded",
        "group_kernels.h", "convert.cu",
        "        __syncwarp();\n        pc_tile_store_values", "        pc_tile_store_values",
        "test_kernels_open and reopened and q4_1", order="rev",
    ),
    Mutant(
        "the first open place taken for a sealed one",
        "pointers.cu", "pointers.cu",
        "place < num_blocks ? own : other", "place <= num_blocks ? own : other",
        "pointers_of_every_layer",
    ),
    Mutant(
        "first hit found without an atomic",
        "finite.cu", "finite.cu",
        "atomicMin(first, (unsigned long long)(i * COUNT + found));",
        "*first = (unsigned long long)(i * COUNT + found);",
        "the_first_one and float16", order="rev",
    ),
)  # fmt: skip


def changed_text(mutant: Mutant, text: str) -> str:
    """The file's text with the fault. Raises ValueError where the place is not found."""
    parts = text.split(mutant.before)
    if len(parts) < mutant.nth + 2:
        raise ValueError(f"{mutant.file} no longer holds what {mutant.name!r} changes")
    at = mutant.nth + 1
    return mutant.before.join(parts[:at]) + mutant.after + mutant.before.join(parts[at:])


def build_mutant(mutant: Mutant, built: Path, folder: Path) -> Path:
    """The library with the fault; ``built`` holds the library without it."""
    part = mutant.sanitizer or "plain"
    kernels = folder / "cuda"
    shutil.copytree(build.KERNELS, kernels)
    changed = kernels / mutant.file
    changed.write_text(changed_text(mutant, changed.read_text()))
    source = kernels / mutant.source
    made = folder / f"{source.stem}.o"
    # not optimised: it is compiled once, and few tests run on it
    command = [build.compiler(), *build.kernel_flags(part, kernels), "-O0", "-c", str(source)]
    subprocess.run([*command, "-o", str(made)], check=True)
    others = [path for path in build.Builder(built).objects(part) if path.stem != source.stem]
    library = folder / build.LIBRARIES[part]
    build.link(library, [made, *others], build.SANITIZERS[part])
    return library


def run_tests(
    built: Path, library: Path | None, sanitizer: str | None, order: str, tests: str
) -> subprocess.CompletedProcess[str]:
    """The selected kernel tests on a library (None: without a fault) in a process of their own."""
    changes = run.environment(built, sanitizer, order)
    changes["PAGEDCACHE_TEST_PROFILE"] = "short"
    if library is not None:
        changes["PAGEDCACHE_CUDA_LIBRARY"] = str(library)
    if sanitizer == "thread":
        run.fix_addresses()
    files = sorted((build.ROOT / "tests" / "cuda").glob("test_kernels*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", tests]
    command += ["-c", str(build.ROOT / "pyproject.toml"), "--rootdir", str(build.ROOT)]
    return subprocess.run(
        [*command, *map(str, files)],
        env={**os.environ, **changes}, cwd=build.ROOT, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

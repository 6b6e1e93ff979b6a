"""Faults put into the attention kernel, and changes to it that must make no difference."""

from __future__ import annotations

from cuda_emulation.mutants import Mutant

KERNEL = "attend.cu"

MUTANTS = (
    Mutant(
        "one key more than the row has",
        "attention_tile.h", KERNEL,
        "key >= keys.low && key < high ?", "key >= keys.low && key <= high ?",
        "test_kernels_attention and every_length",
    ),
    Mutant(
        "window one key too wide",
        KERNEL, KERNEL,
        "low = position + 1 - call.window < high ? position + 1 - call.window : high;",
        "low = position - call.window < high ? position - call.window : high;",
        "causal_and_windowed and True",
    ),
    Mutant(
        "sinks left out",
        "attention_end.h", KERNEL,
        "if (call.sinks != nullptr) {", "if (call.sinks == (const float *)1) {",
        "soft_cap_and_sinks",
    ),
    Mutant(
        "parts added up as if all had one largest score",
        "attention_end.h", KERNEL,
        "result = fmaf(__ldcg(at + row * call.head_dim + channel), factor, result);",
        "result += __ldcg(at + row * call.head_dim + channel);",
        "test_kernels_attention and scores_that_grow",
    ),
    Mutant(
        "the last part left out",
        "attention_end.h", KERNEL,
        "for (int i = 0; i < item.parts; i++) {", "for (int i = 0; i < item.parts - 1; i++) {",
        "in_any_number_of_parts and 1024",
    ),
    Mutant(
        "tickets that are not zero again",
        KERNEL, KERNEL,
        "atomicInc(ticket, last) == last", "atomicAdd(ticket, 1u) == last",
        "in_any_number_of_parts and 1024",
    ),
    Mutant(
        "parts passed on without a fence",
        KERNEL, KERNEL,
        "        __threadfence(); /* whoever comes later sees it */\n", "",
        "in_any_number_of_parts and 1024", "thread",
    ),
    Mutant(
        "parts of others read without a fence",
        KERNEL, KERNEL,
        "        __threadfence(); /* what the others have written is seen from here on */\n", "",
        "in_any_number_of_parts and 1024", "thread",
    ),
    Mutant(
        "a ticket taken before all threads have written",
        KERNEL, KERNEL,
        "    __syncthreads(); /* this CTA's part is written, and by all threads */\n", "",
        "any_order and fwd", "thread",
    ),
    Mutant(
        "a tile read before it has arrived",
        "attention_stage.h", KERNEL,
        "        pc_wait_for_copies(call_.stages - 1);\n", "",
        "test_kernels_attention and every_length",
    ),
    Mutant(
        "a tile read before others' copies have arrived",
        "attention_stage.h", KERNEL,
        "        __syncwarp(); /* what other lanes have copied is there */\n", "",
        "any_order and fwd", "thread",
    ),
    Mutant(
        "a stage filled while others still read it",
        "attention_stage.h", KERNEL,
        "        __syncwarp(); /* all lanes are done with the tile that was in its place */\n", "",
        "in_any_number_of_parts and q8_0", "thread",
    ),
    Mutant(
        "results put over stages that others still read",
        KERNEL, KERNEL,
        "        __syncthreads(); /* results take the place of stages */\n", "",
        "any_order and fwd", "thread",
    ),
    Mutant(
        "the lower part of floats dropped",
        "mma.h", KERNEL,
        "halves.low = value - halves.high;", "halves.low = 0.0f * value;",
        "test_kernels_attention and any_order and fwd",
    ),
    Mutant(
        "minima of values left out",
        "attention_tile.h", KERNEL,
        "fmaf(weights[n][j], by.minimum, made.floors[group]);", "made.floors[group];",
        "test_kernels_attention and any_order and fwd",
    ),
    Mutant(
        "minima of keys left out",
        "attention_tile.h", KERNEL,
        "sums[n][j] = fmaf(by.minimum, sum, sums[n][j]);", "",
        "test_kernels_attention and any_order and fwd",
    ),
    Mutant(
        "eight less of every nibble forgotten",
        "attention_values.h", KERNEL,
        "pc_operands<PC_SCALED, 16, 24> {", "pc_operands<PC_SCALED, 16, 16> {",
        "test_kernels_attention and any_order and fwd", nth=1,
    ),
    Mutant(
        "open blocks read as sealed ones",
        "attention_stage.h", KERNEL,
        "open = (opened_ >> drain_ & 1) != 0;", "open = false;",
        "open_blocks_among and q8",
    ),
    Mutant(
        "tiles across blocks that are stored differently",
        "attention_launch.h", KERNEL,
        "call.run_keys = by_block ? (int)g.block_size : call.keys;", "call.run_keys = call.keys;",
        "open_blocks_among and q8",
    ),
    Mutant(
        "rows that do not exist left as they are",
        "attention_stage.h", KERNEL,
        "if (source == 0 || first + unit * UNIT >= end) {\n"
        "                pc_store_unit<UNIT>(into, pc_unit<UNIT>{});",
        "if (source == 0 || first + unit * UNIT >= end) {",
        "test_kernels_attention and never_matter and q8",
    ),
    Mutant(
        "distance of attended blocks in 32 bits",
        "attention_stage.h", KERNEL,
        "(uint64_t)(source.place * own.block_stride)",
        "(uint64_t)(int64_t)(int32_t)(source.place * own.block_stride)",
        "test_kernels_attention and gigabytes",
    ),
    Mutant(
        "NaN of a key for queries that do not attend to it",
        KERNEL, KERNEL,
        "if (view.exact || !__any_sync(~0u, !made.is_finite())) {",
        "if (view.exact || __any_sync(~0u, true)) {",
        "count_for_who_attends and float16",
    ),
)  # fmt: skip

#: No test may tell these from the kernel as it is: formats without a reader of their own are
#: decoded by the function of the format table.
VARIANTS = tuple(
    Mutant(
        f"{name} read by the function of the format table",
        "attention_values.h", KERNEL,
        f"struct pc_reader<pc_row_of_{name}> :", f"struct pc_reader<const pc_row_of_{name}> :",
        f"test_kernels_attention and {name} and (every_format or any_address or never_matter)",
    )
    for name in ("q8", "q4_0", "q4_1")
)  # fmt: skip

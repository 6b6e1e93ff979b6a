"""The attention kernel gives what float64 gives, within the error of its arithmetic, from what the
CPU reads of the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attentionkit import Options, assert_close, attend
from kernelattention import Answer, Query, items_of, run, stored
from kernelkit import Array, Board, Place, bits, uneven
from profiles import SHORT
from storagekit import ARRANGEMENTS, BFLOAT16, BY_ROW, DTYPES, FORMATS, LAYOUTS

from pagedcache._cuda.attention import ROWS
from pagedcache.formats import get_format

DIMS = (1, 16, 33, 64, 72, 80, 96, 128, 192, 256)
Pair = tuple[Place, Place]


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


def places(board: Board, k_format: str, v_format: str | None = None, **shape: Any) -> Pair:
    """K and V, every slot full of values."""
    made = []
    for seed, fmt in ((1, k_format), (2, v_format or k_format)):
        place = Place(board, fmt, seed=seed, **shape)
        place.fill_with_values(seed)
        made.append(place)
    return made[0], made[1]


def make_query(
    place: Place, num_queries: int, length: int, group: int = 2, seed: int = 0,
    dtype: Any = np.float32, start: int = 0, ids: Sequence[int] | None = None,
) -> Query:  # fmt: skip
    """Random queries behind random blocks."""
    rng = np.random.default_rng(seed)
    if ids is None:
        ids = rng.permutation(place.num_blocks)[: -(-length // place.block_size)].tolist()
    q = rng.standard_normal((num_queries, place.heads * group, place.dim)).astype(dtype)
    return Query(q, length, ids, start)


def check(
    pair: Pair, queries: Sequence[Query], options: Options | None = None, what: Any = "",
    opened: Pair | None = None, **how: Any,
) -> Answer:  # fmt: skip
    """Run, and compare each sequence with the reference."""
    options = options or Options()
    k, v = pair
    answer = run(k, v, queries, options, open_places=opened, **how)
    at = 0
    for query in queries:
        mine = slice(at, at + len(query.q))
        at += len(query.q)
        keys = stored(k, query, opened and opened[0])
        values = stored(v, query, opened and opened[1])
        here = Options(**{**vars(options), "start": query.start})
        assert_close(answer.out[mine], answer.lse[mine], query.q, keys, values, here, what)
    return answer


# ---- formats, shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_and_head_dim(board: Board, fmt: str, layout: str) -> None:
    # SPEC step 3: every format, layout, head_dim, group ratio
    for dim, group in zip(DIMS, itertools.cycle((1, 4, 3, 8)), strict=False):
        pair = places(board, fmt, layout=layout, heads=2, block_size=16, dim=dim, num_blocks=6)
        queries = [
            make_query(pair[0], 1, 83, group, dim, ids=[3, 1, 4, 0, 5, 2]),
            make_query(pair[0], 2, 18, group, dim + 1, ids=[2, 5]),
        ]
        check(pair, queries, what=(fmt, layout, dim, group), split=dim % 3)


@pytest.mark.parametrize("k_format", FORMATS)
def test_keys_and_values_in_different_formats(board: Board, k_format: str) -> None:
    for v_format in FORMATS:
        pair = places(board, k_format, v_format, block_size=16, dim=64, num_blocks=3)
        check(pair, [make_query(pair[0], 1, 45)], what=(k_format, v_format), split=1)


@pytest.mark.parametrize("block_size", (1, 3, 4, 8, 16, 20, 32, 40, 64))
def test_every_block_size(board: Board, block_size: int) -> None:
    formats = ("bfloat16", "q4", "q4k", *(() if SHORT else ("q8", "q8_0", "q4_1")))
    for fmt, layout in itertools.product(formats, LAYOUTS):
        length = 2 * block_size + 50
        blocks = -(-length // block_size)
        pair = places(board, fmt, layout=layout, block_size=block_size, dim=80,
                      num_blocks=blocks + 1)  # fmt: skip
        for pointers in (False, True):
            check(pair, [make_query(pair[0], 2, length, 4)], what=(fmt, layout, block_size),
                  pointers=pointers, split=2)  # fmt: skip


@pytest.mark.parametrize("group", (1, 2, 3, 5, 7, 8, 12, 16))
def test_query_heads_that_share_a_head(board: Board, group: int) -> None:
    pair = places(board, "q8_0", heads=3, block_size=16, dim=32, num_blocks=4)
    for num_queries in (1, 2, 5):
        answer = check(pair, [make_query(pair[0], num_queries, 61, group)], split=2)
        assert answer.out.shape == (num_queries, 3 * group, 32)


def test_every_length(board: Board) -> None:
    pair = places(board, "q4_0", block_size=16, dim=64, num_blocks=11)
    for length in range(1, 130, 1 if not SHORT else 7):
        check(pair, [make_query(pair[0], 1, length, 4, seed=length)], what=length)


@pytest.mark.parametrize(
    ("fmt", "length"), (("bfloat16", 1024), ("q8_0", 1000), ("bfloat16", 4097))
)
def test_a_long_sequence_in_any_number_of_parts(board: Board, fmt: str, length: int) -> None:
    """Equal within their arithmetic, whatever the parts; the last CTA adds in their order."""
    if SHORT and length > 2000:
        pytest.skip("the short profile")
    pair = places(board, fmt, block_size=16, dim=64, heads=1, num_blocks=260)
    query = make_query(pair[0], 1, length, 4)
    splits = (0, 1, 2, 7, 20, 64)
    answers = [check(pair, [query], split=split, what=split) for split in splits]
    for answer in answers[1:]:
        np.testing.assert_allclose(answer.out, answers[0].out, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(answer.lse, answers[0].lse, rtol=2e-6)


# ---- which keys --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", (None, 1, 5, 16, 1000))
def test_causal_and_windowed(board: Board, causal: bool, window: int | None) -> None:
    pair = places(board, "float16", block_size=16, dim=32, num_blocks=8)
    options = Options(causal=causal, window=window)
    queries = [
        make_query(pair[0], 40, 40, 3, 1),  # a whole prompt
        make_query(pair[0], 9, 77, 3, 2, start=6),  # a chunk of one, padded on the left
        make_query(pair[0], 1, 100, 3, 3),
    ]
    for split in (0, 1):
        check(pair, queries, options, what=split, split=split)


def test_scale_soft_cap_and_sinks(board: Board) -> None:
    pair = places(board, "q8", block_size=16, dim=64, num_blocks=4)
    sinks = np.array([-3, 0, 2, 8], np.float32)
    for options in (
        Options(scale=0.02), Options(scale=1.5), Options(soft_cap=3.0), Options(sinks=sinks),
        Options(scale=0.7, soft_cap=20.0, sinks=sinks, window=30, causal=False),
    ):  # fmt: skip
        for split in (0, 1):
            check(pair, [make_query(pair[0], 3, 60)], options, (options, split), split=split)


def test_queries_without_keys(board: Board) -> None:
    """Zeros, and the logarithm of nothing."""
    pair = places(board, "float32", block_size=16, dim=40, num_blocks=3)
    none = make_query(pair[0], 2, 2, start=2)
    some = make_query(pair[0], 4, 9, start=7)  # the first two of four have none
    answer = check(pair, [none, some])
    assert not answer.out[:4].any() and np.isneginf(answer.lse[:4]).all()
    assert answer.out[4:].any() and np.isfinite(answer.lse[4:]).all()
    sinks = np.linspace(-1, 1, 4, dtype=np.float32)
    check(pair, [none, some], Options(sinks=sinks))


def test_scores_that_grow_and_shrink(board: Board) -> None:
    """The largest score comes first, last, or anywhere; others vanish beside it."""
    pair = places(board, "float32", block_size=16, dim=32, heads=1, num_blocks=8)
    k, _ = pair
    query = make_query(k, 1, 128, 1, ids=range(8))
    for peak in (0, 15, 16, 63, 127):
        rows = np.random.default_rng(peak).standard_normal((128, 1, 32)).astype(np.float32)
        rows[peak] = query.q[0] * 20
        rows[(peak + 37) % 128] = -query.q[0] * 20
        k.native.store(0, bits(rows), 0, np.arange(128), 1)
        k.copies[0].send()
        for split in (0, 2):
            check(pair, [query], what=(peak, split), split=split)


# ---- poison, and bytes beside ------------------------------------------------------------------


def zeros_before(values: Array, start: int) -> Array:
    """The values, those before ``start`` as zeros."""
    values[:start] = 0
    return values


@pytest.mark.parametrize("fmt", BY_ROW)
def test_bytes_outside_the_sequence_never_matter(board: Board, fmt: str) -> None:
    # CASE C41
    for layout, (start, length), opened in itertools.product(
        LAYOUTS, ((0, 5), (3, 37), (17, 18), (31, 70)), (False, True)
    ):
        shape = {"layout": layout, "block_size": 16, "dim": 80, "num_blocks": 6}
        pair = Place(board, fmt, **shape), Place(board, fmt, **shape)
        ids = [4, 2, 5, 0, 1][: -(-length // 16)]
        for seed, place in enumerate(pair):
            place.memories[0][:] = 0xFF  # NaN in every format
            positions = np.arange(start, length)
            slots = np.array(ids)[positions // 16] * 16 + positions % 16
            rows = np.random.default_rng(seed).standard_normal((len(slots), 2, 80))
            place.native.store(0, bits(rows.astype(np.float32)), 0, slots, 0)
            place.copies[0].send()
        # The open slots hold NaN only; the block behind the last one lies there.
        others = (Place(board, "float16", **shape), Place(board, "bfloat16", **shape))
        for place in others:
            place.memories[0][:] = 0xFF
            place.copies[0].send()
        query = make_query(pair[0], 1, length, 4, start=start, ids=[*ids, 6 + 1])
        keys = [zeros_before(stored(place, query), start) for place in pair]
        for split, causal in ((0, True), (1, True), (0, False)):
            options = Options(causal=causal)
            answer = run(*pair, [query], options, split=split,
                         open_places=others if opened else None)  # fmt: skip
            here = Options(start=start, causal=causal)
            assert_close(answer.out, answer.lse, query.q, *keys, here, (layout, start, length))




@pytest.mark.parametrize("fmt", ("float32", "float16", "bfloat16"))
def test_keys_that_are_not_finite_count_for_who_attends_to_them(board: Board, fmt: str) -> None:
    """Float formats hold NaN and Inf. They reach the queries behind them, as in float64, and no
    other one, though queries share products."""
    num_keys = 60
    for at, kind, value, split in itertools.product(
        (25, 37, 55), "kv", (np.nan, np.inf, -np.inf), (0, 1)
    ):
        shape = {"block_size": 16, "dim": 72, "num_blocks": 4, "heads": 1}
        pair = places(board, fmt, **shape)
        place = pair["kv".index(kind)]
        query = make_query(pair[0], 40, num_keys, 2, seed=at, ids=[2, 0, 3, 1])
        rows = stored(place, query)
        rows[at, 0, 5] = value
        slots = np.array(query.block_ids)[np.arange(num_keys) // 16] * 16
        place.native.store(0, bits(rows), 0, slots + np.arange(num_keys) % 16, 1)
        place.copies[0].send()
        answer = run(*pair, [query], Options(), split=split)
        with np.errstate(invalid="ignore"):
            want, want_lse = attend(query.q, *(stored(p, query) for p in pair), Options())
        for got, expected in ((answer.out, want), (answer.lse, want_lse)):
            same = np.isfinite(expected)
            assert same.any()
            np.testing.assert_array_equal(np.isfinite(got), same)
            np.testing.assert_array_equal(got[np.isinf(expected)], expected[np.isinf(expected)])
            np.testing.assert_allclose(got[same], expected[same], rtol=1e-4, atol=1e-5)


def test_queries_that_are_not_finite_keep_to_themselves(board: Board) -> None:
    for fmt in ("float16", "q8", "q4_1", "q4k"):
        pair = places(board, fmt, block_size=16, dim=64, num_blocks=4)
        query = make_query(pair[0], 3, 50)
        clean = run(*pair, [query], Options())
        for value in (np.nan, np.inf):
            query.q[1, 2, 9] = value
            answer = run(*pair, [query], Options(), split=1)
            assert np.isnan(answer.out[1, 2]).all() and np.isnan(answer.lse[1, 2])
            others = np.ones(query.q.shape[:2], bool)
            others[1, 2] = False
            np.testing.assert_allclose(answer.out[others], clean.out[others], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shift", (0, 1, 2, 4, 8))
@pytest.mark.parametrize("fmt", FORMATS)
def test_any_address_and_stride_of_blocks(board: Board, fmt: str, shift: int) -> None:
    # SPEC F48
    for layout, gap, backwards, dim in (
        ("HND", 0, False, 64), ("NHD", 48, False, 72), ("HND", 13, True, 96), ("NHD", 4, True, 50),
    ):  # fmt: skip
        pair = places(board, fmt, layout=layout, block_size=8, dim=dim, gap=gap,
                      backwards=backwards, shift=shift, num_blocks=7)  # fmt: skip
        for pointers in (False, True):
            check(pair, [make_query(pair[0], 1, 53)], what=(layout, gap, backwards, pointers),
                  pointers=pointers, split=3)  # fmt: skip


# ---- queries and results in memory -------------------------------------------------------------


@pytest.mark.parametrize("lie", [lie for lie in ARRANGEMENTS if lie not in ("flat", "read-only")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_and_results_of_any_strides(board: Board, dtype: Any, lie: str) -> None:
    # CASE C45
    pair = places(board, "q8", block_size=16, dim=64, num_blocks=4)
    query = make_query(pair[0], 3, 60, 2, dtype=dtype)
    q = ARRANGEMENTS[lie](np.zeros((3, 4, 64), dtype))
    out = ARRANGEMENTS[lie](np.full((3, 4, 64), 99, dtype))
    around = np.asarray(out if out.base is None else out.base)
    before = around.copy()
    check(pair, [query], q=q, out=out)
    if lie == "strided":  # the values between stay as they were
        changed = around != before
        changed[::2, ::3, ::2] = False
        assert not changed.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_of_which_one_step_is_not_aligned(board: Board, dtype: Any) -> None:
    pair = places(board, "bfloat16", block_size=16, dim=32, num_blocks=4)
    for axis in (0, 1):
        query = make_query(pair[0], 3, 50, 2, dtype=dtype)
        space = np.zeros((3, 4, 32), dtype)
        check(pair, [query], q=uneven(space, axis), out=uneven(space, axis))


def test_queries_of_any_magnitude(board: Board) -> None:
    pair = places(board, "float16", block_size=16, dim=64, num_blocks=4)
    for factor in (0.0, 1e-30, 1e-6, 1e3):
        query = make_query(pair[0], 2, 60)
        query.q *= np.float32(factor)
        check(pair, [query], what=factor)


# ---- open blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", (1, 4, 16, 24, 48))
@pytest.mark.parametrize("fmt", ("q8", "q4", "q4_1", "q4k"))
def test_open_blocks_among_sealed_ones(board: Board, fmt: str, block_size: int) -> None:
    length = 3 * block_size + 40
    blocks = -(-length // block_size)
    for layout, (k_open, v_open) in itertools.product(
        LAYOUTS, (("float16", "float16"), ("bfloat16", "float32"))
    ):
        shape = {"layout": layout, "block_size": block_size, "dim": 72}
        pair = places(board, fmt, "q4_1", num_blocks=blocks, **shape)
        opened = places(board, k_open, v_open, num_blocks=4, **shape)
        ids = np.random.default_rng(1).permutation(blocks)
        ids[-2:] = blocks + np.array([3, 1])
        ids[1] = blocks  # one in the middle, as after a fork
        for pointers in (False, True):
            check(pair, [make_query(pair[0], 2, length, 3, ids=ids.tolist())], opened=opened,
                  what=(layout, k_open, pointers), pointers=pointers, split=2)  # fmt: skip


# ---- order, addresses --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ("fwd", "rev", "1", "2"))
def test_any_order_of_threads(board: Board, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PC_EMU_ORDER", order)
    for fmt in ("bfloat16", "q8", "q4_0", "q4_1", "q4k"):
        pair = places(board, fmt, heads=2, block_size=16, dim=96, num_blocks=8)
        queries = [make_query(pair[0], 2, 101, 4, 1), make_query(pair[0], 1, 120, 4, 2)]
        check(pair, queries, what=fmt, split=1)


def test_parts_do_not_change_with_their_order(board: Board) -> None:
    """The same bits, whichever CTA is last."""
    pair = places(board, "q8", heads=2, block_size=16, dim=64, num_blocks=8)
    queries = [make_query(pair[0], 1, 128, 4), make_query(pair[0], 3, 90, 4)]
    items, parts, _ = items_of(queries, Options(), 4, 16, 1)
    assert parts > 10
    first = run(*pair, queries, Options(), split=1)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(items))
        again = run(*pair, queries, Options(), split=1, order=order)
        np.testing.assert_array_equal(again.out, first.out)
        np.testing.assert_array_equal(again.lse, first.lse)


def test_far_beyond_two_gigabytes(board: Board) -> None:
    # CASE C46
    for fmt in ("float16", "q8", "q4k"):
        pair = places(board, fmt, num_blocks=3, block_size=16, dim=64, heads=2)
        far, step = 2_000_000, 2**23 + 64  # a base that lies before all memory
        query = make_query(pair[0], 1, 16, ids=[1])
        expected = stored(pair[0], query), stored(pair[1], query)
        for place in pair:
            place.bases[0] += place.stride - far * step
            place.stride = step
        answer = run(*pair, [Query(query.q, 16, [far])], Options())
        assert_close(answer.out, answer.lse, query.q, *expected, Options(), fmt)


def test_head_dims_beyond_registers_are_refused(board: Board) -> None:
    pair = places(board, "float16", num_blocks=2, block_size=4, dim=257, heads=1)
    with pytest.raises(Exception, match="cudaErrorInvalidValue"):
        run(*pair, [make_query(pair[0], 1, 3)], Options())


def test_items_are_what_the_header_says(board: Board) -> None:
    """No more rows than a CTA has; each format of the table can be told apart."""
    assert ROWS == 8
    assert {get_format(name).code for name in FORMATS} == set(range(len(FORMATS)))
    assert BFLOAT16 in DTYPES

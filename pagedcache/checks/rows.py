"""Checks of bytes: rows in, rows out, where they lie, and what sources and outputs may be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagedcache.errors import NonFiniteError

from .block_bytes import block_bytes
from .compare import equal, raises, require, same_bits
from .devices import host
from .reference import saturate
from .registry import Context
from .stage import Stage


def round_trip(context: Context) -> None:
    """Rows appended in uneven steps read back bit for bit, and within the format's bound."""
    with Stage(context) as stage:
        steps = [int(n) for n in stage.rng.integers(0, 2 * stage.block_size, 6)]
        k, v = stage.rows(sum(steps))
        with stage.cache.open() as seq:
            done = 0
            for step in steps:
                stage.append(seq, k[:, done : done + step], v[:, done : done + step])
                done += step
                stage.expect(seq, k, v, stop=done)
            got = stage.gather(seq, 1, dtype=np.float32)
        for kind, given, read in zip("kv", (k[1], v[1]), got, strict=True):
            inside = np.abs(read - given) <= stage.bound(kind, given)
            require(bool(inside.all()), f"{kind}: an error is larger than the format's bound")
        stage.unused()


def sources_and_outputs(context: Context) -> None:
    """float32, float16 and bfloat16 rows in, in any memory order; the same three out."""
    dtypes = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    with Stage(context) as stage:
        n = stage.block_size + 3
        for source in dtypes:
            k, v = (rows.astype(source) for rows in stage.rows(n))
            with stage.cache.open() as seq:
                for layer in range(stage.num_layers):
                    # K as [n, heads * dim]; V as a reversed view of a reversed copy.
                    backwards = np.ascontiguousarray(v[layer, ::-1])[::-1]
                    flat = k[layer].reshape(n, -1)
                    seq.append(layer, stage.given(flat), stage.given(backwards))
                stage.expect(seq, k.astype(np.float32), v.astype(np.float32))
                for output in dtypes:
                    got = stage.gather(seq, 0, dtype=output)
                    for kind, given, read in zip("kv", (k[0], v[0]), got, strict=True):
                        equal(read.dtype, output, "dtype read")
                        what = f"{kind} {source} in, {output} out"
                        stage.same(kind, read, given.astype(np.float32), 0, what)


def block_layout(context: Context) -> None:
    """The bytes of a block lie where the layout and the packing say."""
    with Stage(context) as stage:
        size = stage.block_size
        k, v = stage.rows(2 * size)
        with stage.cache.open() as seq:
            stage.append(seq, k, v)
            for layer in range(stage.num_layers):
                views = list(seq.views(layer))
                equal([view.start for view in views], [0, size], "starts of the views")
                for view in views:
                    span = slice(view.start, view.start + view.length)
                    for kind, got, rows in (("k", view.k, k), ("v", view.v, v)):
                        name, got = stage.formats[kind], host(got)
                        want = block_bytes(name, context.layout, rows[layer, span])
                        if got.dtype != np.uint8:  # a float view is head-major in both layouts
                            want = block_bytes(name, "HND", rows[layer, span])
                            got = np.ascontiguousarray(got).reshape(-1).view(np.uint8)
                        same_bits(got.reshape(-1)[: want.size], want, f"layer {layer} {kind}")
                del views, view, got  # a view pins its block
        stage.unused()


def gather_ranges(context: Context) -> None:
    """Any range of a sequence whose blocks lie scattered comes out contiguous and in order."""
    with Stage(context) as stage:
        fillers = [stage.cache.open(stage.tokens(stage.block_size)) for _ in range(8)]
        for filler in fillers[::2]:
            filler.free()
        with stage.cache.open(stage.tokens(5 * stage.block_size + 1)) as seq:
            k, v = stage.fill(seq)
            n = k.shape[1]
            for start, stop in np.sort(stage.rng.integers(0, n + 1, (12, 2)), axis=1).tolist():
                stage.expect(seq, k, v, start, stop)
            shape = (n, stage.num_kv_heads, stage.head_dim)
            out: tuple[Any, Any] = tuple(stage.given(np.zeros(shape, np.float32)) for _ in "kv")
            seq.gather(0, out=out, dtype=np.float32)
            stage.same("k", host(out[0]), k[0], 0, "K into the caller's array")
            stage.same("v", host(out[1]), v[0], 0, "V into the caller's array")


def store_by_slots(context: Context) -> None:
    """One call stores the rows of many sequences; slot -1 writes nothing."""
    with Stage(context) as stage:
        counts = [stage.block_size + 3, 1, 2 * stage.block_size]
        seqs = [stage.cache.open(stage.tokens(n)) for n in counts]
        slots = stage.cache.prepare(seqs, counts)
        equal(len(slots), sum(counts), "length of the slot mapping")
        k, v = stage.rows(sum(counts))
        for layer in range(stage.num_layers):
            stage.cache.store(layer, stage.given(k[layer]), stage.given(v[layer]), slots)
        bounds = np.cumsum([0, *counts])
        # The same rows once more in another order, every third one left out, over new values.
        order, left_out = _another_order(stage, np.asarray(slots))
        raw = np.asarray(slots)[order]
        raw[left_out] = -1
        new_k, new_v = stage.rows(sum(counts))
        for layer in range(stage.num_layers):
            given = [stage.given(rows[layer][order]) for rows in (new_k, new_v)]
            stage.cache.store(layer, given[0], given[1], raw)
        kept = np.delete(order, left_out).tolist()
        k[:, kept], v[:, kept] = new_k[:, kept], new_v[:, kept]
        for seq, start, stop in zip(seqs, bounds[:-1], bounds[1:], strict=True):
            seq.commit(int(stop - start))
            stage.expect(seq, k[:, start:stop], v[:, start:stop])
            seq.free()
        stage.unused()


def _another_order(stage: Stage, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """A permutation of the tokens, and which of its entries to leave out.

    With open blocks, those written whole are sealed and can only be written whole again.
    """
    if not stage.spec.has_open_blocks:
        return stage.rng.permutation(len(slots)), list(range(0, len(slots), 3))
    blocks = slots // stage.block_size
    whole: list[NDArray[np.intp]] = []
    parts: list[NDArray[np.intp]] = []
    for block in stage.rng.permutation(np.unique(blocks)).tolist():
        tokens = np.flatnonzero(blocks == block)
        (whole if len(tokens) == stage.block_size else parts).append(tokens)
    mixed = stage.rng.permutation(np.concatenate(parts))
    order = np.concatenate((*whole, mixed))
    return order, list(range(len(order) - len(mixed), len(order), 3))


def nonfinite(context: Context) -> None:
    """NaN and Inf: refused with nothing changed, or saturated inside their own group."""
    dense = context.k_format in ("float32", "float16", "bfloat16")
    with Stage(context) as stage:
        k, v = stage.rows(stage.block_size)
        bad = k.copy()
        bad[:, 1, 0, :3] = np.nan, np.inf, -np.inf
        bad[:, 2, -1, :] = np.nan
        with stage.cache.open() as seq:
            if dense:
                stage.append(seq, bad, v)
                stage.expect(seq, bad, v)
                return
            first = stage.given(bad[0]), stage.given(v[0])
            raises(NonFiniteError, lambda: seq.append(0, *first), "NaN under 'raise'")
            equal(seq.num_written, 0, "rows written by a refused append")
            for layer in range(stage.num_layers):
                given = stage.given(bad[layer]), stage.given(v[layer])
                seq.append(layer, *given, on_nonfinite="saturate")
            # by channel, and in open blocks, what Inf acts as depends on where it went
            stage.expect(seq, bad if stage.spec.has_open_blocks else saturate(bad), v)

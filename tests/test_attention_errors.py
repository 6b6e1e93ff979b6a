"""What ``attend`` refuses: typed errors, before a byte is written, with nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from badvalues import NOT_INTEGERS, SEQS, Odd
from cachekit import fill, make_cache, refused
from devicekit import cpu_memory, host

import pagedcache as pc


def label(value: Any) -> str:
    """A name of a test that is the same in every process: without addresses."""
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text[:40]


HEADS, GROUP, DIM, B = 2, 3, 8, 4


@dataclass
class World:
    cache: pc.PagedKVCache
    seq: pc.Sequence
    twin: pc.Sequence
    gone: pc.Sequence
    stranger: pc.Sequence
    q: np.ndarray
    out: np.ndarray

    def call(self, layer: Any = 0, q: Any = None, seqs: Any = None, **options: Any) -> Any:
        options.setdefault("out", self.out)
        q = self.q if q is None else q
        seqs = [self.seq, self.twin] if seqs is None else seqs
        return self.cache.attend(layer, q, seqs, **options)

    def refused(self, kind: Any, **options: Any) -> Any:
        error = refused(self.cache, lambda: self.call(**options), kind, self.seq, self.twin)
        assert (self.out == -7).all(), "written before it was refused"
        return error


@pytest.fixture
def world() -> Iterator[World]:
    with make_cache(16, B=B, layers=2, heads=HEADS, dim=DIM) as cache, make_cache(
        16, B=B, layers=2, heads=HEADS, dim=DIM
    ) as other:
        seq, gone, stranger = cache.open(range(9)), cache.open(range(50, 53)), other.open(range(9))
        fill(cache, seq, range(1, 10))
        fill(other, stranger, range(1, 10))
        twin = seq.fork()
        gone.free()
        q = np.ones((2, HEADS * GROUP, DIM), np.float32)
        yield World(cache, seq, twin, gone, stranger, q, np.full_like(q, -7))


def wrong_shapes() -> list[Any]:
    one = np.float32
    return [
        np.ones((2, 5, DIM), one),  # no multiple of the KV heads
        np.ones((2, 1, DIM), one),
        np.ones((2, 0, DIM), one),
        np.ones((2, 6, DIM + 1), one),  # another head_dim
        np.ones((2, 6, 2 * DIM), one),
        np.ones((2, 6 * DIM + 1), one),
        np.ones((2, 5 * DIM), one),
        np.ones((2, 0), one),
        np.ones(6 * DIM, one),
        np.ones((1, 2, 6, DIM), one),
        np.float32(1),
        np.zeros((0, DIM), one),
    ]


@pytest.mark.parametrize("q", wrong_shapes(), ids=lambda q: str(np.shape(q)))
def test_queries_of_a_wrong_shape(world: World, q: Any) -> None:
    error = world.refused(pc.ShapeError, q=q)
    assert "num_kv_heads" in str(error) and error.what == "q"
    assert error.got == list(np.shape(q))


BAD_ARRAYS = [5, "a", b"a", Odd(), [1.0], np.ones((2, 6, DIM)), np.ones((2, 6, DIM), np.int8),
              np.ones((2, 6, DIM), complex), np.ones((2, 6, DIM), object),
              np.ones((2, 6, DIM), np.dtype(np.float32).newbyteorder()),
              np.ma.masked_array(np.ones((2, 6, DIM), np.float32), mask=True)]  # fmt: skip


@pytest.mark.parametrize("q", BAD_ARRAYS, ids=lambda q: type(q).__name__)
def test_queries_of_a_wrong_dtype(world: World, q: Any) -> None:
    error = world.refused(pc.FormatError, q=q)
    assert error.what == "q"


def test_sequences_that_are_not_there(world: World) -> None:
    world.refused(pc.FreedHandleError, seqs=[world.seq, world.gone])
    error = world.refused(pc.InvalidArgumentError, seqs=[world.seq, world.stranger])
    assert "another cache" in str(error)
    world.refused(pc.InvalidArgumentError, seqs=world.stranger)
    world.refused(pc.FreedHandleError, seqs=world.gone)
    for seqs in SEQS:
        if seqs is not None:
            world.refused(pc.InvalidArgumentError, seqs=seqs)


@pytest.mark.parametrize("layer", [-1, 2, 2**70, *NOT_INTEGERS], ids=label)
def test_layers(world: World, layer: Any) -> None:
    world.refused(pc.InvalidArgumentError, layer=layer)


@pytest.mark.parametrize(
    ("q_lens", "kind"),
    [([1], pc.InvalidArgumentError), ([1, 1, 0], pc.InvalidArgumentError),
     ([1, 2], pc.InvalidArgumentError), ([0, 0], pc.InvalidArgumentError),
     ([3, -1], pc.InvalidArgumentError), ([2**62, 2**62], pc.InvalidArgumentError),
     ([2**63, 2 - 2**63], pc.InvalidArgumentError), ("ab", pc.InvalidArgumentError),
     (2, pc.InvalidArgumentError), ([1.0, 1.0], pc.InvalidArgumentError),
     ([True, True], pc.InvalidArgumentError), ([None, 2], pc.InvalidArgumentError),
     (np.array([[1, 1]]), pc.InvalidArgumentError), (np.ones(2), pc.InvalidArgumentError),
     (Odd(), pc.InvalidArgumentError)],
    ids=label,
)  # fmt: skip
def test_q_lens(world: World, q_lens: Any, kind: Any) -> None:
    world.refused(kind, q_lens=q_lens)


def test_q_lens_that_nobody_can_guess(world: World) -> None:
    error = world.refused(pc.InvalidArgumentError, q=np.ones((3, 6, DIM), np.float32), out=None)
    assert "q_lens" in str(error) and "3 queries for 2 sequences" in str(error)


@pytest.mark.parametrize(
    "lengths", [[9], [9, 9, 9], [9, 10], [-1, 9], [9, 2**70], [9, None], "ab", 9, [9.0, 9.0],
                np.array([9.5, 9])], ids=label
)  # fmt: skip
def test_lengths(world: World, lengths: Any) -> None:
    error = world.refused((pc.InvalidPositionError, pc.InvalidArgumentError), lengths=lengths)
    assert "lengths" in str(error)


def test_lengths_past_what_is_there(world: World) -> None:
    error = world.refused(pc.InvalidPositionError, lengths=[9, 12])
    assert (error.position, error.length) == (12, 9)
    slots = world.cache.prepare([world.seq], [2])
    error = world.refused(pc.InvalidArgumentError)  # by default: how many of the 2 are written?
    assert "2 tokens of sequence 0" in str(error) and "lengths" in str(error)
    world.refused(pc.InvalidPositionError, lengths=[12, 9])
    assert len(slots) == 2
    world.call(lengths=[11, 9], out=None)


def test_more_queries_than_keys(world: World) -> None:
    error = world.refused(pc.InvalidPositionError, lengths=[0, 9])
    assert (error.position, error.length) == (1, 0)
    world.refused(pc.InvalidPositionError, lengths=[1, 9], q_lens=[2, 0])


@pytest.mark.parametrize(
    "starts",
    [[0], [0, 0, 0], [0, 10], [-1, 0], [0, 2**70], [None, 0], "ab", 0, [0.5, 0]],
    ids=label,
)
def test_starts(world: World, starts: Any) -> None:
    error = world.refused((pc.InvalidPositionError, pc.InvalidArgumentError), starts=starts)
    assert "starts" in str(error)


NOT_NUMBERS = ["1", b"1", True, Odd(), [], [1.0, 2.0], float("nan"), float("inf"), -float("inf"),
               1e39, 10**400, 1j, np.array([1.0, 2.0])]  # fmt: skip


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=label)
def test_numbers(world: World, value: Any) -> None:
    assert "scale" in str(world.refused(pc.InvalidArgumentError, scale=value))
    assert "soft_cap" in str(world.refused(pc.InvalidArgumentError, soft_cap=value))


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1.0, 1e-46])
def test_soft_caps_that_are_not_above_zero(world: World, value: float) -> None:
    world.refused(pc.InvalidArgumentError, soft_cap=value)


@pytest.mark.parametrize("window", [0, -1, 2**70, *[v for v in NOT_INTEGERS if v is not None]],
                         ids=label)  # fmt: skip
def test_windows(world: World, window: Any) -> None:
    assert "window" in str(world.refused(pc.InvalidArgumentError, window=window))


def test_flags(world: World) -> None:
    for name in ("causal", "return_lse"):
        assert name in str(world.refused(pc.InvalidArgumentError, **{name: np.array([1, 2])}))


@pytest.mark.parametrize(
    "sinks",
    [np.ones(5, np.float32), np.ones(7, np.float32), np.ones(HEADS, np.float32),
     np.ones((6, 1), np.float32), np.float32(1), np.ones(6), np.ones(6, int), "sinks", Odd(),
     np.array([1, 2, 3, 4, 5, np.nan], np.float32), np.array([1, 2, 3, 4, 5, np.inf], np.float32)],
    ids=lambda s: f"{type(s).__name__} {np.shape(s)} {getattr(s, 'dtype', '')}",
)  # fmt: skip
def test_sinks(world: World, sinks: Any) -> None:
    kinds = (pc.ShapeError, pc.FormatError, pc.InvalidArgumentError)
    assert "sinks" in str(world.refused(kinds, sinks=sinks))


def read_only(like: np.ndarray) -> np.ndarray:
    out = like.copy()
    out.flags.writeable = False
    return out


def misaligned(like: np.ndarray) -> np.ndarray:
    return np.zeros(like.nbytes + 1, np.uint8)[1:].view(like.dtype).reshape(like.shape)


BAD_OUTS: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda w: w.q, pc.ShapeError),  # q itself
    (lambda w: w.q.reshape(2, -1).reshape(w.q.shape), pc.ShapeError),
    (lambda w: np.empty((3, 6, DIM), np.float32), pc.ShapeError),
    (lambda w: np.empty((2, 6 * DIM), np.float32), pc.ShapeError),  # q has three axes
    (lambda w: np.empty(w.q.shape, np.float16), pc.FormatError),
    (lambda w: np.empty(w.q.shape, np.float64), pc.FormatError),
    (lambda w: np.empty(w.q.shape, ml_dtypes.bfloat16), pc.FormatError),
    (lambda w: np.empty(w.q.shape, np.dtype(np.float32).newbyteorder()), pc.FormatError),
    (lambda w: read_only(w.q), pc.FormatError),
    (lambda w: misaligned(w.q), pc.FormatError),
    (lambda w: np.broadcast_to(np.empty(DIM, np.float32), w.q.shape), pc.ShapeError),
    (lambda w: [1.0], pc.InvalidArgumentError),
    (lambda w: "out", pc.InvalidArgumentError),
    (lambda w: (np.empty_like(w.q), None), pc.InvalidArgumentError),
]


@cpu_memory("arrays to fill")
@pytest.mark.parametrize("number", range(len(BAD_OUTS)))
def test_outs(world: World, number: int) -> None:
    make, kind = BAD_OUTS[number]
    before = world.q.copy()
    world.refused(kind, out=make(world))
    np.testing.assert_array_equal(world.q, before)


@cpu_memory("an array over the slabs")
def test_an_out_over_the_slabs(world: World) -> None:
    k, v = world.cache.slabs(1)
    inside = k.reshape(-1)[: 2 * HEADS * DIM * GROUP].reshape(2, HEADS * GROUP, DIM)
    world.refused(pc.ShapeError, out=inside)
    world.refused(pc.ShapeError, out=v.reshape(-1)[32:][: inside.size].reshape(inside.shape))
    result = world.call(q=inside, out=None)  # as a q it may lie there
    assert host(result).shape == inside.shape


def test_a_cache_without_bytes_and_a_closed_one(world: World) -> None:
    spec = pc.CacheSpec(2, HEADS, DIM, B)
    with pc.PagedKVCache(spec, 4, storage=None) as cache, cache.open([1, 2]) as seq:
        with pytest.raises(pc.FormatError, match="storage=None"):
            cache.attend(0, world.q[:1], seq)
    world.cache.close()
    with pytest.raises(pc.FreedHandleError):
        world.call()


@cpu_memory("no streams there")
def test_a_stream_on_the_cpu(world: World) -> None:
    world.refused(pc.DeviceError, stream=5)


# ---- below the door ------------------------------------------------------------------------


def native(cache: pc.PagedKVCache, **changes: Any) -> None:
    """The native call on 9 tokens in blocks 0, 1, 2, with some arguments changed."""
    from pagedcache._native import attention

    slabs = cache._storage._slabs
    bits = np.ones((2, HEADS * GROUP, DIM), np.float32).view(np.uint32)
    given: dict[str, Any] = {
        "k": slabs["k"], "v": slabs["v"], "layer": 0, "q": bits, "out": np.zeros_like(bits),
        "dtype": 0, "places": np.array([0, 1, 2], np.int32), "indptr": np.array([0, 3]),
        "lengths": np.array([9]), "q_lens": np.array([2]), "starts": np.array([0]), "scale": 1.0,
        "causal": True, "window": 0, "soft_cap": 0.0, "sinks": None, "lse": None, "isa": 0,
        "threads": 1,
    } | changes  # fmt: skip
    attention.attend(*given.values())


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


NATIVE = [
    ({"places": np.array([0, 1, 16], np.int32)}, pc.BlockError),
    ({"places": np.array([0, -1, 2], np.int32)}, pc.BlockError),
    ({"places": np.array([0, 1], np.int32)}, pc.InvalidPositionError),
    ({"indptr": ints(0)}, pc.ShapeError),
    ({"indptr": ints(0, 3, 3)}, pc.ShapeError),
    ({"indptr": ints(-1, 3)}, pc.InvalidPositionError),
    ({"indptr": ints(0, 4)}, pc.InvalidPositionError),
    ({"indptr": ints(3, 0)}, pc.InvalidPositionError),
    ({"indptr": ints(2, 3)}, pc.InvalidPositionError),  # one block for 9 tokens
    ({"lengths": ints(13)}, pc.InvalidPositionError),
    ({"lengths": ints(-1)}, pc.InvalidPositionError),
    ({"lengths": ints(2**62)}, pc.InvalidPositionError),
    ({"lengths": ints(9, 9)}, pc.ShapeError),
    ({"q_lens": ints(3)}, pc.InvalidPositionError),
    ({"q_lens": ints(1)}, pc.ShapeError),
    ({"q_lens": ints(-1)}, pc.InvalidPositionError),
    ({"q_lens": ints()}, pc.ShapeError),
    ({"starts": ints(-1)}, pc.InvalidPositionError),
    ({"starts": ints()}, pc.ShapeError),
    ({"layer": 2}, pc.InvalidArgumentError),
    ({"layer": -1}, pc.InvalidArgumentError),
    ({"dtype": 3}, pc.FormatError),
    ({"dtype": 1}, pc.ShapeError),
    ({"q": np.ones((2, 5, DIM), np.uint32)}, pc.ShapeError),
    ({"q": np.ones((2, 6, DIM + 1), np.uint32)}, pc.ShapeError),
    ({"q": np.ones((2, 0, DIM), np.uint32)}, pc.ShapeError),
    ({"q": np.ones((2, 6 * DIM), np.uint32)}, pc.ShapeError),
    ({"out": np.ones((1, 6, DIM), np.uint32)}, pc.ShapeError),
    ({"out": np.ones((2, 4, DIM), np.uint32)}, pc.ShapeError),
    ({"sinks": np.ones(5, np.float32)}, pc.ShapeError),
    ({"lse": np.ones((2, 5), np.float32)}, pc.ShapeError),
    ({"lse": np.ones((1, 6), np.float32)}, pc.ShapeError),
    ({"isa": 3}, pc.InvalidArgumentError),
    ({"isa": -1}, pc.InvalidArgumentError),
    ({"threads": 0}, pc.InvalidArgumentError),
    ({"threads": 1025}, pc.InvalidArgumentError),
    ({"window": -1}, pc.InvalidArgumentError),
]


@cpu_memory("the native call")
@pytest.mark.parametrize("number", range(len(NATIVE)))
def test_what_would_leave_a_slab_or_an_array(world: World, number: int) -> None:
    """Checked by the native call itself (CASE C61), before it writes."""
    changes, kind = NATIVE[number]
    native(world.cache)
    out = np.full((2, HEADS * GROUP, DIM), 7, np.uint32)
    with pytest.raises(kind):
        native(world.cache, **({"out": out} | changes))
    assert (out == 7).all()


@cpu_memory("the native call")
def test_slabs_of_two_storages(world: World) -> None:
    with make_cache(16, B=B, layers=2, heads=HEADS, dim=2 * DIM) as other:
        with pytest.raises(pc.InvalidArgumentError, match="two storages"):
            native(world.cache, v=other._storage._slabs["v"])
    with make_cache(15, B=B, layers=2, heads=HEADS, dim=DIM) as other:
        with pytest.raises(pc.InvalidArgumentError, match="two storages"):
            native(world.cache, v=other._storage._slabs["v"])

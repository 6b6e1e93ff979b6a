"""Caches with open blocks: what every token reads back as, bit for bit, by a slow model.

The model knows, block by block, whether it is open (rows of the float format) or sealed (what the
format gives back), and moves values between the two by the rules of the format alone.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import profiles
import pytest
from cachekit import empty, whole
from devicekit import host, placement
from reference_formats import round_trip, round_trip_channels
from reference_storage import clamped

import pagedcache as pc

DIM, HEADS, LAYERS = 9, 2, 2

SPECS = {
    "q4k": {"kv_format": "q4k"},
    "q4k, bfloat16": {"kv_format": "q4k", "open_blocks": "bfloat16"},
    "q4 open": {"kv_format": "q4", "open_blocks": "float16"},
    "q8_0 open float32": {"kv_format": "q8_0", "open_blocks": "float32"},
    "q4k beside float32": {"k_format": "q4k", "v_format": "float32"},
    "V by channel": {"k_format": "q8", "v_format": "q4k"},
}


def rounded(name: str, x: np.ndarray) -> np.ndarray:
    """Rows as the float format keeps them, as float32."""
    if name == "float32":
        return x.astype(np.float32)
    if name == "float16":
        return x.astype(np.float16).astype(np.float32)
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class Block:
    """One block of the model: float32 rows ``[layer, kind, token, head, dim]`` as they read."""

    def __init__(self, size: int, is_open: bool) -> None:
        self.rows = np.zeros((LAYERS, 2, size, HEADS, DIM), np.float32)
        self.is_open = is_open


class Model:
    """The tables and bytes of some sequences."""

    def __init__(self, spec: pc.CacheSpec) -> None:
        self.spec, self.size = spec, spec.block_size
        self.seqs: list[dict[str, Any]] = []
        self.sealed = self.reopened = 0

    def opened(self, kind: int, x: np.ndarray) -> np.ndarray:
        own = (self.spec.k_format, self.spec.v_format)[kind].name
        fmt = self.spec.open_format("kv"[kind]).name
        if own == fmt:
            return rounded(fmt, x)
        flat = clamped(fmt, x.reshape(-1, DIM)).reshape(x.shape)
        return rounded(fmt, flat)

    def quantised(self, kind: int, x: np.ndarray) -> np.ndarray:
        """A whole block of float32 rows as it reads back."""
        fmt = (self.spec.k_format, self.spec.v_format)[kind]
        if fmt.name == "q4k":
            return round_trip_channels(x)
        return round_trip(fmt.name, x.reshape(-1, DIM)).reshape(x.shape)

    def reopen(self, block: Block, held: bool) -> Block:
        """An open block with the rows of this one."""
        made = Block(self.size, True)
        if held:
            for layer in range(LAYERS):
                for kind in range(2):
                    x = block.rows[layer, kind]
                    made.rows[layer, kind] = x if block.is_open else self.opened(kind, x)
            self.reopened += not block.is_open
        return made

    def write(self, seq: dict[str, Any], rows: np.ndarray) -> None:
        """Append ``[layer, kind, n, head, dim]`` float32 rows and count them as computed."""
        start, n = seq["length"], rows.shape[2]
        table = seq["table"]
        for i in range(start // self.size, -(-(start + n) // self.size) if n else 0):
            low, high = max(start, i * self.size), min(start + n, (i + 1) * self.size)
            part = rows[:, :, low - start : high - start]
            whole_block = high - low == self.size
            if i == len(table):
                table.append(Block(self.size, not whole_block))
            elif sum(block is table[i] for s in self.seqs for block in s["table"]) > 1 or (
                not table[i].is_open
            ):
                table[i] = self.reopen(table[i], True)
            for layer in range(LAYERS):
                for kind in range(2):
                    at = slice(low - i * self.size, high - i * self.size)
                    cast = self.opened if table[i].is_open else self.quantised
                    table[i].rows[layer, kind, at] = cast(kind, part[layer, kind])
        seq["length"] += n
        for i in range(len(table)):
            if (i + 2) * self.size <= seq["length"]:
                self.seal(table[i])

    def seal(self, block: Block) -> None:
        if not block.is_open:
            return
        for layer in range(LAYERS):
            for kind in range(2):
                block.rows[layer, kind] = self.quantised(kind, block.rows[layer, kind])
        block.is_open = False
        self.sealed += 1

    def cut(self, seq: dict[str, Any], n: int) -> None:
        seq["length"] = n
        del seq["table"][-(-n // self.size) :]

    def read(self, seq: dict[str, Any], layer: int, kind: int) -> np.ndarray:
        if not seq["table"]:
            return np.zeros((0, HEADS, DIM), np.float32)
        rows = np.concatenate([block.rows[layer, kind] for block in seq["table"]])
        return rows[: seq["length"]]


def source(rng: np.random.Generator, n: int, dtype: str) -> tuple[Any, np.ndarray]:
    """Rows to append, ``[layer, kind, n, head, dim]``, and their exact float32 values: channels of
    very different size and mean, as keys have them."""
    scale = np.float32(10) ** rng.integers(-3, 3, (1, 1, 1, 1, DIM)).astype(np.float32)
    x = (rng.normal(size=(LAYERS, 2, n, HEADS, DIM)) + 5).astype(np.float32) * scale
    given = x.astype(np.float16) if dtype == "float16" else x.astype(np.float32)
    return given, given.astype(np.float32)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(profiles.scaled(6, 2)))
def test_random_histories_read_as_the_model_says(name: str, layout: str, seed: int) -> None:
    # SPEC F4 F6 F19 F24 F27 F28 F32, CASE C30 C33 C34 C56
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    size = choose.choice([1, 2, 3, 5, 16, 33])
    spec = pc.CacheSpec(LAYERS, HEADS, DIM, size, layout=layout, **SPECS[name])
    cache = pc.PagedKVCache(spec, 64, num_open_blocks=64, device=placement(LAYERS))
    model = Model(spec)
    for step in range(profiles.scaled(60, 30)):
        action = choose.choice("nwwwwwwwttffdF")
        if (action == "n" and len(model.seqs) < 4) or not model.seqs:
            handle = cache.open(salt=str(step))
            model.seqs.append({"handle": handle, "table": [], "length": 0})
        elif action == "w":
            seq = choose.choice(model.seqs)
            if seq["length"] > 6 * size:
                continue
            given, exact = source(
                rng, choose.randrange(2 * size + 2), choose.choice(["float16", "float32"])
            )
            n = given.shape[2]
            if choose.random() < 0.5:
                for layer in range(LAYERS):
                    seq["handle"].append(layer, given[layer, 0], given[layer, 1])
            else:
                slots = cache.prepare([seq["handle"]], [n])
                for layer in range(LAYERS):
                    cache.store(layer, given[layer, 0], given[layer, 1], slots)
            seq["handle"].commit(n)
            model.write(seq, exact)
        elif action == "t":
            seq = choose.choice(model.seqs)
            n = choose.randrange(seq["length"] + 1)
            seq["handle"].truncate(n)
            model.cut(seq, n)
        elif action == "f" and len(model.seqs) < 4:
            seq = choose.choice(model.seqs)
            model.seqs.append(
                {
                    "handle": seq["handle"].fork(),
                    "table": list(seq["table"]),
                    "length": seq["length"],
                }
            )
        elif action == "d":
            cache.defragment()
        elif action == "F":
            model.seqs.pop(choose.randrange(len(model.seqs)))["handle"].free()
        whole(cache)
        for seq in model.seqs:
            slots = cache.open_slots(seq["handle"])
            assert [slot >= 0 for slot in slots] == [block.is_open for block in seq["table"]]
            for layer in range(LAYERS):
                pair = seq["handle"].gather(layer, dtype=np.float32)
                for kind in range(2):
                    want = model.read(seq, layer, kind)
                    np.testing.assert_array_equal(host(pair[kind]), want)
    stats = cache.stats()
    assert stats.blocks_sealed == model.sealed
    assert stats.blocks_reopened == model.reopened
    assert stats.open_blocks == len(
        {id(b) for seq in model.seqs for b in seq["table"] if b.is_open}
    )
    for seq in model.seqs:
        seq["handle"].free()
    empty(cache)
    assert cache.stats().open_blocks == 0


def make(num_blocks: int = 8, size: int = 4, **options: Any) -> pc.PagedKVCache:
    spec = pc.CacheSpec(1, 1, 4, size, "q4k")
    return pc.PagedKVCache(spec, num_blocks, device=placement(1), **options)


def rows(n: int, first: float = 0) -> np.ndarray:
    return (np.arange(first, first + n, dtype=np.float32))[:, None, None] * np.ones((1, 1, 4), "f")


def test_figures_count_the_open_blocks() -> None:
    # SPEC F9 F16 F17, CASE C42
    cache = make(32, num_open_blocks=3)
    spec = cache.spec
    assert spec.open_block_nbytes == 2 * 4 * 4 * 2  # K and V, 4 tokens, 4 values, 2 bytes
    assert cache.num_open_blocks == 3
    assert cache.total_capacity == 32 * spec.block_nbytes + 3 * spec.open_block_nbytes
    assert sum(a.nbytes for a in map(host, (*cache.slabs(0), *cache.open_slabs(0)))) == (
        cache.total_capacity
    )
    seq = cache.open()
    seq.append(0, rows(5), rows(5))
    seq.commit(5)
    assert cache.stats().open_blocks == 1
    assert cache.memory_usage == 2 * spec.block_nbytes + spec.open_block_nbytes
    assert cache.fp32_equivalent_memory == 2 * spec.fp32_block_nbytes
    assert cache.memory_savings == cache.memory_usage / cache.fp32_equivalent_memory
    seq.free()
    assert (cache.memory_usage, cache.memory_savings) == (0, 1.0)


def test_default_number_of_open_blocks_and_memory() -> None:
    # SPEC F11
    assert make(4).num_open_blocks == 4
    assert make(16).num_open_blocks == make(100).num_open_blocks == 16
    assert make(1000).num_open_blocks == 63
    spec = make().spec
    cache = pc.PagedKVCache(spec, memory=100_000)
    assert cache.total_capacity <= 100_000
    more = cache.num_blocks + 1
    assert spec.storage_nbytes(more, spec.default_open_blocks(more)) > 100_000
    assert cache.num_blocks == spec.blocks_for(100_000)
    fixed = pc.PagedKVCache(spec, memory=100_000, num_open_blocks=2)
    assert fixed.num_open_blocks == 2
    assert fixed.num_blocks == (100_000 - 2 * spec.open_block_nbytes) // spec.block_nbytes
    with pytest.raises(pc.InvalidArgumentError, match="does not hold one block"):
        pc.PagedKVCache(spec, memory=spec.block_nbytes)


@pytest.mark.parametrize("bad", [-1, 2**31, 1.5, "8", True, [3]])
def test_bad_numbers_of_open_blocks(bad: Any) -> None:
    # SPEC 7
    with pytest.raises(pc.InvalidArgumentError):
        make(num_open_blocks=bad)


def test_open_blocks_where_there_can_be_none() -> None:
    # SPEC 7
    plain = pc.CacheSpec(1, 1, 4, 4)
    with pytest.raises(pc.InvalidArgumentError, match="keeps no open blocks"):
        pc.PagedKVCache(plain, 4, num_open_blocks=1)
    assert pc.PagedKVCache(plain, 4, num_open_blocks=0).num_open_blocks == 0
    with pytest.raises(pc.InvalidArgumentError, match="at least one"):
        make(num_open_blocks=0)
    spec = pc.CacheSpec(1, 1, 4, 4, "q4k")
    ids_only = pc.PagedKVCache(spec, 4, storage=None)
    assert ids_only.num_open_blocks == 0
    with pytest.raises(pc.InvalidArgumentError):
        pc.PagedKVCache(spec, 4, storage=None, num_open_blocks=2)


def test_a_part_filled_prompt_block_is_reused_from_a_sealed_one() -> None:
    # SPEC F22 F40, CASE C20 C28: to the token, by reading a quantised block back
    cache = make(16, partial_block_reuse=1)
    with cache.open(range(12)) as first:
        first.append(0, rows(12), rows(12))
        first.commit(12)
        whole_k, _ = (host(x) for x in first.gather(0))
    again = cache.open(range(12))
    assert again.num_cached_tokens == 11
    assert cache.open_slots(again).tolist()[:2] == [-1, -1]
    k, _ = (host(x) for x in again.gather(0))
    np.testing.assert_array_equal(k[:8], whole_k[:8])
    np.testing.assert_array_equal(k[8:], whole_k[8:11].astype(np.float16).astype(np.float32))
    other = cache.open([0, 1, 2, 3, 4, 5, 99, 98])
    assert other.num_cached_tokens == 6
    whole(cache)


def test_views_show_open_blocks_in_their_format() -> None:
    # SPEC F30
    cache = make()
    seq = cache.open()
    seq.append(0, rows(6), rows(6, 10))
    seq.commit(6)
    with seq.views(0) as views:
        assert [v.k_format.name for v in views] == ["q4k", "float16"]
        assert [v.v_format.name for v in views] == ["q4_1", "float16"]
        assert views[0].format is None and views[1].format is pc.get_format("float16")
        assert host(views[1].k).dtype == np.float16 and host(views[1].k).shape == (1, 2, 4)
        np.testing.assert_array_equal(host(views[1].k)[0, :, 0], [4, 5])
        assert host(views[0].k).shape == (cache.spec.layer_block_nbytes("k"),)
        assert cache.stats().pinned == 2
    with seq.views(0, dtype=np.float32) as views:
        np.testing.assert_array_equal(host(views[1].v)[0, :, 0], [14, 15])


def test_a_view_keeps_its_block_open() -> None:
    # SPEC F30, CASE C67
    cache = make()
    seq = cache.open()
    for i in range(6):
        seq.append(0, rows(1, i), rows(1, i))
        seq.commit(1)
    views = seq.views(0)
    shown = host(views[0].k)
    for i in range(6, 12):
        seq.append(0, rows(1, i), rows(1, i))
        seq.commit(1)
    assert cache.open_slots(seq).tolist()[0] >= 0
    np.testing.assert_array_equal(shown[0, :, 0], [0, 1, 2, 3])
    views.release()
    seq.append(0, rows(1, 12), rows(1, 12))
    seq.commit(1)
    assert cache.open_slots(seq).tolist()[:2] == [-1, -1]
    whole(cache)


def test_raw_slots_of_open_and_of_sealed_blocks() -> None:
    # SPEC F33
    cache = make()
    seq = cache.open()
    cache.prepare([seq], [6])
    slots = seq.slot_mapping(0, 6)
    cache.store(0, rows(6), rows(6), slots)
    seq.commit(6)
    np.testing.assert_array_equal(host(seq.gather(0)[0])[4:, 0, 0], [4, 5])
    cache.store(0, rows(1, 50), rows(1, 50), slots[4:5])  # an open block takes single tokens
    np.testing.assert_array_equal(host(seq.gather(0)[0])[4:, 0, 0], [50, 5])
    before = host(seq.gather(0)[0])
    with pytest.raises(pc.SlotError, match="all of it"):
        cache.store(0, rows(1), rows(1), slots[:1])
    np.testing.assert_array_equal(host(seq.gather(0)[0]), before)


def test_non_finite_values_before_a_block_is_full() -> None:
    # SPEC F7
    cache = make()
    seq = cache.open()
    bad = rows(2)
    bad[1, 0, 2] = np.nan
    with pytest.raises(pc.NonFiniteError):
        seq.append(0, bad, rows(2))
    assert seq.num_written == 0
    bad[0, 0, 1] = np.inf
    seq.append(0, bad, rows(2), on_nonfinite="saturate")
    k = host(seq.gather(0)[0])
    np.testing.assert_array_equal(k[:, 0], [[0, 0, 0, 0], [1, 1, 0, 1]])  # Inf: the row's largest
    huge = rows(1)
    huge[0, 0, 0] = 1e30
    seq.append(0, huge, rows(1))
    assert host(seq.gather(0)[0])[2, 0, 0] == 65504


def test_no_open_slot_left() -> None:
    # SPEC F12 F23
    cache = make(8, num_open_blocks=1)
    first, second = cache.open(), cache.open()
    first.append(0, rows(1), rows(1))
    with pytest.raises(pc.OutOfOpenBlocksError) as error:
        second.append(0, rows(1), rows(1))
    assert (error.value.needed, error.value.available, error.value.total) == (1, 0, 1)
    assert second.num_blocks == 0
    second.append(0, rows(4), rows(4))
    first.free()
    second.append(0, rows(1), rows(1))
    whole(cache)


@pytest.mark.parametrize("name", ["float16", "q4k"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_nothing_is_gathered_over_the_memory_that_is_read(name: str, layout: str) -> None:
    # SPEC 7: the arrays of slabs() and open_slabs() are writable, and yet no place for results
    spec = pc.CacheSpec(1, 4, 4, 4, name, layout=layout)
    cache = pc.PagedKVCache(spec, 8, device=placement(1))
    seq = cache.open()
    x = rows(6) * np.ones((1, 4, 1), "f")
    seq.append(0, x, x)
    seq.commit(6)
    before = host(seq.gather(0, dtype=np.float16)[0])
    pairs = [cache.open_slabs(0)] if spec.has_open_blocks else [cache.slabs(0)]
    for k, v in pairs:
        for out in ((k[7], np.zeros((4, 4, 4), np.float16)), (k[7], v[7])):
            with pytest.raises(pc.ShapeError):
                seq.gather(0, 0, 4, np.float16, out=out)
    np.testing.assert_array_equal(host(seq.gather(0, dtype=np.float16)[0]), before)
    out = (np.zeros((4, 4, 4), np.float16), np.zeros((4, 4, 4), np.float16))
    seq.gather(0, 0, 4, out=out)
    np.testing.assert_array_equal(out[0], before[:4])


def test_check_compares_the_numbers_of_open_slots() -> None:
    # SPEC F20
    cache = make()
    cache.check()
    storage = cache._storage
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "num_open", 3)
        with pytest.raises(pc.CorruptionError, match="storage has 3 open slots, the cache 8"):
            cache.check()
    cache.check()


def test_a_sequence_that_is_cut_while_it_is_read() -> None:
    # SPEC F34: between the look at its length and the pin, by its writer's thread
    cache = make()
    seq = cache.open()
    seq.append(0, rows(8), rows(8))
    seq.commit(8)

    class Zero:
        def __index__(self) -> int:
            cache.update_tokens(seq.seq_id, 2)
            return 0

    with pytest.raises(pc.InvalidPositionError, match="only what was written"):
        seq.gather(0, Zero(), 8)
    assert cache.stats().pinned == 0
    np.testing.assert_allclose(host(seq.gather(0)[0])[:, 0, 0], [0, 1], atol=1e-3)

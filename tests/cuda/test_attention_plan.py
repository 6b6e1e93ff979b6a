"""How a batch is cut into items: every query meets each of its keys once, and the GPU is filled."""

from __future__ import annotations

from typing import Any

import numpy as np
from attentionkit import Options, mask
from hypothesis import given
from hypothesis import strategies as st

from pagedcache._cuda.attention import ROWS
from pagedcache.storage.attention import AttentionBatch as Batch
from pagedcache.storage.cuda_plan import LEAST_KEYS, MOST_PARTS, Plan, plan

NO_PLACES = np.empty(0, np.int32)


def batch_of(lengths: Any, q_lens: Any, starts: Any, block_size: int) -> Batch:
    """Sequences whose tables follow one another, each with a block to spare."""
    arrays = [np.array(each, np.int64) for each in (lengths, q_lens, starts)]
    blocks = -(-arrays[0] // block_size) + 1
    return Batch(NO_PLACES, np.concatenate([[0], np.cumsum(blocks)]), *arrays)


def make(batch: Batch, block_size: int = 16, **options: Any) -> Plan:
    defaults: dict[str, Any] = {"num_heads": 2, "group": 2, "causal": True, "window": None,
                                "num_ctas": 16}  # fmt: skip
    return plan(batch, block_size=block_size, **(defaults | options))


def seen(made: Plan, batch: Batch, group: int, block_size: int, options: Options) -> list[Any]:
    """How often the kernel meets each (row, key) of each sequence, by the words of the header."""
    sizes = zip(batch.q_lens * group, batch.lengths, strict=True)
    counts = [np.zeros(size, int) for size in sizes]
    first_token = np.cumsum(batch.q_lens) - batch.q_lens
    for item in made.items:
        (seq,) = np.flatnonzero((batch.indptr[:-1] <= item["table"])
                                & (item["table"] < batch.indptr[1:]))  # fmt: skip
        assert item["token"] == first_token[seq]
        base = (int(item["table"]) - int(batch.indptr[seq])) * block_size
        assert item["position"] == batch.lengths[seq] - batch.q_lens[seq] - base
        for row in range(item["row"], item["row"] + item["rows"]):
            position = int(item["position"]) + row // group
            low, high = int(item["begin"]), int(item["end"])
            if options.causal:
                high = min(high, position + 1)
            if options.window is not None:
                low = max(low, position - options.window + 1)
            counts[seq][row, base + low : base + max(low, high)] += 1
    return counts


def check(
    batch: Batch, block_size: int, group: int, options: Options, num_ctas: int, heads: int = 2
) -> Plan:
    made = make(batch, block_size, group=group, causal=options.causal, window=options.window,
                num_ctas=num_ctas, num_heads=heads)  # fmt: skip
    for seq, count in enumerate(seen(made, batch, group, block_size, options)):
        here = Options(causal=options.causal, window=options.window, start=int(batch.starts[seq]))
        want = mask(int(batch.q_lens[seq]), int(batch.lengths[seq]), here)
        np.testing.assert_array_equal(count, np.repeat(want, group, axis=0))
    items = made.items
    assert ((items["begin"] >= 0) & (items["begin"] <= items["end"])).all()
    assert ((items["rows"] >= 1) & (items["rows"] <= ROWS)).all()
    split = items[items["parts"] > 1]
    assert sorted(split["part"]) == list(range(made.num_parts))
    tickets = np.unique(split["ticket"])
    assert list(tickets) == list(range(made.num_tickets))
    for ticket in tickets:  # parts of one split follow one another, by their keys
        mine = split[split["ticket"] == ticket]
        (parts,), (first,) = np.unique(mine["parts"]), np.unique(mine["first_part"])
        assert list(mine["part"]) == list(range(first, first + parts))
        assert len(np.unique(mine["row"])) == len(np.unique(mine["token"])) == 1
        at = mine["table"] * block_size + mine["begin"]
        assert (np.diff(at) > 0).all()
        assert (mine["begin"][1:] == 0).all()  # each begins with a block, but for the first
    return made


lengths = st.integers(0, 700)
sequence = st.tuples(lengths, lengths, lengths).map(
    lambda t: (t[0], min(t[1] % 40, t[0]), min(t[2] % 50, t[0]))
)


@given(
    st.lists(sequence, min_size=1, max_size=4), st.sampled_from((1, 3, 16, 32, 100)),
    st.sampled_from((1, 2, 3, 8, 12)), st.booleans(), st.sampled_from((None, 1, 7, 100)),
    st.sampled_from((1, 7, 264)),
)  # fmt: skip
def test_every_query_meets_its_keys_once(
    seqs: Any, block_size: int, group: int, causal: bool, window: int | None, num_ctas: int
) -> None:
    batch = batch_of(*zip(*seqs, strict=True), block_size)
    check(batch, block_size, group, Options(causal=causal, window=window), num_ctas)


def test_one_long_sequence_fills_the_gpu() -> None:
    for length, heads in ((8192, 8), (32768, 8), (8192, 1), (131072, 4)):
        made = check(batch_of([length], [1], [0], 16), 16, 4, Options(), 264, heads)
        count = len(made.items) * heads
        least = min(264, heads * length // LEAST_KEYS, heads * MOST_PARTS)
        assert 0.9 * least <= count <= 1.1 * 264, (length, heads, count)
        sizes = made.items["end"] - made.items["begin"]
        assert sizes.max() - sizes[:-1].min() <= 16


def test_large_batches_and_short_sequences_are_not_split() -> None:
    made = check(batch_of([2048] * 32, [1] * 32, [0] * 32, 16), 16, 4, Options(), 200, 8)
    assert not made.num_parts and len(made.items) == 32
    made = check(batch_of([LEAST_KEYS], [1], [0], 16), 16, 4, Options(), 264, 1)
    assert not made.num_parts


def test_long_sequences_of_a_batch_are_split_more() -> None:
    made = check(batch_of([100, 16000, 300], [1, 1, 1], [0, 0, 0], 16), 16, 4, Options(), 264, 8)
    parts = [np.unique(made.items["parts"][made.items["token"] == token]) for token in range(3)]
    assert parts[0] == [1] and parts[1] > 25 and parts[2] <= 2


def test_keys_that_nobody_sees_are_left_out() -> None:
    made = check(batch_of([4096], [1], [0], 16), 16, 1, Options(window=100), 264)
    assert (made.items["end"] - made.items["begin"]).sum() == 100
    made = check(batch_of([4096], [1], [4000], 16), 16, 1, Options(), 264)
    assert (made.items["end"] - made.items["begin"]).sum() == 96


def test_more_keys_than_31_bits() -> None:
    """Positions are 64-bit; a part's keys are counted in 32."""
    length = 2**33
    batch = Batch(NO_PLACES, np.array([0, length // 64]), *(np.array([n]) for n in (length, 1, 0)))
    made = make(batch, 64, num_ctas=1)
    items = made.items
    assert (items["end"].astype(np.int64) - items["begin"]).sum() == length
    assert items["table"][-1] * 64 + int(items["end"][-1]) == length
    assert items["position"][-1] + items["table"][-1] * 64 == length - 1


def test_no_queries_no_items() -> None:
    assert not len(make(batch_of([10, 20], [0, 0], [0, 0], 16)).items)
    assert len(make(batch_of([10, 20], [0, 1], [0, 0], 16)).items) == 1


def test_queries_without_keys_have_an_item() -> None:
    """Somebody has to write their zeros."""
    made = make(batch_of([5], [2], [5], 16), group=1)
    assert made.items[["begin", "end", "rows", "parts"]].tolist() == [(5, 5, 2, 1)]

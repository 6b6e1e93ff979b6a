"""Cases C53 and C54: the tables that attention kernels read."""

from __future__ import annotations

import numpy as np
import pytest
from cachekit import assert_holds, empty, expected, fill, make_cache, read, refused

from pagedcache.errors import InvalidArgumentError

B = 4


def test_csr_of_lengths_at_block_edges():
    # CASE C53
    # SPEC F33
    cache = make_cache(32, B=B)
    lengths = [1, 3, 4, 5, 7, 8, 12]
    seqs = []
    for i, n in enumerate(lengths):
        seq = cache.open(range(100 * i, 100 * i + n))
        fill(cache, seq, range(1, n + 1))
        seqs.append(seq)
    indptr, indices, last = cache.page_table(seqs)
    for a in (indptr, indices, last):
        assert a.dtype == np.int32
    assert indptr.tolist() == [0, 1, 2, 3, 5, 7, 9, 12]
    assert last.tolist() == [1, 3, 4, 1, 3, 4, 4]  # a full last page is B, never 0
    for i, (seq, n) in enumerate(zip(seqs, lengths, strict=True)):
        row = indices[indptr[i] : indptr[i + 1]]
        assert row.tolist() == seq.block_table.tolist()[: -(-n // B)]
        assert B * (len(row) - 1) + last[i] == n
    # lengths of the caller's own: exactly ceil(length / B) blocks
    indptr, indices, last = cache.page_table(seqs, [1, 1, 4, 4, 5, 5, 11])
    assert indptr.tolist() == [0, 1, 2, 3, 4, 6, 8, 11]
    assert last.tolist() == [1, 1, 4, 4, 1, 1, 3]
    for seq in seqs:
        seq.free()
    empty(cache)


def test_csr_of_an_empty_sequence():
    # CASE C53
    # SPEC F33
    cache = make_cache(8, B=B)
    a, none, opened = cache.open(range(4)), cache.open(), cache.open(range(50, 56))
    fill(cache, a, range(1, 5))
    for seqs in ([a, none], [none], [opened, a]):
        e = refused(cache, lambda s=seqs: cache.page_table(s), InvalidArgumentError, a, none)
        bad = none if none in seqs else opened
        assert str(bad.seq_id) in str(e)
    indptr, indices, last = cache.page_table([none, a, opened], allow_empty=True)
    assert indptr.tolist() == [0, 0, 1, 1]
    assert indices.tolist() == a.block_table.tolist()
    assert last.tolist() == [0, 4, 0]
    indptr, indices, last = cache.page_table([])
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0], [], [])
    for seq in (a, none, opened):
        seq.free()
    empty(cache)


def test_padding_of_block_tables_is_id_0():
    # CASE C54
    # SPEC F33
    cache = make_cache(16, B=B)
    pad = cache.open(range(900, 904))  # holds id 0 or any other: the padding is 0 all the same
    seqs = [cache.open(range(100 * i, 100 * i + n)) for i, n in enumerate([9, 1, 0, 4])]
    for seq in seqs:
        fill(cache, seq, range(1, seq.num_tokens + 1))
    table = cache.block_tables(seqs)
    assert table.dtype == np.int32 and table.shape == (4, 3)
    for row, seq in zip(table, seqs, strict=True):
        own = seq.block_table.tolist()
        assert row.tolist() == own + [0] * (3 - len(own))
    assert (table >= 0).all()
    assert cache.block_tables([]).shape == (0, 0)
    assert cache.block_tables([]).dtype == np.int32
    assert cache.block_tables([seqs[2]]).shape == (1, 0)
    short = cache.block_tables(seqs, [5, 1, 0, 0])
    assert short.shape == (4, 2)
    assert short[0].tolist() == seqs[0].block_table.tolist()[:2]
    assert short[1:].tolist() == [[int(seqs[1].block_table[0]), 0], [0, 0], [0, 0]]
    # room that is opened for and not computed is exported only when asked for
    opened = cache.open(range(500, 506))
    assert cache.block_tables([opened]).shape == (1, 0)
    assert cache.block_tables([opened], [6]).tolist() == [opened.block_table.tolist()]
    for seq in (*seqs, pad, opened):
        seq.free()
    empty(cache)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_halves_of_one_tensor_and_exported_ids(layout):
    # CASE C53
    # SPEC F48 F33
    heads, dim, n = 2, 4, 8
    block = (heads, B, dim) if layout == "HND" else (B, heads, dim)
    tensors = [np.zeros((n, 2, *block), np.float32) for _ in range(2)]
    cache = make_cache(
        n,
        B=B,
        layers=2,
        heads=heads,
        dim=dim,
        layout=layout,
        storage=([t[:, 0] for t in tensors], [t[:, 1] for t in tensors]),
    )
    seq = cache.open(range(10))
    fill(cache, seq, range(1, 11))
    twin = seq.fork()
    fill(cache, twin, [50])
    assert_holds(cache, twin, [*range(1, 11), 50])
    indptr, indices, last = cache.page_table([seq, twin])
    for layer, tensor in enumerate(tensors):
        for i, (s, marks) in enumerate(((seq, range(1, 11)), (twin, [*range(1, 11), 50]))):
            ids = indices[indptr[i] : indptr[i + 1]]
            pages = tensor[ids]  # what a kernel sees through the exported ids
            want = expected(cache.spec, layer, list(marks))
            for half in (0, 1):
                page = pages[:, half]
                tokens = page.transpose(0, 2, 1, 3) if layout == "HND" else page
                flat = tokens.reshape(-1, heads, dim)[: B * (len(ids) - 1) + last[i]]
                np.testing.assert_array_equal(flat, want[half])
                np.testing.assert_array_equal(flat, read(s, layer)[half])
    for s in (seq, twin):
        s.free()
    empty(cache)

"""Checks without a format: block tables for kernels, the pool, and the prefix index."""

from __future__ import annotations

import numpy as np

import pagedcache

from .compare import equal, raises, require
from .registry import Context
from .stage import Stage


def export_tables(context: Context) -> None:
    """Padded and CSR tables name exactly the blocks that hold each sequence's tokens."""
    with Stage(context) as stage:
        cache, size = stage.cache, stage.block_size
        lengths = [1, size, size + 1, 3 * size]
        seqs = [cache.open(stage.tokens(n)) for n in lengths]
        for seq in seqs:
            stage.fill(seq)
        pairs = list(zip(seqs, lengths, strict=True))
        rows = [seq.block_table[: -(-n // size)].tolist() for seq, n in pairs]
        padded = cache.block_tables(seqs)
        equal(padded.dtype, np.dtype(np.int32), "dtype of the padded table")
        equal(padded.tolist(), [row + [0] * (3 - len(row)) for row in rows], "padded table")
        indptr, indices, last = cache.page_table(seqs)
        equal(indptr.tolist(), np.cumsum([0, *map(len, rows)]).tolist(), "kv_indptr")
        equal(indices.tolist(), sum(rows, []), "kv_indices")
        equal(last.tolist(), [1, size, 1, size], "kv_last_page_len")
        for seq, row in zip(seqs, rows, strict=True):
            want = [block * size + i for block in row for i in range(size)][: seq.seq_len]
            equal(seq.slot_mapping(0, seq.seq_len).tolist(), want, "slot mapping for reading")
        equal(cache.block_tables([]).shape, (0, 0), "table of no sequences")
        for seq in seqs:
            seq.free()
        stage.unused()


def block_pool(context: Context) -> None:
    """Random allocations, touches and frees agree with a dictionary of counts."""
    pool, counts = pagedcache.BlockPool(64, 16), dict[int, int]()
    for _ in range(400):
        free = 64 - len(counts)
        action = int(context.rng.integers(4))
        if action == 0:
            want = int(context.rng.integers(0, 12))
            if want > free:
                error = raises(pagedcache.OutOfBlocksError, lambda n=want: pool.allocate(n), "full")
                equal(getattr(error, "available", None), free, "available")
            else:
                taken = pool.allocate(want).tolist()
                require(not set(taken) & counts.keys(), "a block in use was handed out")
                counts |= dict.fromkeys(taken, 1)
                equal(len(counts), 64 - free + want, "different ids")
        elif counts:
            ids = [i for i in counts if context.rng.random() < 0.3]
            step = 1 if action == 1 else -1
            (pool.touch if step > 0 else pool.free)(np.array(ids, np.int32))
            counts = {i: n + step * (i in ids) for i, n in counts.items()}
            counts = {i: n for i, n in counts.items() if n}
        equal({i: pool.ref_count(i) for i in counts}, counts, "reference counts")
        equal(pool.num_free_blocks, 64 - len(counts), "free blocks")
        pool.check()


def prefix_index(context: Context) -> None:
    """Hits of random prompts equal what a set of all committed prefixes promises."""
    size, committed = 4, set[tuple[int, ...]]()
    spec = pagedcache.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=size)
    cache = pagedcache.PagedKVCache(spec, 4096, storage=None, partial_block_reuse=0)
    for _ in range(300):
        # Three different tokens, so that prompts share prefixes of every length.
        prompt = context.rng.integers(0, 3, int(context.rng.integers(1, 24))).tolist()
        hit = 0
        while hit + size < len(prompt) and tuple(prompt[: hit + size]) in committed:
            hit += size
        # A prompt that is cached in full is reused up to its last token, from a private copy.
        if hit + size == len(prompt) and tuple(prompt) in committed:
            hit = len(prompt) - 1
        equal(cache.probe(prompt), hit, f"probe of {prompt}")
        with cache.open(prompt) as seq:
            equal(seq.num_cached_tokens, hit, f"hit of {prompt}")
            _run_copies(cache)
            seq.commit(len(prompt) - seq.seq_len)
        committed |= {tuple(prompt[:n]) for n in range(size, len(prompt) + 1, size)}
    cache.check()
    equal(cache.num_free_blocks, cache.num_blocks, "free blocks at the end")
    cache.close()


def _run_copies(cache: pagedcache.PagedKVCache) -> None:
    pairs, ticket = cache.take_block_copies()
    del pairs  # a cache of ids only: there are no bytes to copy
    cache.copies_done(ticket)

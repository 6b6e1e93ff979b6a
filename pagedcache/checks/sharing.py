"""Checks of blocks that more than one sequence holds: fork, truncate, prefix hits, moves."""

from __future__ import annotations

import numpy as np

from .compare import equal, require
from .reference import Floats
from .registry import Context
from .stage import Stage


def joined(head: Floats, tail: Floats) -> Floats:
    """Rows of tokens ``[layers, tokens, …]`` behind one another."""
    return np.concatenate((head, tail), axis=1)


def fork_copy_on_write(context: Context) -> None:
    """A fork shares every block until one side writes; neither sees the other's later rows."""
    with Stage(context) as stage:
        n = 2 * stage.block_size + stage.block_size // 2
        with stage.cache.open(stage.tokens(n)) as parent:
            k, v = stage.fill(parent)
            used = stage.cache.stats().blocks_used
            child = parent.fork()
            equal(stage.cache.stats().blocks_used, used, "blocks used after a fork")
            more = {}
            for name, seq in (("child", child), ("parent", parent)):
                seq.append_tokens(stage.tokens(3))
                more[name] = stage.rows(3)
                stage.append(seq, *more[name])
                seq.commit(3)
            equal(stage.cache.stats().cow_copies, 1, "blocks copied on write")
            for name, seq in (("child", child), ("parent", parent)):
                more_k, more_v = more[name]
                stage.expect(seq, joined(k, more_k), joined(v, more_v))
            stage.whole()
            child.free()
            stage.expect(parent, k, v)
        stage.unused()


def truncate_and_rewrite(context: Context) -> None:
    """Rewriting after a truncate leaves the cached block as it was promised."""
    with Stage(context) as stage:
        size = stage.block_size
        prompt = stage.tokens(3 * size)
        with stage.cache.open(prompt) as seq:
            k, v = stage.fill(seq)
            keep = size + 1
            seq.truncate(keep)
            equal(seq.seq_len, keep, "length after truncate")
            stage.expect(seq, k, v, stop=keep)
            kept_k, kept_v = stage.reread(seq, k[:, :keep], v[:, :keep], size)
            seq.append_tokens(stage.tokens(size))
            new_k, new_v = stage.rows(size)
            stage.append(seq, new_k, new_v)
            seq.commit(size)
            stage.expect(seq, joined(kept_k, new_k), joined(kept_v, new_v))
            with stage.cache.open(np.append(prompt, prompt[:1])) as again:
                equal(again.num_cached_tokens, 3 * size, "tokens still cached")
                stage.expect(again, k, v, stop=3 * size)
            stage.whole()
        stage.unused()


def prefix_hit(context: Context) -> None:
    """A cached prefix is found, holds the bytes that were committed, and stops at the salt."""
    with Stage(context) as stage:
        size = stage.block_size
        prompt = stage.tokens(3 * size + 1)
        with stage.cache.open(prompt, salt=b"a") as seq:
            k, v = stage.fill(seq)
        longer = np.concatenate((prompt, stage.tokens(size)))
        equal(stage.cache.probe(longer, b"b"), 0, "hit across salts")
        equal(stage.cache.probe(longer, b"a"), 3 * size, "probed hit")
        with stage.cache.open(longer, salt=b"a") as seq:
            equal(seq.num_cached_tokens, 3 * size, "hit")
            stage.expect(seq, k, v, stop=3 * size)
            rest = stage.fill(seq)
            stage.expect(seq, k, v, stop=3 * size)
            got = stage.gather(seq, 0, 3 * size, dtype=np.float32)
            require(got[0].shape[0] == rest[0].shape[1], "rows behind the hit")
        # Cached in full: only the last token is left to compute, and its row is private.
        with stage.cache.open(prompt[: 3 * size], salt=b"a") as seq:
            equal(seq.num_cached_tokens, 3 * size - 1, "hit of a prompt cached in full")
            stage.expect(seq, k, v, stop=3 * size - 1)
            # The last block is a copy of the sequence's own; the model computes the same row.
            last = slice(3 * size - 1, 3 * size)
            head = slice(0, 3 * size - 1)
            head_k, head_v = stage.reread(seq, k[:, head], v[:, head], 2 * size)
            stage.append(seq, k[:, last], v[:, last])
            seq.commit(1)
            copied = joined(head_k, k[:, last]), joined(head_v, v[:, last])
            stage.expect(seq, *copied)
        with stage.cache.open(longer, salt=b"a") as seq:
            stage.expect(seq, k, v, stop=2 * size)
            # Two blocks of these tokens may be cached now, the first one and the copy.
            require(
                stage.reads_as(seq, k, v, 2 * size, 3 * size)
                or stage.reads_as(seq, *copied, 2 * size, 3 * size),
                "the last block of the hit is neither the first one nor its copy",
            )
        stage.unused()


def partial_reuse(context: Context) -> None:
    """The matched head of a partly matching block is reused to the token; the rest is private."""
    with Stage(context, partial_block_reuse=1) as stage:
        size = stage.block_size
        prompt = stage.tokens(2 * size)
        with stage.cache.open(np.append(prompt, prompt[:1])) as seq:
            k, v = stage.fill(seq)
        for matched in (size - 1, size, size + 1, 2 * size - 1):
            other = np.concatenate((prompt[:matched], prompt[matched : matched + 1] ^ 1, prompt))
            with stage.cache.open(other, salt=b"") as seq:
                equal(seq.num_cached_tokens, matched, "tokens reused")
                stage.expect(seq, k, v, stop=matched)
                head = slice(0, matched)
                head_k, head_v = stage.reread(
                    seq, k[:, head], v[:, head], matched // size * size
                )
                rest = stage.fill(seq)
                stage.expect(seq, joined(head_k, rest[0]), joined(head_v, rest[1]))
            stage.cache.reset_prefix_cache()
            with stage.cache.open(np.append(prompt, prompt[:1])) as seq:
                stage.append(seq, k, v)
                seq.commit(k.shape[1])
        stage.unused()


def defragment(context: Context) -> None:
    """Packing the blocks moves bytes as they are: no row of any sequence changes."""
    with Stage(context, num_blocks=64) as stage:
        live = []
        for _ in range(12):
            seq = stage.cache.open(stage.tokens(int(stage.rng.integers(1, 4 * stage.block_size))))
            live.append((seq, *stage.fill(seq)))
        for seq, _, _ in live[::2]:
            seq.free()
        stage.cache.reset_prefix_cache()
        kept = live[1::2]
        kept.append((kept[0][0].fork(), *kept[0][1:]))
        raw = [[part.tobytes() for part in stage.gather(seq, 1)] for seq, _, _ in kept]
        moved = stage.cache.defragment()
        require(moved > 0, "nothing moved")
        stage.whole()
        equal(stage.cache.fragmentation().holes, 0, "holes after defragment")
        for (seq, k, v), before in zip(kept, raw, strict=True):
            stage.expect(seq, k, v)
            after = [part.tobytes() for part in stage.gather(seq, 1)]
            equal(after, before, "bytes after the move")
        for seq, _, _ in kept:
            seq.free()
        stage.unused()

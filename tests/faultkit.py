"""A cache in the middle of its work, and every operation on it, for injected failures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
from cachekit import cached_prompt, empty, fill, make_cache, rows, snapshot

B = 4
PROMPT = list(range(10, 22))


class World:
    """A cache in the middle of its work: shared, cached, part-filled and free blocks."""

    def __init__(self, storage: Any = "own", fmt: str = "float32") -> None:
        self.cache = make_cache(
            16, B=B, layers=2, storage=storage, partial_block_reuse=1, max_seq_len=1000, fmt=fmt
        )
        own = storage == "own"
        low = self.cache.open(range(900, 905))
        self.seq = self.cache.open(range(50, 57))
        self.parent = self.cache.open(range(70, 76))
        if own:
            cached_prompt(self.cache, PROMPT)
            fill(self.cache, self.seq, range(41, 48))
            fill(self.cache, self.parent, range(61, 67))
        else:
            with self.cache.open(PROMPT) as seq:
                seq.prepare(12)
                seq.commit(12)
            for s in (self.seq, self.parent):
                s.prepare(s.num_tokens)
                s.commit(s.num_tokens)
        self.child = self.parent.fork()
        self.mapping = self.seq.prepare(1)
        low.free()
        self.seqs = (self.seq, self.parent, self.child)
        self.keep: list[Any] = []

    def shot(self, *, flows: bool = True) -> dict[str, Any]:
        """All that must stay; without ``flows``, block totals (taken, given back) may grow."""
        shot = snapshot(self.cache, *self.seqs, prompts=[[*PROMPT, 1], PROMPT, PROMPT[:6]])
        if not flows:
            del shot["counts"][3:5]
        return shot

    def write_more(self) -> None:
        """Five tokens behind the seven of ``seq``, not committed: in a cache with open blocks their
        commit seals the second block."""
        for layer in range(2):
            self.seq.append(layer, *rows(self.cache.spec, layer, range(48, 53)))

    def done(self) -> None:
        self.keep.clear()
        gc.collect()
        while True:  # what an engine with its own bytes owes
            pairs, ticket = self.cache.take_block_copies()
            if not len(pairs):
                break
            self.cache.copies_done(ticket)
        for seq in self.seqs:
            seq.free()
        for seq_id in self.cache.live_sequences():
            self.cache.free_sequence(seq_id)
        gc.collect()
        empty(self.cache)


Operation = Callable[[World], Any]
K, V = np.ones((3, 1, 4), np.float32), -np.ones((3, 1, 4), np.float32)
OPERATIONS: dict[str, Operation] = {
    "open cold": lambda w: w.keep.append(w.cache.open(range(300, 309))),
    "open empty": lambda w: w.keep.append(w.cache.open()),
    "open hit": lambda w: w.keep.append(w.cache.open([*PROMPT, 1, 2])),
    "open full hit": lambda w: w.keep.append(w.cache.open(PROMPT)),
    "open partial hit": lambda w: w.keep.append(w.cache.open([*PROMPT[:6], 1, 2])),
    "open with everything": lambda w: w.keep.append(
        w.cache.open(
            range(300, 330),
            salt=b"salt",
            adapter="adapter",
            extra_keys=[(1, 3, b"one"), (5, 20, b"two")],
            request_id="r",
            allocate_upto=9,
        )
    ),
    "open many": lambda w: w.keep.extend(
        w.cache.open_many(
            [PROMPT, range(300, 309)],
            [b"", b"salt"],
            extra_keys=[[], [(1, 3, b"one")]],
            request_ids=["a", None],
        )
    ),
    "open as many as fit": lambda w: w.keep.extend(
        w.cache.open_many([[*PROMPT[:6], 1, 2], range(300, 350)], as_many_as_fit=True)
    ),
    "allocate_for_tokens": lambda w: _opened_late(w),
    "allocate_sequence": lambda w: w.cache.allocate_sequence(9),
    "extend": lambda w: w.cache.extend(w.seq.seq_id, 9),
    "extend far": lambda w: w.cache.extend(w.seq.seq_id, 40),
    "fork": lambda w: w.keep.append(w.parent.fork()),
    "fork_sequence": lambda w: w.cache.fork_sequence(w.parent.seq_id),
    "append": lambda w: w.seq.append(0, K, V),
    "append copies": lambda w: w.child.append(1, K, V),
    "append_kv": lambda w: w.child.append_kv(0, K, V, 5),
    "append_token": lambda w: w.seq.append_token(5),
    "append_tokens": lambda w: w.seq.append_tokens(range(500)),
    "commit": lambda w: w.seq.commit(1),
    "prepare": lambda w: w.child.prepare(2),
    "prepare batch": lambda w: w.cache.prepare(w.seqs, [5, 6, 7]),
    "step": lambda w: w.cache.step(w.seqs, [5, 6, 7]),
    "step of many tokens": lambda w: w.cache.step(w.seqs, range(18), [5, 6, 7]),
    "store": lambda w: w.cache.store(0, K[:1], V[:1], w.mapping),
    "store raw": lambda w: w.cache.store(0, K[:1], V[:1], w.mapping.slots),
    "truncate": lambda w: w.child.truncate(3),
    "update_tokens": lambda w: w.cache.update_tokens(w.child.seq_id, 3),
    "free": lambda w: w.child.free(),
    "writable_block_at": lambda w: w.cache.writable_block_at(w.child.seq_id, 5),
    "defragment": lambda w: w.cache.defragment(),
    "compact_sequence": lambda w: w.cache.compact_sequence(w.seq),
    "reset_prefix_cache": lambda w: w.cache.reset_prefix_cache(),
    "probe": lambda w: w.cache.probe([*PROMPT, 1], extra_keys=[(0, 3, b"x")]),
    "blocks_needed": lambda w: w.cache.blocks_needed([*PROMPT, 1]),
    "seq.blocks_needed": lambda w: w.child.blocks_needed(9),
    "gather": lambda w: w.seq.gather(0),
    "views": lambda w: w.keep.append([v.k for v in w.seq.views(0)]),
    "packed_views": lambda w: w.keep.append(w.seq.packed_views(1)),
    "block_table": lambda w: w.seq.block_table,
    "slot_mapping": lambda w: w.seq.slot_mapping(0, 7),
    "block_tables": lambda w: w.cache.block_tables(w.seqs),
    "page_table": lambda w: w.cache.page_table(w.seqs),
    "fragmentation": lambda w: w.cache.fragmentation(),
    "check": lambda w: w.cache.check(),
    "pool.allocate": lambda w: w.cache.pool.free(w.cache.pool.allocate(5)),
    "pool.touch": lambda w: w.cache.pool.free([w.cache.pool.touch(T := [0]) or T[0]]),
}


#: What only a cache with open blocks does; the world has written more before.
SEALING: dict[str, Operation] = {
    "commit seals": lambda w: w.seq.commit(5),
    "update_tokens seals": lambda w: w.cache.update_tokens(w.seq.seq_id, 12),
    "batch commit seals": lambda w: w.cache.commit([w.seq], [5]),
}


def _opened_late(world: World) -> None:
    """allocate_for_tokens on a handle made before; the handle itself is not the operation."""
    world.keep[0].allocate_for_tokens([*PROMPT[:10], 7, 8, 9])

"""Random histories of a whole cache against a model made of lists and dicts.

The model knows, for every sequence, its tokens, its lengths and which write put each token's K
and V where (every write has its own number, a *mark*). After each step the library checks
itself, and every live sequence and every held view is read back and compared bit for bit.

What may hit is known from below and above: never more than a common prefix that was committed
under the same salt since the last reset, with the very bytes of one such commit; never less
than what a live sequence still holds; and exactly the best of it while nothing was evicted.
"""

from __future__ import annotations

import numpy as np
from cachemodel import FORMATS, MARKS, HitModel, Model, tables
from devicekit import host, placement
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from profiles import STATEFUL

import pagedcache as pc
from pagedcache.errors import (
    FreedHandleError,
    InvalidArgumentError,
    InvalidPositionError,
    OutOfBlocksError,
    PagedCacheError,
)

OPERATIONS = {  # how often each is tried
    "open": 8,
    "pressure": 2,
    "grow": 8,
    "append_one_layer": 2,
    "commit": 3,
    "append_tokens": 2,
    "truncate": 3,
    "update_tokens": 1,
    "fork": 4,
    "free": 4,
    "prepare_and_store": 4,
    "rewrite": 2,
    "defragment": 2,
    "compact": 1,
    "reset": 1,
    "hold_views": 2,
    "release_views": 1,
    "probe": 1,
    "refused": 1,
}
OPTIONAL = [name for name in OPERATIONS if name not in ("open", "grow", "commit", "free")]


class CacheMachine(HitModel, RuleBasedStateMachine):
    cache: pc.PagedKVCache | None = None

    @initialize(
        fmt=st.sampled_from(FORMATS),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 12),
        layers=st.integers(1, 2),
        layout=st.sampled_from(["HND", "NHD"]),
        partial=st.integers(0, 2),
        without=st.sets(st.sampled_from(OPTIONAL), max_size=8),
    )
    def make(self, fmt, block_size, num_blocks, layers, layout, partial, without):
        k_format, v_format, dim = fmt
        spec = pc.CacheSpec(
            num_layers=layers,
            num_kv_heads=1,
            head_dim=dim,
            block_size=block_size,
            k_format=k_format,
            v_format=v_format,
            layout=layout,
        )
        partial = min(partial, block_size)
        self.cache = pc.PagedKVCache(
            spec, num_blocks, partial_block_reuse=partial, device=placement(layers)
        )
        self.B, self.layers, self.partial, self.total = block_size, layers, partial, num_blocks
        self.k, self.v, self.k_read, self.v_read = tables(*fmt)
        self.dense = not spec.k_format.is_quantized and not spec.v_format.is_quantized
        self.live: list[Model] = []
        self.prompts: list[tuple[str, list[int]]] = []
        self.held: list[tuple] = []
        self.gone: pc.Sequence | None = None
        self.mark = 0
        self.fresh_token = 1000
        self.without = without  # a history without some operations goes deeper into the others
        self.forget()

    # ---- choices -------------------------------------------------------------------------

    @rule(
        name=st.sampled_from([name for name, times in OPERATIONS.items() for _ in range(times)]),
        a=st.integers(0, 63),
        b=st.integers(0, 63),
        c=st.integers(0, 3**7 - 1),
    )
    def step(self, name, a, b, c):
        """One operation; ``a`` chooses what it is done to, ``b`` and ``c`` how much."""
        if name not in self.without:
            getattr(self, name)(a, b, c)

    def pick(self, a: int) -> Model | None:
        if not self.live:
            self.open(a, 0, 5 * a)
        return self.live[a % len(self.live)] if self.live else None

    @staticmethod
    def digits(n: int, value: int) -> list[int]:
        """``n`` tokens of a small alphabet, so that prompts meet."""
        return [value // 3**i % 3 for i in range(n)]

    def new_marks(self, n: int) -> list[int]:
        first = self.mark
        self.mark += n
        return [(first + i) % MARKS + 1 for i in range(n)]

    def rows(self, marks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return self.k[marks], self.v[marks]

    # ---- operations ----------------------------------------------------------------------

    def admit(self, tokens: list[int], salt: str, upto: int | None = None) -> Model | None:
        cache = self.cache
        while len(self.live) >= 6:
            self.drop(self.live[0])
        free = cache.num_free_blocks
        need_cold = -(-(len(tokens) if upto is None else upto) // self.B)
        predicted = cache.probe(tokens, salt)
        needed = cache.blocks_needed(tokens, salt, allocate_upto=upto)
        self.evicted_before_open = cache.stats().evicted_blocks
        try:
            seq = cache.open(tokens, salt, allocate_upto=upto)
        except OutOfBlocksError as e:
            assert need_cold > free
            assert e.total == self.total and e.needed > e.available
            assert cache.num_free_blocks == free
            return None
        model = Model(seq, salt, tokens, self.layers)
        hit = seq.num_cached_tokens
        assert hit == predicted or upto is not None  # fewer blocks to take, more to hit
        assert seq.num_blocks - hit // self.B == needed
        self.check_hit(hit, salt, tokens, free)
        model.blocks = max(need_cold, -(-hit // self.B))
        self.take_hit(model, hit)
        self.live.append(model)
        if len(self.prompts) >= 8:
            self.prompts.pop(0)
        self.prompts.append((salt, list(tokens)))
        return model

    def open(self, a, b, c):
        salt, tokens = "s" if a % 8 == 7 else "", []
        if self.prompts and b % 8 < 6:
            salt, tokens = self.prompts[b % len(self.prompts)]
            tokens = tokens[: b // 4]
        tokens = [*tokens, *self.digits(a % 8, c)]
        upto = 1 + c % len(tokens) if tokens and b % 5 == 0 else None
        model = self.admit(tokens, salt, upto)
        if model is not None and a < 48:
            self.write(model, len(model.tokens) - model.computed)
            self.commit_all(model)

    def pressure(self, a, b, c):
        """Tokens never seen before: takes free blocks first, then evicts, commits and goes."""
        n = (b % 3 + 1) * self.B
        model = self.admit(list(range(self.fresh_token, self.fresh_token + n)), "")
        self.fresh_token += n
        if model is not None:
            assert model.computed == 0
            self.write(model, n)
            self.commit_all(model)
            self.drop(model)

    def write(self, model: Model, n: int) -> bool:
        for layer in range(self.layers):
            if not self.append(model, layer, n):
                return False
        return True

    def append(self, model: Model, layer: int, n: int) -> bool:
        start, free = model.end(layer), self.cache.num_free_blocks
        marks = self.new_marks(n)
        simple = start == model.computed == model.high_water
        need = model.handle.blocks_needed(n) if simple else None
        try:
            _, at = model.handle.append(layer, *self.rows(marks))
        except OutOfBlocksError as e:
            assert need is None or need > free
            assert e.needed > e.available
            assert self.cache.num_free_blocks == free
            return False
        assert need is None or need <= free
        assert at == start
        model.put(layer, start, marks)
        model.written[layer] = start + n
        if n:
            model.blocks = max(model.blocks, -(-(start + n) // self.B))
        return True

    def commit_all(self, model: Model) -> None:
        self.commit_some(model, model.num_written - model.computed)

    def commit_some(self, model: Model, n: int) -> None:
        """Commit; refused only for rows that a fork shared and a sibling gave other tokens."""
        old, stop = model.computed, model.computed + n
        try:
            model.handle.commit(n)
        except InvalidArgumentError:
            table = model.handle.block_table.tolist()
            blocks = table[old // self.B : -(-stop // self.B)]
            shared = [b for b in blocks if self.cache.pool.is_cached(b)]
            assert shared and len(model.tokens) > old // self.B * self.B
            return
        model.computed += n
        model.history = max(model.history, model.computed)
        self.register(model, old)

    def grow(self, a, b, c):
        model, n = self.pick(a), b % 7
        if model is None:
            return
        if b < 50 and model.history == model.high_water:
            self.name(model, self.digits(n, c))
        if self.write(model, n) and c % 4:
            self.commit_all(model)

    def append_one_layer(self, a, b, c):
        model = self.pick(a)
        if model is not None:
            self.append(model, c % self.layers, b % 4)

    def commit(self, a, b, c):
        model = self.pick(a)
        if model is None:
            return
        self.commit_some(model, min(b % 7, model.num_written - model.computed))

    def name(self, model: Model, tokens: list[int]) -> None:
        model.handle.append_tokens(tokens)
        if len(model.tokens) == model.history:
            model.tokens += tokens
        model.history += len(tokens)

    def append_tokens(self, a, b, c):
        model = self.pick(a)
        if model is not None and model.num_tokens < 6 * self.B:
            self.name(model, self.digits(b % 5, c))

    def truncate(self, a, b, c):
        model = self.pick(a)
        if model is None:
            return
        n = model.num_tokens - b % (model.num_tokens + 1) % 9
        model.handle.truncate(n)
        model.cut(n, False, self.B)

    def update_tokens(self, a, b, c):
        model = self.pick(a)
        if model is None:
            return
        n = model.computed - b % (model.computed + 1) % 6
        self.cache.update_tokens(model.handle.seq_id, n)
        if n < model.computed:  # the length it has already: nothing is forgotten
            model.cut(n, True, self.B)

    def fork(self, a, b, c):
        model = self.pick(a)
        if model is None or len(self.live) >= 6:
            return
        free = self.cache.num_free_blocks
        twin = model.forked(model.handle.fork())
        assert self.cache.num_free_blocks == free
        self.live.append(twin)

    def drop(self, model: Model) -> None:
        self.live.remove(model)
        model.handle.free()
        self.gone = model.handle

    def free(self, a, b, c):
        if self.live:
            self.drop(self.live[a % len(self.live)])

    def prepare_and_store(self, a, b, c):
        """One step of an engine: several sequences, one mapping, one store a layer."""
        if self.pick(a) is None:
            return
        chosen, n, commit = [], b % 5, c % 4 > 0
        for j in range(min(c % 3 + 1, len(self.live))):
            model = self.live[(a + j) % len(self.live)]
            if model.high_water == model.computed:
                chosen.append((model, n + j))
        free = self.cache.num_free_blocks
        try:
            slots = self.cache.prepare([m.handle for m, _ in chosen], [c for _, c in chosen])
        except OutOfBlocksError as e:
            assert e.needed > e.available == free
            assert self.cache.num_free_blocks == free
            return
        assert len(slots) == sum(c for _, c in chosen)
        marks = [[self.new_marks(c) for _, c in chosen] for _ in range(self.layers)]
        for layer in range(self.layers):
            flat = [m for part in marks[layer] for m in part]
            self.cache.store(layer, *self.rows(flat), slots)
        for j, (model, c) in enumerate(chosen):
            if c:
                model.blocks = max(model.blocks, -(-(model.computed + c) // self.B))
            if not commit:
                continue  # written for nothing: the next write goes over it
            for layer in range(self.layers):
                model.put(layer, model.computed, marks[layer][j])
            if a < 32:
                model.handle.commit(c)
        if not commit:
            return
        if a >= 32:
            self.cache.commit([m.handle for m, _ in chosen], [c for _, c in chosen])
        for model, c in chosen:
            old = model.computed
            model.computed += c
            model.history = max(model.history, model.computed)
            self.register(model, old)

    def rewrite(self, a, b, c):
        """append_kv over tokens that are there: a cached or shared block must not change."""
        model, layer, n = self.pick(a), c % self.layers, c % 3 + 1
        if model is None:
            return
        start = b % (model.end(layer) + 1)
        marks = self.new_marks(n)
        try:
            _, where = model.handle.append_kv(layer, *self.rows(marks), start)
        except OutOfBlocksError:
            return
        assert where == start
        model.put(layer, start, marks)
        model.written[layer] = max(model.end(layer), start + n)
        model.blocks = max(model.blocks, -(-(start + n) // self.B))
        for b in range(start // self.B, min(-(-(start + n) // self.B), len(model.cached))):
            model.cached[b] = False  # its own copy from now on

    def defragment(self, a, b, c):
        moved = self.cache.defragment()
        assert moved >= 0
        if not self.held:
            assert self.cache.fragmentation().holes == 0 or self.cache.num_cached_blocks
            tables = [m.handle.block_table.tolist() for m in self.live]
            seen: dict[int, int] = {}
            for table in tables:
                for b in table:
                    seen[b] = seen.get(b, 0) + 1
            for model, table in zip(self.live, tables, strict=True):
                if all(seen[b] == 1 for b in table):
                    assert self.cache.sequence_contiguity(model.handle) == 1.0

    def compact(self, a, b, c):
        model = self.pick(a)
        if model is not None:
            self.cache.compact_sequence(model.handle)

    def reset(self, a, b, c):
        self.cache.reset_prefix_cache()
        assert self.cache.num_cached_blocks == 0
        self.forget()

    def hold_views(self, a, b, c):
        model, layer = self.pick(a), c % self.layers
        if model is None or len(self.held) >= 3:
            return
        stop = model.end(layer)
        start = min(b % 8, stop)
        views = model.handle.views(layer, start, stop)
        arrays = [(v.k, v.v, v.start, v.length) for v in views] if self.dense else []
        self.held.append((views, arrays, model.marks[layer][start:stop], start))

    def release_views(self, a, b, c):
        if self.held:
            self.held.pop(a % len(self.held))[0].release()

    def probe(self, a, b, c):
        if not self.prompts:
            return
        salt, tokens = self.prompts[a % len(self.prompts)]
        more = self.digits(b % 5, c)
        before = self.cache.stats().to_dict()
        hit = self.cache.probe([*tokens, *more], salt)
        after = self.cache.stats().to_dict()
        assert {**after, "steps": 0} == {**before, "steps": 0}
        if tokens or more:
            _, most, _ = self.most(self.registered, salt, (*tokens, *more))
            assert hit <= most

    def refused(self, a, b, c):
        """Calls that must fail and change nothing (the invariants look)."""
        if self.gone is not None:
            for call in (lambda: self.gone.commit(0), lambda: self.gone.fork()):
                try:
                    call()
                    raise AssertionError("a freed handle was used")
                except FreedHandleError:
                    pass
            self.gone.free()
        model = self.pick(a)
        if model is None:
            return
        seq, n = model.handle, model.num_tokens
        calls = [
            lambda: seq.truncate(n + 1),
            lambda: seq.truncate(-1),
            lambda: seq.gather(0, 0, model.blocks * self.B + 1),
            lambda: seq.append_kv(0, *self.rows([1]), model.end(0) + 1),
            lambda: seq.commit(model.blocks * self.B - model.computed + 1),
        ]
        if model.high_water > model.computed:
            calls.append(lambda: seq.commit(model.num_written - model.computed + 1))
        for call in calls:
            try:
                call()
                raise AssertionError("a bad call was accepted")
            except InvalidPositionError:
                pass
        try:
            self.cache.prepare([seq, seq], [1, 1])
            raise AssertionError("the same sequence twice was accepted")
        except PagedCacheError:
            pass

    # ---- after each step -----------------------------------------------------------------

    @invariant()
    def everything_agrees(self):
        cache = self.cache
        if cache is None:
            return
        cache.check()
        for model in self.live:
            seq = model.handle
            assert seq.seq_len == model.computed
            assert seq.num_written == model.num_written
            assert seq.num_tokens == model.num_tokens
            assert seq.num_blocks == model.blocks
            assert seq.tokens.tolist() == model.tokens
            for layer in range(self.layers):
                marks = model.marks[layer]
                k, v = seq.gather(layer, 0, model.end(layer), dtype=np.float32)
                assert np.array_equal(host(k), self.k_read[marks])
                assert np.array_equal(host(v), self.v_read[marks])
        for _, arrays, marks, first in self.held:
            for k, v, start, length in arrays:
                part = marks[start - first : start - first + length]
                for array, read in ((k, self.k_read), (v, self.v_read)):
                    assert np.array_equal(host(array)[0].astype(np.float32), read[part][:, 0])

    def teardown(self):
        cache = self.cache
        if cache is None:
            return
        for views, *_ in self.held:
            views.release()
        for model in self.live:
            model.handle.free()
        self.live, self.held = [], []
        cache.check()
        stats = cache.stats()
        assert cache.num_free_blocks == self.total
        assert stats.sequences_allocated == stats.sequences_freed
        assert stats.blocks_allocated == stats.blocks_freed
        assert (stats.sequences_active, stats.blocks_used, stats.pinned) == (0, 0, 0)
        assert stats.hit_tokens + stats.miss_tokens == stats.query_tokens
        ids = cache.pool.allocate(self.total)
        assert sorted(ids.tolist()) == list(range(self.total))
        cache.close()


def test_random_histories_of_a_cache():
    # SPEC F14 F20 F22 F23 F25 F26 F27 F28 F28a F35 F40 F41
    run_state_machine_as_test(CacheMachine, settings=STATEFUL)

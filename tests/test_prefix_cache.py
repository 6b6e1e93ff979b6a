"""``PrefixCache`` on its own: exact identity, references, LRU order, linear search."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import numpy as np
import pytest

from pagedcache.errors import InvalidArgumentError, PrefixNotFoundError
from pagedcache.hashing import compute_prefix_hash
from pagedcache.prefix_cache import PrefixCache
from pagedcache.prefix_hasher import KeyedHasher


class ConstantHasher:
    """Every prompt in one bucket: the worst internal hash there is."""

    def hash(self, tokens: np.ndarray) -> int:
        return 7

    def prefixes(self, tokens: np.ndarray) -> list[int]:
        return [7] * (len(tokens) + 1)


def constant_cache(max_entries: int = 100) -> PrefixCache[object]:
    return PrefixCache(max_entries, hash_function=lambda tokens: 42, hasher=ConstantHasher())


def filled(names: str, max_entries: int | None = None) -> PrefixCache[str]:
    """One entry per letter, under the single token of its code, inserted in that order."""
    cache: PrefixCache[str] = PrefixCache(len(names) if max_entries is None else max_entries)
    for name in names:
        assert cache.insert([ord(name)], name)
    return cache


def held(cache: PrefixCache[str], names: str) -> str:
    return "".join(name for name in names if cache.contains([ord(name)]))


def fnv_collision() -> tuple[list[int], list[int]]:
    """Two prompts of three tokens with one FNV hash, as anybody can make them.

    A token is xored into the low 32 bits of the state: once two states agree in the high 32 bits
    (a birthday search over some 80,000 pairs of tokens), the next token can undo the rest.
    """
    rng = random.Random(1)
    seen: dict[int, tuple[int, list[int]]] = {}
    while True:
        pair = [rng.randrange(2**32), rng.randrange(2**32)]
        state = compute_prefix_hash(pair)
        there, other = seen.setdefault(state >> 32, (state, pair))
        if other != pair:
            return [*other, 5], [*pair, (there ^ state ^ 5) & 0xFFFFFFFF]


# --- the operations one by one ----------------------------------------------------------------


def test_insert_and_lookup() -> None:  # SPEC F38
    cache: PrefixCache[str] = PrefixCache()
    assert cache.max_entries == 100
    assert cache.insert([1, 2, 3], "abc") is True
    for same in ([1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int64)):
        assert cache.lookup(same) == "abc"
        assert cache.contains(same) and same in cache
    for other in ([1, 2], [1, 2, 3, 4], [3, 2, 1], []):
        assert cache.lookup(other) is None
        assert not cache.contains(other)
    assert len(cache) == 1
    assert repr(cache) == "<PrefixCache 1 of 100 entries>"


def test_the_caller_may_reuse_its_array() -> None:  # SPEC F38
    cache: PrefixCache[str] = PrefixCache()
    tokens = np.array([1, 2, 3], np.uint32)
    cache.insert(tokens, "abc")
    tokens[:] = 9
    assert cache.lookup([1, 2, 3]) == "abc"
    assert cache.lookup([9, 9, 9]) is None


def test_lookup_hash() -> None:  # SPEC F38
    cache: PrefixCache[str] = PrefixCache()
    cache.insert([1, 2, 3], "abc")
    h = compute_prefix_hash([1, 2, 3])
    assert cache.lookup_hash(h) == "abc"
    assert cache.lookup_hash(np.uint64(h)) == "abc"
    assert cache.lookup_hash(h, [1, 2, 3]) == "abc"
    assert cache.lookup_hash(h, [1, 2]) is None
    assert cache.lookup_hash(h ^ 1, [1, 2, 3]) is None
    assert cache.lookup_hash(h ^ 1) is None
    assert (cache.stats().hits, cache.stats().misses) == (3, 3)


def test_lookups_count_and_contains_does_not() -> None:  # SPEC F38
    cache = filled("ab")
    assert cache.stats().hit_rate == 0.0  # no lookups yet
    cache.lookup([ord("a")])
    cache.lookup_hash(compute_prefix_hash([ord("b")]))
    cache.lookup([1])
    cache.lookup([2])
    cache.contains([ord("a")])
    cache.contains([3])
    cache.find_longest_prefix([ord("a"), 1])
    cache.add_ref([ord("a")])
    cache.remove_ref([ord("a")])
    stats = cache.stats()
    assert stats.to_dict() == {
        "lookups": 4,
        "hits": 2,
        "misses": 2,
        "insertions": 2,
        "evictions": 0,
        "hit_rate": 0.5,
    }


def test_least_recently_used_goes_first() -> None:  # SPEC F38
    cache = filled("abc")
    cache.lookup([ord("a")])  # order of use is now b, c, a
    for new, left in (("d", "cad"), ("e", "ade"), ("f", "def")):
        assert cache.insert([ord(new)], new)
        assert held(cache, "cadef") == left
    assert cache.stats().evictions == 3
    assert cache.stats().insertions == 6


@pytest.mark.parametrize(
    ("use", "is_use"),
    [
        (lambda c: c.lookup([97]), True),
        (lambda c: c.lookup_hash(compute_prefix_hash([97])), True),
        (lambda c: c.insert([97], "new"), True),
        (lambda c: c.find_longest_prefix([97, 5]), True),
        (lambda c: (c.add_ref([97]), c.remove_ref([97])), True),
        (lambda c: c.contains([97]), False),
        (lambda c: c.ref_count([97]), False),
        (lambda c: c.lookup_hash(compute_prefix_hash([97]), [98]), False),
        (lambda c: c.find_longest_prefix([5, 97]), False),
    ],
)
def test_what_refreshes_recency(use: object, is_use: bool) -> None:  # SPEC F38
    cache = filled("ab")
    use(cache)  # type: ignore[operator]
    cache.insert([99], "c")
    assert held(cache, "abc") == ("ac" if is_use else "bc")


def test_entries_enter_without_references() -> None:  # SPEC F38, TRAP 7
    cache: PrefixCache[int] = PrefixCache(3)
    for i in range(10):  # a reference nobody holds would refuse the fourth
        assert cache.insert([i], i)
        assert cache.ref_count([i]) == 0
    assert [i for i in range(10) if cache.contains([i])] == [7, 8, 9]


def test_references_protect_and_the_last_one_makes_evictable() -> None:  # SPEC F38
    cache = filled("ab")
    assert cache.add_ref([97]) == 1
    assert cache.add_ref(compute_prefix_hash([97])) == 2
    assert cache.insert([99], "c")  # evicts b though a is older
    assert held(cache, "abc") == "ac"
    assert cache.remove_ref([97]) is False
    assert cache.remove_ref(compute_prefix_hash([97]), [97]) is True
    assert cache.lookup([97]) == "a"  # it stays
    cache.insert([100], "d")
    cache.insert([101], "e")
    assert held(cache, "acde") == "de"


def test_all_referenced_refuses_and_changes_nothing() -> None:  # SPEC F39
    cache = filled("ab")
    cache.add_ref([97])
    cache.add_ref([98])
    before = cache.stats()
    assert cache.insert([99], "c") is False
    assert (held(cache, "abc"), len(cache), cache.stats()) == ("ab", 2, before)
    cache.remove_ref([97])
    assert cache.insert([99], "c") is True
    assert held(cache, "abc") == "bc"


def test_replacing_evicts_nobody_and_keeps_references() -> None:  # SPEC F39
    cache = filled("ab")
    cache.add_ref([98])
    assert cache.insert([98], "B") is True
    assert cache.insert([97], "A") is True
    assert (cache.lookup([97]), cache.lookup([98]), len(cache)) == ("A", "B", 2)
    assert cache.ref_count([98]) == 1
    assert cache.stats().evictions == 0
    cache.add_ref([97])
    assert cache.insert([97], "A2") is True  # also when everything is referenced
    assert cache.lookup([97]) == "A2"
    assert cache.stats().insertions == 2


def test_clear() -> None:  # SPEC F38
    cache = filled("abc")
    cache.add_ref([97])
    cache.lookup([97])
    cache.clear()
    assert len(cache) == 0 and held(cache, "abc") == ""
    assert cache.find_longest_prefix([97]) is None
    assert cache.stats().hits == 1
    with pytest.raises(PrefixNotFoundError):
        cache.remove_ref([97])
    assert cache.insert([97], "again")
    assert cache.ref_count([97]) == 0


def test_utilization() -> None:  # SPEC F38
    assert PrefixCache(0).utilization == 0.0
    assert filled("ab", 8).utilization == 0.25
    assert filled("abcd", 2).utilization == 1.0


def test_capacity_zero_holds_nothing() -> None:  # SPEC F38, SPEC F39
    cache: PrefixCache[int] = PrefixCache(0)
    assert cache.insert([1], 1) is False
    assert cache.lookup([1]) is None
    assert len(cache) == 0


def test_the_empty_prompt_is_an_ordinary_key() -> None:  # SPEC F38
    cache: PrefixCache[str] = PrefixCache()
    cache.insert([], "nothing")
    assert cache.lookup([]) == "nothing"
    assert cache.find_longest_prefix([]) is None
    assert cache.find_longest_prefix([1]) is None  # a prefix has at least one token


# --- longest prefix ---------------------------------------------------------------------------


def test_find_longest_prefix() -> None:  # SPEC F38
    cache: PrefixCache[int] = PrefixCache()
    for n in (1, 3, 4, 7):
        cache.insert(range(n), n)
    cache.insert([0, 9], 29)
    for length, found in ((1, 1), (2, 1), (3, 3), (5, 4), (6, 4), (7, 7), (50, 7)):
        tokens = range(length)
        assert cache.find_longest_prefix(tokens) == (compute_prefix_hash(range(found)), found)
    assert cache.find_longest_prefix([0, 9, 2, 3]) == (compute_prefix_hash([0, 9]), 2)
    assert cache.find_longest_prefix([0, 1, 2, 8]) == (compute_prefix_hash([0, 1, 2]), 3)
    assert cache.find_longest_prefix([5, 0]) is None
    h, n = cache.find_longest_prefix(range(6)) or (0, 0)
    assert cache.lookup_hash(h, range(n)) == 4


def test_find_longest_prefix_refreshes_only_the_match() -> None:  # SPEC F38
    cache: PrefixCache[int] = PrefixCache(3)
    for n in (1, 2, 3):
        cache.insert(range(n), n)
    assert cache.find_longest_prefix([0, 1, 9]) == (compute_prefix_hash([0, 1]), 2)
    cache.insert([50], 50)  # order of use was 1, 3, 2 tokens
    assert [cache.contains(range(n)) for n in (1, 2, 3)] == [False, True, True]
    cache.insert([51], 51)
    assert [cache.contains(range(n)) for n in (1, 2, 3)] == [False, True, False]


class CountingHasher:
    """Counts the tokens hashed, and gives out lists that count their reads."""

    def __init__(self) -> None:
        self.inner, self.tokens_hashed, self.reads = KeyedHasher(), 0, 0

    def hash(self, tokens: np.ndarray) -> int:
        self.tokens_hashed += len(tokens)
        return self.inner.hash(tokens)

    def prefixes(self, tokens: np.ndarray) -> list[int]:
        self.tokens_hashed += len(tokens)
        counter = self

        class Reads(list[int]):
            def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
                counter.reads += 1
                return super().__getitem__(index)

        return Reads(self.inner.prefixes(tokens).tolist())


@pytest.mark.parametrize("length", [200, 2000])
def test_longest_prefix_is_one_pass(length: int) -> None:  # SPEC F38, TRAP 8
    """Every prefix of another prompt is cached: each length is a candidate, none matches."""
    hasher = CountingHasher()
    cache: PrefixCache[int] = PrefixCache(length, hasher=hasher)
    for n in range(1, length):
        cache.insert([1] * n, n)
    cache.insert([0], 0)
    cache._compared = hasher.tokens_hashed = hasher.reads = 0
    assert cache.find_longest_prefix([0] + [1] * (length - 1)) == (compute_prefix_hash([0]), 1)
    assert hasher.tokens_hashed == length
    assert hasher.reads <= length
    assert cache._compared == 1  # tokens are compared only where a hash matched


def test_few_lengths_need_few_probes() -> None:  # SPEC F38, TRAP 8
    hasher = CountingHasher()
    cache: PrefixCache[int] = PrefixCache(1000, hasher=hasher)
    for i in range(500):
        cache.insert([i] * 3, i)
        cache.insert([i] * 8, i)
    hasher.reads = cache._compared = 0
    assert cache.find_longest_prefix([7] * 5000) == (compute_prefix_hash([7] * 8), 8)
    assert (hasher.reads, cache._compared) == (1, 1)
    assert cache.find_longest_prefix([7] * 7) == (compute_prefix_hash([7] * 3), 3)
    assert cache.find_longest_prefix([1, 2] * 100) is None
    assert (hasher.reads, cache._compared) == (4, 2)


# --- equal hashes, chosen collisions ----------------------------------------------------------


def test_a_constant_hash_gives_no_wrong_hit() -> None:  # CASE C16, TRAP 13, SPEC F38
    cache = constant_cache()
    prompts = [[1], [2], [1, 2], [2, 1], [1, 2, 3], [2, 1, 3]]
    for prompt in prompts:
        assert cache.insert(prompt, tuple(prompt))
    assert len(cache) == len(prompts)
    for prompt in prompts:
        assert cache.lookup(prompt) == tuple(prompt)
        assert cache.lookup_hash(42, prompt) == tuple(prompt)
        assert cache.find_longest_prefix([*prompt, 9]) == (42, len(prompt))
    assert cache.lookup([3]) is None
    assert cache.lookup_hash(42, [3]) is None
    assert cache.find_longest_prefix([3, 1, 2]) is None
    assert cache.lookup_hash(42) is None  # six entries share it: a hash alone says nothing
    for call in (cache.add_ref, cache.remove_ref, cache.ref_count):
        with pytest.raises(PrefixNotFoundError, match="6 entries share this hash"):
            call(42)
    assert cache.add_ref(42, [1, 2]) == 1
    assert [cache.ref_count(prompt) for prompt in prompts] == [0, 0, 1, 0, 0, 0]


def test_real_fnv_collisions_are_different_entries() -> None:  # TRAP 13, SPEC F38
    one, two = fnv_collision()
    assert one != two
    h = compute_prefix_hash(one)
    assert h == compute_prefix_hash(two)
    cache: PrefixCache[str] = PrefixCache()
    cache.insert(one, "tenant one")
    assert cache.lookup(two) is None
    assert cache.lookup_hash(h, two) is None
    assert cache.find_longest_prefix([*two, 1]) is None
    assert cache.insert(two, "tenant two")
    assert (cache.lookup(one), cache.lookup(two), len(cache)) == ("tenant one", "tenant two", 2)
    assert cache.lookup_hash(h) is None
    assert cache.find_longest_prefix([*two, 1]) == (h, 3)


def test_one_public_hash_for_all_stays_linear() -> None:  # TRAP 13
    """A public hash that everybody shares lengthens no bucket: only the keyed hash picks one."""
    cache: PrefixCache[int] = PrefixCache(500, hash_function=lambda tokens: 0)
    for i in range(1000):
        cache.insert([i, i], i)
    assert len(cache) == 500
    cache._compared = 0
    for i in range(1000):
        assert cache.lookup_hash(0, [i, i]) == (i if i >= 500 else None)
    assert cache._compared == 500


def test_the_internal_hash_has_a_secret() -> None:  # TRAP 13
    tokens = np.arange(5, dtype=np.uint32)
    hashes = {KeyedHasher().hash(tokens) for _ in range(20)}
    assert len(hashes) == 20
    assert all(0 <= h < 2**61 - 1 for h in hashes)


def test_prefix_hashes_follow_the_polynomial() -> None:  # SPEC F38
    hasher, prime = KeyedHasher(), 2**61 - 1
    for tokens in ([], [0], [2**32 - 1] * 9, list(range(5000))):
        array = np.array(tokens, np.uint32)
        state = hasher._start
        expected = [state]
        for token in tokens:
            state = (state + token + 1) * hasher._multiplier % prime
            expected.append(state)
        assert hasher.prefixes(array).tolist() == expected
        assert hasher.hash(array) == expected[-1]
    hasher._start = hasher._multiplier = prime - 1  # the largest operands
    largest = np.array([2**32 - 1], np.uint32)
    assert hasher.hash(largest) == (prime - 1 + 2**32) * (prime - 1) % prime


# --- refused arguments ------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [-1, -(2**70), 2**70, 1.0, True, None, "10"])
def test_bad_capacity(capacity: object) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="max_entries"):
        PrefixCache(capacity)  # type: ignore[arg-type]


def test_unknown_entries() -> None:  # SPEC 7, SPEC F38
    cache = filled("a")
    for call in (cache.add_ref, cache.remove_ref, cache.ref_count):
        for key in ([1, 2], [], 12345):
            with pytest.raises(PrefixNotFoundError) as caught:
                call(key)
            assert isinstance(caught.value, KeyError)
        with pytest.raises(PrefixNotFoundError):
            call(compute_prefix_hash([97]), [98])


def test_remove_ref_below_zero() -> None:  # SPEC 7, SPEC F38
    cache = filled("ab")
    with pytest.raises(InvalidArgumentError, match="no reference"):
        cache.remove_ref([97])
    cache.add_ref([97])
    cache.remove_ref([97])
    with pytest.raises(InvalidArgumentError, match="no reference"):
        cache.remove_ref(compute_prefix_hash([97]))
    assert cache.ref_count([97]) == 0


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], [True], "12", None, [[1]]])
def test_bad_tokens_change_nothing(tokens: object) -> None:  # SPEC 7
    cache = filled("ab")
    before = cache.stats()
    calls = [cache.lookup, cache.contains, cache.add_ref, cache.remove_ref, cache.ref_count]
    calls += [cache.find_longest_prefix, lambda t: cache.insert(t, "x")]
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call(tokens)
    assert (held(cache, "ab"), cache.stats()) == ("ab", before)


@pytest.mark.parametrize("h", [-1, 2**64, 1.5, "1", None, [1]])
def test_bad_hash(h: object) -> None:  # SPEC 7
    cache = filled("a")
    with pytest.raises(InvalidArgumentError):
        cache.lookup_hash(h)  # type: ignore[arg-type]
    assert cache.stats().lookups == 0


def test_tokens_beside_tokens_are_refused() -> None:  # SPEC 7
    cache = filled("a")
    with pytest.raises(InvalidArgumentError, match="goes with a hash"):
        cache.add_ref([97], [97])


# --- values, threads --------------------------------------------------------------------------


class Thing:
    """A value whose end can be watched."""


def test_dropped_values_are_let_go() -> None:  # SPEC F38
    cache: PrefixCache[Thing] = PrefixCache(2)
    things = [Thing() for _ in range(5)]
    watch = [weakref.ref(thing) for thing in things]
    for i, token in enumerate((0, 1, 1, 2)):  # 1 is replaced, 0 is evicted
        cache.insert([token], things[i])
    del things
    gc.collect()
    assert [w() is not None for w in watch] == [False, False, True, True, False]
    cache.clear()
    gc.collect()
    assert [w() for w in watch] == [None] * 5


def test_a_value_may_use_the_cache_when_it_goes() -> None:  # SPEC F34
    cache: PrefixCache[object] = PrefixCache(1)

    class Talkative:
        def __del__(self) -> None:
            seen.append((len(cache), cache.contains([2])))

    seen: list[tuple[int, bool]] = []
    cache.insert([1], Talkative())
    done = threading.Thread(target=cache.insert, args=([2], "next"), daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()
    assert seen == [(1, True)]


def test_many_threads() -> None:  # SPEC F34
    cache: PrefixCache[int] = PrefixCache(32)
    failures: list[str] = []
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        barrier.wait()
        for _ in range(1500):
            t = rng.randrange(64)
            action = rng.randrange(5)
            if action == 0:
                cache.insert([t] * (t % 5 + 1), t)
            elif action == 1 and cache.lookup([t] * (t % 5 + 1)) not in (None, t):
                failures.append("wrong value")
            elif action == 2:
                try:
                    cache.add_ref([t] * (t % 5 + 1))
                except PrefixNotFoundError:
                    continue
                if cache.lookup([t] * (t % 5 + 1)) != t:
                    failures.append("a referenced entry went away")
                cache.remove_ref([t] * (t % 5 + 1))
            elif action == 3:
                found = cache.find_longest_prefix([t] * 6)
                if found is not None and found[1] != t % 5 + 1:
                    failures.append("wrong prefix")
            else:
                stats = cache.stats()
                if stats.hits + stats.misses != stats.lookups:
                    failures.append("parts do not add up")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = cache.stats()
    assert len(cache) == stats.insertions - stats.evictions <= 32
    assert len(cache._idle) == len(cache)  # every reference was given back
    for t in range(100, 132):
        assert cache.insert([t], t)  # and everything is evictable
    assert all(cache.contains([t]) for t in range(100, 132))

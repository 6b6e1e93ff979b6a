"""``PrefixCache``: a value per token prefix, for engines that keep their own blocks.

Stands alone: no pool, no storage. What a value is (a block list, a file name, a tensor) is the
caller's affair. Identity is always the exact token sequence; hashes only find candidates:

* the *public* hash (``compute_prefix_hash``) names an entry to the outside; anybody can make two
  prompts share one, so it is looked up beside the tokens and never instead of them;
* the *keyed* hash picks the bucket inside (``prefix_hasher``): it has a secret, so buckets stay
  short whatever is inserted, and one pass over a prompt yields the hash of every prefix of it.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import RLock
from typing import Any, Generic, SupportsIndex, TypeVar

import numpy as np

from pagedcache.arguments import as_count, as_integer
from pagedcache.arrays import as_tokens
from pagedcache.errors import InvalidArgumentError, PrefixNotFoundError
from pagedcache.hashing import compute_prefix_hash
from pagedcache.prefix_hasher import KeyedHasher, PrefixHasher
from pagedcache.stats import PrefixCacheStats

Value = TypeVar("Value")
Tokens = Any  # list, tuple, range or integer array of token ids
_PUBLIC = struct.Struct("<Q")


class _Entry:
    __slots__ = ("data", "length", "key", "public", "value", "refs")

    def __init__(self, data: bytes, key: int, public: int, value: Any) -> None:
        self.data, self.length = data, len(data) // 4
        self.key, self.public = key, public
        self.value, self.refs = value, 0


class PrefixCache(Generic[Value]):
    """At most ``max_entries`` values, each under an exact token prefix; LRU, reference counted.

    An entry enters with 0 references. Only entries with 0 references are evicted, the least
    recently used first; ``insert``, ``lookup``, ``lookup_hash``, ``add_ref``, the match of
    ``find_longest_prefix`` and the ``remove_ref`` that brings a count to 0 are uses. All calls
    may come from any thread. Values are dropped outside the lock.

    ``key`` below is either tokens, or an int: the public hash of an entry. A hash with
    ``tokens`` beside it finds the entry with exactly those tokens; a hash alone finds the entry
    only if a single one has it, because a hash that several share says nothing.

    Cost of every call: one pass over the tokens given, and O(1) beyond (O(log max_entries)
    comparisons to keep the lengths sorted). Raises ``InvalidArgumentError`` for a capacity that
    is negative or no integer and for what is no token array. ``hash_function`` (public, of a
    uint32 array to 0…2^64 - 1) and ``hasher`` (internal) are for tests: any function is right.
    """

    def __init__(
        self,
        max_entries: SupportsIndex = 100,
        *,
        hash_function: Callable[[Any], int] = compute_prefix_hash,
        hasher: PrefixHasher | None = None,
    ) -> None:
        self._max_entries = as_count(max_entries, "max_entries")
        self._hash_function = hash_function
        self._hasher = KeyedHasher() if hasher is None else hasher
        # Reentrant: the destructor of a value may run anywhere and call back.
        self._lock = RLock()
        self._buckets: dict[int, list[_Entry]] = {}
        # Keyed by bytes, whose hash is seeded: public hashes can be chosen to clash as dict keys.
        self._by_public: dict[bytes, dict[int, _Entry]] = {}
        self._idle: OrderedDict[int, _Entry] = OrderedDict()  # 0 references, oldest use first
        self._lengths: list[int] = []  # of the entries, ascending, each once
        self._length_counts: Counter[int] = Counter()
        self._num_entries = 0
        self._lookups = self._hits = self._insertions = self._evictions = 0
        self._compared = 0  # exact token comparisons: what tests of O(n) count

    @property
    def max_entries(self) -> int:
        """Capacity in entries."""
        return self._max_entries

    @property
    def utilization(self) -> float:
        """``len(self) / max_entries``, 0…1; 0.0 for capacity 0."""
        return self._num_entries / self._max_entries if self._max_entries else 0.0

    def __len__(self) -> int:
        return self._num_entries

    def __contains__(self, tokens: Tokens) -> bool:
        return self.contains(tokens)

    def __repr__(self) -> str:
        return f"<PrefixCache {self._num_entries} of {self._max_entries} entries>"

    def insert(self, tokens: Tokens, value: Value) -> bool:
        """Put ``value`` under ``tokens``; true when it is in.

        Tokens that are there already get the new value, keep their references and evict nobody.
        Otherwise a full cache evicts its least recently used entry without references; when every
        entry is referenced, or the capacity is 0, nothing changes and the answer is False.
        """
        array = as_tokens(tokens)
        data, key = array.tobytes(), self._hasher.hash(array)
        public = as_integer(self._hash_function(array), "hash") % 2**64
        dropped: list[Any] = []  # lives until the lock is open again
        with self._lock:
            entry = self._find(data, key)
            if entry is not None:
                dropped.append(entry.value)
                entry.value = value
                self._use(entry)
                return True
            if self._num_entries >= self._max_entries:
                if not self._idle:
                    return False
                dropped.append(self._evict_oldest())
            self._add(_Entry(data, key, public, value))
            self._insertions += 1
            return True

    def lookup(self, tokens: Tokens) -> Value | None:
        """The value under exactly ``tokens``, else None; counts a hit or a miss."""
        array = as_tokens(tokens)
        data, key = array.tobytes(), self._hasher.hash(array)
        with self._lock:
            return self._count(self._find(data, key))

    def lookup_hash(self, hash: SupportsIndex, tokens: Tokens | None = None) -> Value | None:
        """The value of the entry with this public hash, else None; counts a hit or a miss.

        With ``tokens`` they are compared too; without, a hash shared by several entries is a
        miss. A hit without tokens trusts the hash: fine for values that are checked otherwise.
        """
        find = self._finder(as_integer(hash, "hash"), tokens)
        with self._lock:
            return self._count(find())

    def contains(self, tokens: Tokens) -> bool:
        """Whether there is an entry under exactly ``tokens``; counts nothing, refreshes nothing."""
        array = as_tokens(tokens)
        data, key = array.tobytes(), self._hasher.hash(array)
        with self._lock:
            return self._find(data, key) is not None

    def add_ref(self, key: Tokens | SupportsIndex, tokens: Tokens | None = None) -> int:
        """One reference more on an entry; returns the new count.

        Raises ``PrefixNotFoundError`` when there is no such entry.
        """
        find = self._finder(key, tokens)
        with self._lock:
            entry = self._require(find(), key)
            entry.refs += 1
            self._idle.pop(id(entry), None)
            return entry.refs

    def remove_ref(self, key: Tokens | SupportsIndex, tokens: Tokens | None = None) -> bool:
        """One reference less; true when the count reached 0 (the entry stays, now evictable).

        Raises ``PrefixNotFoundError`` when there is no such entry, ``InvalidArgumentError`` when
        it has no reference to give back.
        """
        find = self._finder(key, tokens)
        with self._lock:
            entry = self._require(find(), key)
            if entry.refs == 0:
                raise InvalidArgumentError(
                    f"prefix {_describe(key)} has no reference to remove; it has 0"
                )
            entry.refs -= 1
            if entry.refs == 0:
                self._idle[id(entry)] = entry
            return entry.refs == 0

    def ref_count(self, key: Tokens | SupportsIndex, tokens: Tokens | None = None) -> int:
        """References on an entry; raises ``PrefixNotFoundError`` when there is no such entry."""
        find = self._finder(key, tokens)
        with self._lock:
            return self._require(find(), key).refs

    def find_longest_prefix(self, tokens: Tokens) -> tuple[int, int] | None:
        """``(public hash, n)`` of the longest entry that ``tokens`` start with, n >= 1, or None.

        Refreshes the recency of that entry only and counts neither hit nor miss:
        ``lookup_hash(hash, tokens[:n])`` does. One pass over the tokens, then at most one probe
        for each length that the cache holds; only hash matches are compared.
        """
        array = as_tokens(tokens)
        keys = self._hasher.prefixes(array)
        with self._lock:
            for i in range(bisect_right(self._lengths, len(array)) - 1, -1, -1):
                n = self._lengths[i]
                bucket = self._buckets.get(int(keys[n]))
                if bucket is None or n == 0:
                    continue
                entry = self._pick(bucket, array[:n].tobytes())
                if entry is not None:
                    self._use(entry)
                    return entry.public, n
        return None

    def clear(self) -> None:
        """Drop every entry, referenced or not; the counters stay."""
        with self._lock:
            dropped = self._buckets
            self._buckets, self._by_public, self._idle = {}, {}, OrderedDict()
            self._lengths, self._length_counts, self._num_entries = [], Counter(), 0
        del dropped

    def stats(self) -> PrefixCacheStats:
        """Counters, all from one moment."""
        with self._lock:
            return PrefixCacheStats(
                lookups=self._lookups,
                hits=self._hits,
                misses=self._lookups - self._hits,
                insertions=self._insertions,
                evictions=self._evictions,
            )

    # Below: with the lock held.

    def _find(self, data: bytes, key: int) -> _Entry | None:
        bucket = self._buckets.get(key)
        return None if bucket is None else self._pick(bucket, data)

    def _pick(self, bucket: list[_Entry], data: bytes) -> _Entry | None:
        for entry in bucket:
            self._compared += 1
            if entry.data == data:
                return entry
        return None

    def _finder(
        self, key: Tokens | SupportsIndex, tokens: Tokens | None
    ) -> Callable[[], _Entry | None]:
        """Convert the arguments now, without the lock; the result finds the entry under it."""
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            public = as_count(key, "hash", most=2**64 - 1)
            if tokens is None:
                return lambda: self._only_one(public)
        else:
            if tokens is not None:
                raise InvalidArgumentError("tokens= goes with a hash, not with other tokens")
            public, tokens = -1, key
        array = as_tokens(tokens)
        data, keyed = array.tobytes(), self._hasher.hash(array)

        def find() -> _Entry | None:
            entry = self._find(data, keyed)
            return entry if entry is not None and public in (-1, entry.public) else None

        return find

    def _only_one(self, public: int) -> _Entry | None:
        same = self._by_public.get(_PUBLIC.pack(public), {})
        return next(iter(same.values())) if len(same) == 1 else None

    def _require(self, entry: _Entry | None, key: Tokens | SupportsIndex) -> _Entry:
        if entry is not None:
            return entry
        if isinstance(key, int | np.integer):
            same = len(self._by_public.get(_PUBLIC.pack(key), {}))
            if same > 1:
                reason = f"{same} entries share this hash; pass tokens= as well"
                raise PrefixNotFoundError(_describe(key), reason)
        raise PrefixNotFoundError(_describe(key))

    def _count(self, entry: _Entry | None) -> Value | None:
        self._lookups += 1
        if entry is None:
            return None
        self._hits += 1
        self._use(entry)
        value: Value = entry.value
        return value

    def _use(self, entry: _Entry) -> None:
        if entry.refs == 0:
            self._idle.move_to_end(id(entry))

    def _add(self, entry: _Entry) -> None:
        self._buckets.setdefault(entry.key, []).append(entry)
        self._by_public.setdefault(_PUBLIC.pack(entry.public), {})[id(entry)] = entry
        self._idle[id(entry)] = entry
        if not self._length_counts[entry.length]:
            insort(self._lengths, entry.length)
        self._length_counts[entry.length] += 1
        self._num_entries += 1

    def _evict_oldest(self) -> _Entry:
        _, entry = self._idle.popitem(last=False)
        _discard(self._buckets, entry.key, entry)
        public = _PUBLIC.pack(entry.public)
        del self._by_public[public][id(entry)]
        if not self._by_public[public]:
            del self._by_public[public]
        self._length_counts[entry.length] -= 1
        if not self._length_counts[entry.length]:
            del self._length_counts[entry.length]
            del self._lengths[bisect_right(self._lengths, entry.length) - 1]
        self._num_entries -= 1
        self._evictions += 1
        return entry


def _discard(buckets: dict[int, list[_Entry]], key: int, entry: _Entry) -> None:
    bucket = buckets[key]
    bucket.remove(entry)
    if not bucket:
        del buckets[key]


def _describe(key: Any) -> str:
    if isinstance(key, int | np.integer):
        return f"hash {int(key):#018x}"
    array = as_tokens(key)
    shown = ", ".join(str(token) for token in array[:4])
    return f"of {len(array)} tokens [{shown}{', …' if len(array) > 4 else ''}]"

"""Numbers at the public door: what is an integer, what is refused, never an OverflowError."""

import pickle

import numpy as np
import pytest
from cachekit import make_cache, refused, rows

from pagedcache.arguments import (
    COUNT_LIMIT,
    as_count,
    as_flag,
    as_integer,
    as_layer,
    as_position,
)
from pagedcache.errors import (
    InvalidArgumentError,
    InvalidPositionError,
    OutOfBlocksError,
    PagedCacheError,
)

NOT_INTEGERS = [True, False, np.bool_(True), 1.0, np.float32(2), "3", b"3", None, [1], 1j]


@pytest.mark.parametrize("value", [5, np.int8(5), np.uint64(5), np.array(5)])
def test_integers_of_any_kind(value):
    assert as_integer(value, "n") == 5
    assert type(as_integer(value, "n")) is int
    assert as_count(value, "n") == 5


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize(
    "check", [as_integer, as_count, lambda value, name: as_position(value, name, int)]
)
def test_others_are_refused_by_name(value, check):
    with pytest.raises(InvalidArgumentError, match="num_things must be"):
        check(value, "num_things")


@pytest.mark.parametrize("value", [-1, COUNT_LIMIT + 1, 2**63, -(2**63), 10**5000],
                         ids="negative limit+1 2^63 -2^63 10^5000".split())
def test_counts_out_of_range(value):
    with pytest.raises(InvalidArgumentError, match=r"n must be 0…"):
        as_count(value, "n")


def test_bounds_are_inclusive():
    assert as_count(3, "n", least=3, most=4) == 3
    assert as_count(4, "n", least=3, most=4) == 4
    with pytest.raises(InvalidArgumentError, match="n must be 3…4, got 5"):
        as_count(5, "n", least=3, most=4)


def test_positions_that_no_sequence_holds_are_refused_with_their_own_number():
    for value in (-5, 7, COUNT_LIMIT, -COUNT_LIMIT):
        assert as_position(value, "p", lambda: 3) == value
    for value in (10**30, 10**5000, -(10**5000), COUNT_LIMIT + 1):
        with pytest.raises(InvalidPositionError) as caught:
            as_position(value, "p", lambda: 3)
        assert (caught.value.position, caught.value.length) == (value, 3)
        assert str(caught.value).endswith("is outside 0…3: p")
        assert pickle.loads(pickle.dumps(caught.value)).position == value


def test_flags():
    assert as_flag(1, "f") is True and as_flag(None, "f") is False
    with pytest.raises(InvalidArgumentError, match="f must be true or false"):
        as_flag(np.zeros(2), "f")


@pytest.mark.parametrize("layer", [-1, 2, 2**70, 0.0, None, True])
def test_layers(layer):
    assert as_layer(1, 2) == 1
    assert as_layer(np.int64(0), 2) == 0
    with pytest.raises(InvalidArgumentError, match="layer must be"):
        as_layer(layer, 2)


def test_numbers_too_long_to_write_out_are_refused_by_size():
    # SPEC 7: every refusal is typed, also where Python will not print the number
    huge = 10**5000
    with make_cache(4) as cache, cache.open([1, 2]) as seq:
        k, v = rows(cache.spec, 0, [1])
        for call in (
            lambda: cache.prepare([seq], [huge]),
            lambda: seq.prepare(huge),
            lambda: cache.block_tables([seq], [huge]),
            lambda: cache.store(0, k, v, [huge]),
            lambda: cache.open([huge]),
            lambda: seq.append_token(huge),
            lambda: seq.gather(0, 0, huge),
            lambda: seq.truncate(huge),
            lambda: cache.sequence(huge),
            lambda: cache.update_tokens(seq.seq_id, huge),
            lambda: cache.copies_done(huge),
        ):
            refused(cache, call, PagedCacheError, seq)
        with cache.open([1], request_id=huge) as named:
            assert "16610 bits" in repr(named)


def test_numbers_are_read_once():
    # A count that changes between the check and its use must not pass the check.
    class Fickle:
        reads = 0

        def __index__(self):
            Fickle.reads += 1
            return 1 if Fickle.reads == 1 else 10**6

    with make_cache(4) as cache, cache.open() as seq:
        assert len(cache.prepare([seq], [Fickle()])) == 1
        assert Fickle.reads == 1


def test_asking_for_the_blocks_of_a_huge_step_takes_no_memory():
    with make_cache(4, B=4) as cache, cache.open() as seq:
        assert seq.blocks_needed(2**47) == 2**45
        refused(cache, lambda: seq.prepare(2**39), OutOfBlocksError, seq)

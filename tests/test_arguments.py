"""Numbers at the public door: what is an integer, what is refused, never an OverflowError."""

import numpy as np
import pytest

from pagedcache.arguments import COUNT_LIMIT, as_count, as_integer, as_layer, as_position
from pagedcache.errors import InvalidArgumentError

NOT_INTEGERS = [True, False, np.bool_(True), 1.0, np.float32(2), "3", b"3", None, [1], 1j]


@pytest.mark.parametrize("value", [5, np.int8(5), np.uint64(5), np.array(5)])
def test_integers_of_any_kind(value):
    assert as_integer(value, "n") == 5
    assert type(as_integer(value, "n")) is int
    assert as_count(value, "n") == 5


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize("check", [as_integer, as_count, as_position])
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


def test_positions_are_cut_to_what_no_sequence_holds():
    assert as_position(-5, "p") == -5
    assert as_position(7, "p") == 7
    assert as_position(10**5000, "p") == COUNT_LIMIT
    assert as_position(-(10**5000), "p") == -COUNT_LIMIT


@pytest.mark.parametrize("layer", [-1, 2, 2**70, 0.0, None, True])
def test_layers(layer):
    assert as_layer(1, 2) == 1
    assert as_layer(np.int64(0), 2) == 0
    with pytest.raises(InvalidArgumentError, match="layer must be"):
        as_layer(layer, 2)

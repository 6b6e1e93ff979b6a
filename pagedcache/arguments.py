"""Plain numbers and small values at the public door: checked once, refused with a typed error.

Compiled code below this door takes 64-bit integers; a bool, a float, a string or an integer
that does not fit is refused here with the argument's name, so that no ``OverflowError`` or
``TypeError`` of the compiled layer reaches the user.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from pagedcache.errors import InvalidArgumentError, InvalidPositionError, shown

#: Counts above this cannot be blocks or tokens of any machine, and would overflow when added up.
COUNT_LIMIT = 2**48


def as_integer(value: Any, name: str) -> int:
    """``value`` as a Python int of any sign.

    Accepts int, NumPy integers and whatever has ``__index__`` (a torch tensor of one integer);
    bools and everything else are refused with :class:`InvalidArgumentError`.
    """
    if type(value) is int:
        return value
    # A NumPy bool has no __index__, one of torch has.
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "torch.bool":
        try:
            return operator.index(value)
        except (TypeError, ValueError, RuntimeError):  # the latter from a tensor without values
            pass
    raise InvalidArgumentError(f"{name} must be an integer, got {_short(value)}")


def as_count(value: Any, name: str, *, least: int = 0, most: int = COUNT_LIMIT) -> int:
    """``value`` as an int in ``least … most``; :class:`InvalidArgumentError` otherwise."""
    if type(value) is int and least <= value <= most:
        return value
    number = as_integer(value, name)
    if not least <= number <= most:
        raise InvalidArgumentError(f"{name} must be {least}…{most}, got {_short(number)}")
    return number


def as_position(value: Any, name: str, end: Callable[[], int]) -> int:
    """``value`` as an int that fits 64 bits, for calls whose callee knows the valid range.

    A value that no sequence can hold raises ``InvalidPositionError`` with it and ``end()``.
    """
    number = value if type(value) is int else as_integer(value, name)
    if not -COUNT_LIMIT <= number <= COUNT_LIMIT:
        raise InvalidPositionError(number, end(), name)
    return number


def as_flag(value: Any, name: str) -> bool:
    """The truth of ``value``; ``InvalidArgumentError`` where it has none (an array of several)."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # the latter from tensors of torch
        raise InvalidArgumentError(f"{name} must be true or false, got {_short(value)}") from None


def as_layer(layer: Any, num_layers: int) -> int:
    """``layer`` as an int in ``0 … num_layers - 1``; :class:`InvalidArgumentError` otherwise."""
    if type(layer) is int and 0 <= layer < num_layers:
        return layer
    return as_count(layer, "layer", most=num_layers - 1)


def _short(value: Any) -> str:
    return f"{shown(value)} ({type(value).__name__})"

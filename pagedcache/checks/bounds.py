"""How far a stored value may lie from the value given: one bound per format."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .channels import BY_CHANNEL
from .reference import GROUP, Floats

_HALF = 2.0**-11  # unit roundoff of a float16 scale
_SUBNORMAL = 2.0**-25  # and its error where the scale is subnormal, times the largest quant
_SLACK = 2.0**-20  # float32 arithmetic on the way, relative to the group's magnitude


def error_bound(name: str, rows: Floats) -> Floats:
    """Largest allowed ``|read back - given|`` for every value of float32 rows ``[..., head_dim]``.

    Float formats: the unit roundoff of the value. Grouped formats: half a step of the value's
    group, plus the rounding of a float16 scale; ``q4_0`` clips one side, which costs one step.
    Groups are runs of 32 values of a row; of formats by channel see :func:`block_bound`.
    """
    if name == "float32":
        return np.zeros_like(rows)
    if name in ("float16", "bfloat16"):
        roundoff, smallest = (2.0**-11, 2.0**-25) if name == "float16" else (2.0**-8, 2.0**-134)
        return (np.abs(rows) * roundoff + smallest).astype(np.float32)
    pad = -rows.shape[-1] % GROUP
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, pad)]).astype(np.float64)
    groups = padded.reshape(*rows.shape[:-1], -1, GROUP)
    per_value = np.repeat(_of_groups(name, groups), GROUP, axis=-1)
    return per_value[..., : rows.shape[-1]].astype(np.float32)


def block_bound(name: str, held: str, rows: Floats, block_size: int) -> Floats:
    """The same for float32 rows ``[tokens, heads, head_dim]`` of a sequence whose newest blocks
    are kept open in ``held``: what that rounds comes on top."""
    extra = error_bound(held, rows)
    if name not in BY_CHANNEL:
        return error_bound(name, rows) + extra * np.float32(name not in ("float32", held))
    bound = np.empty_like(rows)
    for start in range(0, len(rows), block_size):
        for first in range(start, min(start + block_size, len(rows)), GROUP):
            part = slice(first, min(first + GROUP, start + block_size))
            columns = np.moveaxis(rows[part].astype(np.float64), 0, -1)
            bound[part] = _of_groups(name, columns)
    # rounding first can widen a group by what it adds to both its ends
    return bound + extra * np.float32(1.25)


def _of_groups(name: str, groups: NDArray[np.float64]) -> NDArray[np.float64]:
    """The bound of each of float64 groups ``[..., values]``."""
    amax = np.abs(groups).max(axis=-1)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    affine = (high - low) / 15 * 0.5 + (high - low + np.abs(low)) * _HALF + 16 * _SUBNORMAL
    bound = {
        "q8": amax / 127 * 0.5,
        "q4": amax / 7 * 0.5,
        "q8_0": amax / 127 * 0.5 + amax * _HALF + 127 * _SUBNORMAL,
        "q4_0": amax / 8 + amax * _HALF + 8 * _SUBNORMAL,
        "q4_1": affine,
        "q4k": affine,
    }[name]
    per_group: NDArray[np.float64] = bound + amax * _SLACK + 1e-10
    return per_group


def relative_rmse(given: Floats, got: Floats) -> float:
    """Root of the mean squared error over the root of the mean square of what was given."""
    wide, error = given.astype(np.float64), got.astype(np.float64) - given
    return float(np.sqrt(np.mean(error**2) / np.mean(wide**2)))


def bound_rmse(bound: Floats, given: Floats) -> float:
    """The relative RMSE that would be reached if every value were at its bound."""
    wide = bound.astype(np.float64)
    return float(np.sqrt(np.mean(wide**2) / np.mean(given.astype(np.float64) ** 2)))

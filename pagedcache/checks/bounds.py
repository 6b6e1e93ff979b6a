"""How far a stored value may lie from the value given: one bound per format."""

from __future__ import annotations

import numpy as np

from .reference import GROUP, Floats

_HALF = 2.0**-11  # unit roundoff of a float16 scale
_SUBNORMAL = 2.0**-25  # and its error where the scale is subnormal, times the largest quant
_SLACK = 2.0**-20  # float32 arithmetic on the way, relative to the group's magnitude


def error_bound(name: str, rows: Floats) -> Floats:
    """Largest allowed ``|read back - given|`` for every value of float32 rows ``[..., head_dim]``.

    Float formats: the unit roundoff of the value. Grouped formats: half a step of the value's
    group, plus the rounding of a float16 scale; ``q4_0`` clips one side, which costs one step.
    """
    if name == "float32":
        return np.zeros_like(rows)
    if name in ("float16", "bfloat16"):
        roundoff, smallest = (2.0**-11, 2.0**-25) if name == "float16" else (2.0**-8, 2.0**-134)
        return (np.abs(rows) * roundoff + smallest).astype(np.float32)
    pad = -rows.shape[-1] % GROUP
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, pad)]).astype(np.float64)
    groups = padded.reshape(*rows.shape[:-1], -1, GROUP)
    amax = np.abs(groups).max(axis=-1)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    bound = {
        "q8": amax / 127 * 0.5,
        "q4": amax / 7 * 0.5,
        "q8_0": amax / 127 * 0.5 + amax * _HALF + 127 * _SUBNORMAL,
        "q4_0": amax / 8 + amax * _HALF + 8 * _SUBNORMAL,
        "q4_1": (high - low) / 15 * 0.5 + (high - low + np.abs(low)) * _HALF
        + 16 * _SUBNORMAL,
    }[name]
    per_value = np.repeat(bound + amax * _SLACK + 1e-10, GROUP, axis=-1)
    return per_value[..., : rows.shape[-1]].astype(np.float32)


def relative_rmse(given: Floats, got: Floats) -> float:
    """Root of the mean squared error over the root of the mean square of what was given."""
    wide, error = given.astype(np.float64), got.astype(np.float64) - given
    return float(np.sqrt(np.mean(error**2) / np.mean(wide**2)))


def bound_rmse(name: str, given: Floats) -> float:
    """The relative RMSE that would be reached if every value were at its bound."""
    bound = error_bound(name, given).astype(np.float64)
    return float(np.sqrt(np.mean(bound**2) / np.mean(given.astype(np.float64) ** 2)))

"""Storage formats: the rows of the C table (``include/pagedcache/formats.h``) as objects.

Nothing about a format is written down twice: names, sizes and packing come from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from pagedcache._native.arithmetic import format_table
from pagedcache.errors import FormatError, InvalidArgumentError, shown

_AXES = {0: "row", 1: "tokens"}
_PACKINGS = {0: "dense", 1: "planar", 2: "interleaved"}

#: What quantised formats do with NaN and Inf, and the native code of it.
NONFINITE_POLICIES = {"raise": 0, "saturate": 1}

#: The format that V takes where ``kv_format`` names one that is made for keys.
_V_PARTNERS = {"q4k": "q4_1"}

_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, init=False, eq=False)
class KVFormat:
    """How the values of a K or V row are stored. Get one with :func:`get_format`.

    There is one object per row of the table and no other: native code trusts its numbers. Copies
    and unpickled ones are that same object; making one raises :class:`FormatError`.

    ``code``: its number in native code. ``group_size``: values that share a scale (1 for float
    formats). ``quant_nbytes``, ``scale_nbytes``: bytes per group. ``group_axis``: ``"row"``, the
    group lies inside one (token, head) row, or ``"tokens"``, it is one channel of one head over
    up to 32 tokens of a block (then blocks are written whole, and are kept in another format
    until they are full). ``packing``: ``"dense"`` (values only), ``"planar"`` (all quants of a
    run of rows, then all scales) or ``"interleaved"`` (scale and quants side by side, as in
    ggml). ``open_format``: code of the format in which part-filled blocks are kept where that
    has to be another one, else -1; see ``CacheSpec.open_blocks``.
    """

    name: str
    code: int
    group_size: int
    quant_nbytes: int
    scale_nbytes: int
    group_axis: str
    packing: str
    open_format: int

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise FormatError("get_format(name)", "a KVFormat made by hand", "format")

    def __reduce__(self) -> tuple[Callable[[str], KVFormat], tuple[str]]:
        return _named, (self.name,)

    @property
    def group_nbytes(self) -> int:
        """Bytes of one group, scale included: 36 for q8, 20 for q4, 2 for float16."""
        return self.quant_nbytes + self.scale_nbytes

    @property
    def is_quantized(self) -> bool:
        """Whether values share scales and are stored as small integers."""
        return self.packing != "dense"

    @property
    def v_partner(self) -> KVFormat:
        """The format V has under ``kv_format=`` this one: q4_1 for q4k, which is made for keys
        (KIVI, Liu et al. 2024); the same for all others."""
        return FORMATS[_V_PARTNERS.get(self.name, self.name)]

    @property
    def default_open_format(self) -> KVFormat | None:
        """The format of part-filled blocks where that has to be another one: float16 for q4k."""
        return list(FORMATS.values())[self.open_format] if self.open_format >= 0 else None

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of a float format's values; uint8, raw bytes, for a quantised one."""
        return _dtype("uint8" if self.is_quantized else self.name)

    @property
    def bytes_per_value(self) -> float:
        """Nominal bytes per value, scale included, padding not: 1.125 for q8, 0.625 for q4.

        ``CacheSpec.bytes_per_value`` is the exact figure of a cache: with groups along the tokens
        it is this one where ``block_size`` is a multiple of 32 (q4k: 0.75 for blocks of 16).
        """
        return self.group_nbytes / self.group_size

    @property
    def reduction_vs_float32(self) -> float:
        """How many times smaller than float32, nominally: 3.56 for q8, 6.4 for q4."""
        return 4.0 / self.bytes_per_value

    @property
    def reduction_vs_16bit(self) -> float:
        """How many times smaller than float16, nominally: 1.78 for q8, 3.2 for q4."""
        return 2.0 / self.bytes_per_value

    def __repr__(self) -> str:
        return f"KVFormat({self.name!r})"

    def __str__(self) -> str:
        return self.name


@cache
def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # not a dtype of NumPy itself

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _named(name: str) -> KVFormat:
    """What a pickled format is loaded with."""
    return get_format(name)


def _read_table() -> Mapping[str, KVFormat]:
    table = {}
    for row in format_table():
        row["group_axis"] = _AXES[row["group_axis"]]
        row["packing"] = _PACKINGS[row["packing"]]
        made = object.__new__(KVFormat)
        for field, value in row.items():
            object.__setattr__(made, field, value)
        table[made.name] = made
    return MappingProxyType(table)


#: Every format by name, in the order of the table; read-only.
FORMATS: Mapping[str, KVFormat] = _read_table()


def get_format(format: str | KVFormat) -> KVFormat:
    """Return the format of that name.

    Also takes ``"fp32"``, ``"fp16"``, ``"bf16"``, a dtype of torch (``model.dtype``), and a
    :class:`KVFormat` of the table, which is returned as it is. Raises :class:`FormatError`, which
    names the choices, for anything else.
    """
    if type(format).__name__ == "dtype" and type(format).__module__ == "torch":
        format = str(format).removeprefix("torch.")
    if isinstance(format, str):
        found = FORMATS.get(_ALIASES.get(format, format))
        if found is not None:
            return found
    for row in FORMATS.values():
        if format is row:  # by identity: another object's numbers are not the table's
            return row
    got = "another KVFormat" if isinstance(format, KVFormat) else shown(format)
    raise FormatError(f"one of {', '.join(FORMATS)}", got, "format")


def get_policy(on_nonfinite: str) -> int:
    """Return the native code of ``"raise"`` or ``"saturate"``.

    Raises :class:`InvalidArgumentError` for anything else.
    """
    if isinstance(on_nonfinite, str) and on_nonfinite in NONFINITE_POLICIES:
        return NONFINITE_POLICIES[on_nonfinite]
    choices = " or ".join(map(repr, NONFINITE_POLICIES))
    raise InvalidArgumentError(f"on_nonfinite must be {choices}, got {shown(on_nonfinite)}")

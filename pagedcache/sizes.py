"""Sizes in bytes: from what people write ("2GiB") and back."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from pagedcache.errors import InvalidArgumentError, shown

_LETTERS = "KMGTPE"
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{c}b".lower(): 1000**i for i, c in enumerate(_LETTERS, 1)}
_UNITS |= {f"{c}ib".lower(): 1024**i for i, c in enumerate(_LETTERS, 1)}
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)")
_MAX_TEXT = 64  # longer than any honest size; keeps the conversion of digits cheap
_MAX_NBYTES = 2**63 - 1
_HELP = 'give an integer number of bytes or a text like "2GiB", "512 MiB" or "1.5GB"'


def parse_size(size: SupportsIndex | str) -> int:
    """Bytes of ``size``: an integer, or a text of a number and a unit.

    Units, in any case: none or ``B`` = 1 byte; ``KB MB GB TB PB EB`` = powers of 1000;
    ``KiB MiB GiB TiB PiB EiB`` = powers of 1024. A size is a budget, so a fraction of a byte
    is dropped: ``parse_size("1.5KiB") == 1536``, ``parse_size("0.3B") == 0``.

    Raises ``InvalidArgumentError`` for anything else: negative or beyond 2^63 - 1, a float, a
    bool, an unknown unit, or ``"2G"``, which is 2 GB to some and 2 GiB to others.
    """
    nbytes = _parse_text(size) if isinstance(size, str) else _as_index(size)
    if nbytes < 0:
        raise InvalidArgumentError(f"size {_short(size)} is negative; {_HELP}")
    if nbytes > _MAX_NBYTES:
        raise InvalidArgumentError(f"size {_short(size)} is more than 2^63 - 1 bytes; {_HELP}")
    return nbytes


def format_size(nbytes: SupportsIndex) -> str:
    """``nbytes`` for people, in powers of 1024, at most two decimals: ``"1.5 GiB"``, ``"36 B"``."""
    value = operator.index(nbytes)
    sign, magnitude = ("-", -value) if value < 0 else ("", value)
    power = 0
    # Compare the rounded figure, so that 1024^2 - 1 is "1 MiB" and not "1024 KiB".
    while power < len(_LETTERS) and round(magnitude / 1024**power, 2) >= 1024:
        power += 1
    unit = f"{_LETTERS[power - 1]}iB" if power else "B"
    text = f"{magnitude / 1024**power:.2f}".rstrip("0").rstrip(".")
    return f"{sign}{text} {unit}"


def _as_index(size: SupportsIndex) -> int:
    if not isinstance(size, bool):
        try:
            return operator.index(size)
        except TypeError:
            pass
    kind = type(size).__name__
    raise InvalidArgumentError(f"size {_short(size)} of type {kind} is not accepted; {_HELP}")


def _parse_text(text: str) -> int:
    stripped = text.strip()
    match = _PATTERN.fullmatch(stripped) if len(stripped) <= _MAX_TEXT else None
    if match is None:
        raise InvalidArgumentError(f"size {_short(text)} is not a size; {_HELP}")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        letter = unit.upper()
        ambiguous = len(letter) == 1 and letter in _LETTERS
        hint = f"write {letter}iB or {letter}B; " if ambiguous else ""
        raise InvalidArgumentError(f"size {text!r}: unknown unit {unit!r}; {hint}{_HELP}")
    return int(Fraction(number) * factor)


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"of {value.bit_length()} bits"  # repr of a huge int is slow or refused
    return shown(value)

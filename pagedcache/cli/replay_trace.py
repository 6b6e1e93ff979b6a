"""The Mooncake request-trace format: read it strictly, and turn a request into its tokens.

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and
``hash_ids``, one id for every 512 input tokens (the last may be part-filled). Equal ids mean an
equal prefix up to and including that block.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HASH_BLOCK = 512
MAX_HASH_ID = 2**32 // HASH_BLOCK - 1  # so that every token fits uint32
_OFFSETS = np.arange(HASH_BLOCK, dtype=np.uint32)
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(Exception):
    """A trace cannot be used; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the length of its prompt in tokens and the ids of its 512-token blocks."""

    input_length: int
    hash_ids: NDArray[np.uint32]

    def tokens(self) -> NDArray[np.uint32]:
        """The prompt, uint32 ``[input_length]``: token j of the block with id h is h·512 + j."""
        blocks = self.hash_ids[:, None] * np.uint32(HASH_BLOCK) + _OFFSETS
        return blocks.reshape(-1)[: self.input_length]


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` (or all) requests of a trace; raises :class:`TraceError`.

    Blank lines and a byte order mark at the start are no part of the trace.
    """
    requests: list[Request] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    requests.append(_parse(line))
                except ValueError as error:
                    raise TraceError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if not requests:
        raise TraceError(f"{path}: the trace has no requests")
    return requests


def _parse(line: bytes) -> Request:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not a request (nested too deeply)") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    missing = [name for name in _FIELDS if name not in record]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    _not_negative(record, "timestamp", (int, float))
    _not_negative(record, "output_length", (int,))
    length = _not_negative(record, "input_length", (int,))
    ids = record["hash_ids"]
    if not isinstance(ids, list):
        raise ValueError("hash_ids is not a list")
    wanted = -(-length // HASH_BLOCK)
    if len(ids) != wanted:
        raise ValueError(
            f"input_length {length} needs {wanted} hash_ids of {HASH_BLOCK} tokens each, "
            f"there are {len(ids)}"
        )
    return Request(length, np.fromiter(_checked_ids(ids), np.uint32, len(ids)))


def _not_negative(record: dict[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    value = record[name]
    if type(value) not in kinds:  # isinstance would take true for 1
        raise ValueError(f"{name} is {_short(value)}, not a number of the right kind")
    if not value >= 0:  # also refuses NaN
        raise ValueError(f"{name} is {_short(value)}; it cannot be negative")
    return value


def _checked_ids(ids: list[Any]) -> Iterator[int]:
    for value in ids:
        if type(value) is not int or not 0 <= value <= MAX_HASH_ID:
            raise ValueError(f"hash_ids has {_short(value)}; ids are 0…{MAX_HASH_ID}")
        yield value


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

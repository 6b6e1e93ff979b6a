"""A check: a named function that judges one behaviour, the same for ``selftest`` and pytest."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

DEVICE_CPU = "cpu"

#: Where the rows lie that a check gives to a cache: in the CPU's memory, or in the device's own.
HOST, DEVICE = "host", "device"


class SkipCheck(Exception):
    """Raised by a check that cannot run here; the message is the reason."""


class CheckFailed(AssertionError):
    """Raised by a check that found a wrong value; the message says which."""


@dataclass(frozen=True)
class Context:
    """What one run of a check works with. Random numbers depend on the seed and the name only."""

    name: str
    seed: int
    device: str
    k_format: str
    v_format: str
    layout: str
    rng: np.random.Generator = field(repr=False, compare=False)
    arrays: str = HOST


@dataclass(frozen=True)
class Check:
    """One check. ``function(context)`` raises what is wrong and may return a line to show."""

    name: str
    function: Callable[[Context], str | None]
    formats: tuple[str, ...] = ()
    layout: str = "HND"
    gives_rows: bool = False
    """Whether it gives rows to a cache, so that it runs once for each place they can lie in."""

    def arrays(self, device: str) -> tuple[str, ...]:
        """Where this check's rows can lie on ``device``."""
        return (HOST, DEVICE) if self.gives_rows and device != DEVICE_CPU else (HOST,)

    def run(self, seed: int = 0, device: str = DEVICE_CPU, arrays: str = HOST) -> str | None:
        """Run once; raises :class:`SkipCheck` or any other exception when it does not pass."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        k_format, v_format = (*self.formats, *self.formats, "float32", "float32")[:2]
        context = Context(self.name, seed, device, k_format, v_format, self.layout, rng, arrays)
        return self.function(context)


@dataclass(frozen=True)
class Outcome:
    """How one run of a check ended: ``status`` is "passed", "failed" or "skipped"."""

    name: str
    status: str
    detail: str = ""
    trace: str = ""


def judge(check: Check, seed: int, device: str) -> Outcome:
    """Run a check, for every place its rows can lie in, and turn what it raises into an outcome."""
    note: str | None = None
    for arrays in check.arrays(device):
        try:
            note = check.run(seed, device, arrays)
        except SkipCheck as skip:
            return Outcome(check.name, "skipped", str(skip))
        except Exception as error:
            # A crash inside a check is a failure of the check, never of the whole self-test.
            detail = f"{type(error).__name__}: {error}"
            if arrays != HOST:
                detail += f" (rows in the memory of {device})"
            return Outcome(check.name, "failed", detail, traceback.format_exc())
    return Outcome(check.name, "passed", note or "")


Maker = Callable[[Context], str | None]
LAYOUTS = ("HND", "NHD")


def per_format(function: Maker, formats: tuple[str, ...], area: str = "") -> Iterator[Check]:
    """One check per format and layout, K and V alike: ``area/format/layout``."""
    area = area or function.__name__
    for name in formats:
        for layout in LAYOUTS:
            yield Check(f"{area}/{name}/{layout}", function, (name, name), layout, True)


def alone(function: Maker, area: str = "") -> Iterator[Check]:
    """One check that depends on no format."""
    yield Check(area or function.__name__, function)

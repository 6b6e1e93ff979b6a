"""One judge for the library: a list of named checks, shared by ``selftest`` and the test suite.

Every check compares the library with a slow NumPy reference kept here, which shares no code
with what it judges. ``all_checks()`` is the list; ``judge(check, seed, device)`` runs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pagedcache.formats import FORMATS

from . import numbers, refusals, rows, sample, sharing, tables
from .reference import knows
from .registry import LAYOUTS, Check, Context, Outcome, SkipCheck, alone, judge, per_format

__all__ = ["Check", "Context", "Outcome", "SkipCheck", "all_checks", "judge"]

_PER_FORMAT = (
    rows.round_trip,
    rows.sources_and_outputs,
    rows.block_layout,
    rows.gather_ranges,
    rows.store_by_slots,
    rows.nonfinite,
    sharing.fork_copy_on_write,
    sharing.truncate_and_rewrite,
    sharing.prefix_hit,
    sharing.partial_reuse,
    sharing.defragment,
    refusals.errors_leave_state,
)
_MIXED = (
    ("q8", "q4"),
    ("float16", "q4_0"),
    ("q4_1", "bfloat16"),
    ("float32", "q8_0"),
    ("q4k", "q4_1"),
    ("q4k", "float32"),
)
_MIXED_OPERATIONS = (
    rows.round_trip,
    rows.block_layout,
    sharing.fork_copy_on_write,
    sharing.partial_reuse,
    sharing.defragment,
)


def _unknown(context: Context) -> None:
    raise SkipCheck(f"the reference has no rules for {context.k_format}: nothing of it is judged")


def _checks() -> Iterator[Check]:
    formats = tuple(name for name in FORMATS if knows(name))
    for name in set(FORMATS) - set(formats):
        yield Check(f"reference/{name}/", _unknown, (name,))
    quantised = tuple(name for name in formats if FORMATS[name].is_quantized)
    for function in (numbers.convert_16bit, numbers.prefix_hash):
        yield from alone(function)
    for function in (tables.block_pool, tables.prefix_index, tables.export_tables):
        yield from alone(function)
    for name in quantised:
        call = partial(numbers.flat_access, name=name)
        yield Check(f"flat_access/{name}/", call, (name,))
    for name in formats:
        for layout in LAYOUTS:
            call = partial(numbers.sizes, name=name)
            yield Check(f"sizes/{name}/{layout}", call, (name,), layout)
    for function in _PER_FORMAT:
        yield from per_format(function, formats)
    for function in _MIXED_OPERATIONS:
        for k_format, v_format in _MIXED:
            for layout in LAYOUTS:
                name = f"{function.__name__}/{k_format}+{v_format}/{layout}"
                yield Check(name, function, (k_format, v_format), layout, True)
    for name in formats:
        yield Check(f"real_sample/{name}/", sample.real_sample, (name, name), gives_rows=True)


def all_checks() -> list[Check]:
    """Every check, in a fixed order; names are unique."""
    return list(_checks())

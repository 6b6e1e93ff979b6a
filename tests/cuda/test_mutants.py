"""Every fault put into the kernels is found by their tests, in the build that is there for it.

Most of it runs where PAGEDCACHE_TEST_MUTANTS=1 (CI does), because it compiles and starts many
processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cuda_emulation import build, mutants, mutants_attention

MUTANTS = (*mutants.MUTANTS, *mutants_attention.MUTANTS)
VARIANTS = mutants_attention.VARIANTS

slow = pytest.mark.skipif(
    os.environ.get("PAGEDCACHE_TEST_MUTANTS") != "1", reason="runs with PAGEDCACHE_TEST_MUTANTS=1"
)


@pytest.fixture
def built(emulated: Any) -> Path:
    return Path(os.environ["PAGEDCACHE_CUDA_EMULATION"])


def up_to_date(built: Path, sanitizer: str | None) -> None:
    build.Builder(built).build([sanitizer or "plain"])


def process_of(mutant: mutants.Mutant, built: Path, folder: Path) -> Any:
    """The process that ran the mutant's tests on a library with it."""
    up_to_date(built, mutant.sanitizer)
    library = mutants.build_mutant(mutant, built, folder)
    return mutants.run_tests(built, library, mutant.sanitizer, mutant.order, mutant.tests)


@pytest.mark.parametrize("mutant", (*MUTANTS, *VARIANTS), ids=lambda mutant: mutant.name)
def test_its_place_is_there(mutant: mutants.Mutant) -> None:
    text = (build.KERNELS / mutant.file).read_text()
    assert mutants.changed_text(mutant, text) != text
    assert (build.KERNELS / mutant.source).suffix == ".cu"


@slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_found(mutant: mutants.Mutant, built: Path, tmp_path: Path) -> None:
    done = process_of(mutant, built, tmp_path)
    assert done.returncode in mutants.CAUGHT, done.stdout[-3000:]


@slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_what_makes_no_difference(variant: mutants.Mutant, built: Path, tmp_path: Path) -> None:
    done = process_of(variant, built, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


RUNS = sorted({(each.sanitizer or "", each.order, each.tests) for each in MUTANTS})


@slow
@pytest.mark.parametrize(("sanitizer", "order", "tests"), RUNS)
def test_without_a_fault_nothing_is_found(
    sanitizer: str, order: str, tests: str, built: Path
) -> None:
    up_to_date(built, sanitizer or None)
    done = mutants.run_tests(built, None, sanitizer or None, order, tests)
    assert done.returncode == 0, done.stdout[-3000:]

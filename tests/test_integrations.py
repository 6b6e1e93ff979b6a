"""Integrations where their libraries are absent, too old, or not asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagedcache.errors import MissingPackageError
from pagedcache.integrations.requirements import require


def run(code: str, *path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(p) for p in path]}\n{code}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT = """
import pagedcache, pagedcache.integrations
print([m for m in ("torch", "transformers") if m in sys.modules])
try:
    import pagedcache.integrations.transformers
except pagedcache.MissingPackageError as error:
    print(f"{error.package}|{error.least}|{error}")
"""


def test_the_package_of_integrations_loads_none_of_their_libraries() -> None:
    assert run(IMPORT).splitlines()[0] == "[]"


@pytest.mark.parametrize(
    ("torch", "transformers", "package", "words"),
    [
        ("raise ImportError('no torch here')", None, "torch", "no torch here"),
        ("__version__ = '2.1.0+cpu'", None, "torch", "version 2.1.0+cpu"),
        ("__version__ = '2.10.0'", "__version__ = '4.56.2'", "transformers", "version 4.56.2"),
        ("__version__ = '2.10.0'", "raise ImportError('not there')", "transformers", "not there"),
    ],
)
def test_what_is_missing_is_named(
    torch: str, transformers: str | None, package: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    if transformers is not None:
        (tmp_path / "transformers.py").write_text(transformers)
    name, least, message = run(IMPORT, tmp_path).splitlines()[1].split("|")
    assert name == package
    assert words in message
    assert f'pip install "{package}>={least}"' in message


def test_versions_are_compared_as_numbers() -> None:
    numpy = require("numpy", "2", "this test")
    assert numpy.__name__ == "numpy"
    require("numpy", "1.26.99", "this test")
    with pytest.raises(MissingPackageError, match="this test needs numpy 99.0 or newer"):
        require("numpy", "99.0", "this test")
    with pytest.raises(MissingPackageError) as error:
        require("pagedcache_no_such_module", "1", "this test")
    assert isinstance(error.value, ImportError)

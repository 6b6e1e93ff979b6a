"""Text between two marker comments of a Markdown file: ``<!-- name -->`` … ``<!-- /name -->``."""

from __future__ import annotations

import re
from pathlib import Path


def between(path: Path, name: str) -> str | None:
    """What stands there; None without the markers.

    Raises ``OSError`` or ``UnicodeDecodeError`` for a file that cannot be read as text.
    """
    found = _pattern(name).search(path.read_text(encoding="utf-8"))
    return None if found is None else found[0]


def put_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers; ``text`` ends with a line break.

    Raises ``ValueError`` for a file without them, and leaves it as it is.
    """
    if between(path, name) is None:
        raise ValueError(f"{path} has no <!-- {name} --> … <!-- /{name} --> markers")
    before = path.read_text(encoding="utf-8")
    path.write_text(_pattern(name).sub(lambda _: text, before), encoding="utf-8")


def _pattern(name: str) -> re.Pattern[str]:
    name = re.escape(name)
    return re.compile(rf"(?<=<!-- {name} -->\n)[\s\S]*?(?=<!-- /{name} -->)")

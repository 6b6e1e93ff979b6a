"""``python -m pagedcache`` is the ``pagedcache`` command."""

from __future__ import annotations

import sys

from pagedcache.cli import main

if __name__ == "__main__":
    sys.exit(main())

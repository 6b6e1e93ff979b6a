"""Bytes and slots: where K and V lie. Knows no sequence, no hash and no reference count."""

from __future__ import annotations

from pagedcache.storage.cpu import CpuStorage
from pagedcache.storage.placed import make_storage

__all__ = ["CpuStorage", "make_storage"]

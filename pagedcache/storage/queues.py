"""Streams by device, as callers with layers on several GPUs name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedcache.errors import DeviceError, shown
from pagedcache.placement import device_name


def by_device(streams: Mapping[Any, Any], gpus: Sequence[str]) -> dict[str, Any]:
    """The mapping with the names as ``cache.devices`` has them.

    Raises :class:`DeviceError` for a name that is none of ``gpus``.
    """
    named = {}
    for name, stream in streams.items():
        full = device_name(name, "stream")
        if full not in gpus:
            raise DeviceError(" or ".join(gpus), shown(name), "stream")
        named[full] = stream
    return named

"""Where layers live and how many blocks a budget of memory holds.

Every layer has a device, ``"cpu"`` or ``"cuda:N"``: one fact, kept here and nowhere else. Names
are only read here; whether a GPU can be used shows when storage is made on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcache.arguments import as_count, as_layer
from pagedcache.errors import DeviceError, InvalidArgumentError, shown
from pagedcache.sizes import format_size, parse_size
from pagedcache.spec import CacheSpec

#: Block ids are int32.
MAX_BLOCKS = 2**31 - 1

_CUDA = re.compile(r"cuda(?::([0-9]{1,4}))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of every layer of one cache."""

    devices: tuple[str, ...]

    def layer_device(self, layer: int) -> str:
        """Device of ``layer``; ``InvalidArgumentError`` when there is no such layer."""
        return self.devices[as_layer(layer, len(self.devices))]

    @property
    def is_on_gpu(self) -> bool:
        """Whether any layer lives on a GPU."""
        return any(device != "cpu" for device in self.devices)

    @property
    def distinct(self) -> tuple[str, ...]:
        """The devices in use, each once, in the order of their first layer."""
        return tuple(dict.fromkeys(self.devices))

    def __str__(self) -> str:
        return "+".join(self.distinct)


def resolve_placement(device: Any, num_layers: int) -> Placement:
    """The placement that ``device`` asks for: one name, or a list with one name per layer.

    ``"cuda"`` is ``"cuda:0"``. Raises ``DeviceError`` for a name that is no device,
    ``InvalidArgumentError`` for a list of the wrong length.
    """
    if isinstance(device, str) or not isinstance(device, Sequence):
        return Placement((device_name(device),) * num_layers)
    if len(device) != num_layers:
        raise InvalidArgumentError(
            f"device lists {len(device)} devices for {num_layers} layers; give one per layer, or "
            "one name for all"
        )
    return Placement(tuple(device_name(name) for name in device))


def device_name(name: Any, what: str = "device") -> str:
    """The full name of a device: ``"cpu"`` or ``"cuda:N"``; ``"cuda"`` is ``"cuda:0"``.

    Raises ``DeviceError`` for any other value.
    """
    if isinstance(name, str):
        if name == "cpu":
            return "cpu"
        found = _CUDA.fullmatch(name)
        if found:
            return f"cuda:{int(found[1] or 0)}"
    raise DeviceError('"cpu" or "cuda:N"', shown(name), what)


def check_open_blocks(spec: CacheSpec, has_bytes: bool, num_open_blocks: Any) -> int:
    """The caller's number of open slots; ``InvalidArgumentError`` where there can be none."""
    count = as_count(num_open_blocks, "num_open_blocks", most=MAX_BLOCKS)
    if not (spec.has_open_blocks and has_bytes):
        if count:
            raise InvalidArgumentError(
                f"num_open_blocks={count}: this cache keeps no open blocks; give CacheSpec "
                "open_blocks=, and no storage=None"
            )
    elif not count:
        raise InvalidArgumentError(
            "num_open_blocks=0: formats with open blocks need at least one to be written"
        )
    return count


def resolve_num_blocks(
    spec: CacheSpec,
    placement: Placement,
    num_blocks: Any,
    memory: Any,
    num_open: int | None = 0,
) -> tuple[int, int]:
    """The numbers of blocks that exactly one of ``num_blocks`` and ``memory`` asks for, and of
    open slots (``num_open``; None: the default for the number of blocks).

    ``memory``: bytes, a text like ``"2GiB"``, or a mapping with one of these per device, of
    which the smallest count rules. Raises ``InvalidArgumentError`` when both or none are given,
    a device of the placement is missing from the mapping or an unknown one is in it, or the
    memory does not hold one block.
    """
    if (num_blocks is None) == (memory is None):
        raise InvalidArgumentError("give exactly one of num_blocks and memory")
    if memory is None:
        most = MAX_BLOCKS - (num_open or 0)
        count = as_count(num_blocks, "num_blocks", least=1, most=most)
        return count, spec.default_open_blocks(count) if num_open is None else num_open
    budgets = _budgets(placement, memory)
    counts = []
    for device, nbytes in budgets.items():
        block_nbytes = device_block_nbytes(spec, placement, device)
        slot_nbytes = _layers_on(placement, device) * spec.open_block_nbytes // spec.num_layers
        counts.append(_most_blocks(spec, nbytes, block_nbytes, slot_nbytes, num_open))
        if counts[-1] < 1:
            opened = f" and {num_open or 1} open ones" if slot_nbytes and num_open != 0 else ""
            raise InvalidArgumentError(
                f"memory of {format_size(nbytes)} on {device} does not hold one block of "
                f"{block_nbytes:,} bytes{opened}; give more memory or make blocks smaller"
            )
    count = min(*counts, MAX_BLOCKS // 2)
    return count, spec.default_open_blocks(count) if num_open is None else num_open


def _most_blocks(
    spec: CacheSpec, nbytes: int, block: int, slot: int, num_open: int | None
) -> int:
    """The most blocks whose bytes, with those of their open slots, are within ``nbytes``."""
    if num_open is not None:
        return (nbytes - num_open * slot) // block
    low, high = 0, nbytes // block
    while low < high:  # the sum grows with the number of blocks
        middle = (low + high + 1) // 2
        if middle * block + spec.default_open_blocks(middle) * slot <= nbytes:
            low = middle
        else:
            high = middle - 1
    return low


def _budgets(placement: Placement, memory: Any) -> dict[str, int]:
    devices = placement.distinct
    if not isinstance(memory, Mapping):
        if len(devices) > 1:
            raise InvalidArgumentError(
                f"layers live on {', '.join(devices)}: give memory as a mapping with an entry for "
                "each"
            )
        memory = {devices[0]: memory}
    memory = {_as_named(name): nbytes for name, nbytes in memory.items()}
    if set(memory) != set(devices):
        raise InvalidArgumentError(
            f"memory names the devices {sorted(map(str, memory))}, the layers live on "
            f"{sorted(devices)}; give one entry for each device in use"
        )
    return {device: parse_size(memory[device]) for device in devices}


def _as_named(name: Any) -> Any:
    found = _CUDA.fullmatch(name) if isinstance(name, str) else None
    return f"cuda:{int(found[1] or 0)}" if found else name


def device_block_nbytes(spec: CacheSpec, placement: Placement, device: str) -> int:
    """Bytes of one block on ``device``: K and V of the layers that live there."""
    nbytes = spec.layer_block_nbytes("k") + spec.layer_block_nbytes("v")
    return _layers_on(placement, device) * nbytes


def _layers_on(placement: Placement, device: str) -> int:
    return sum(1 for name in placement.devices if name == device)

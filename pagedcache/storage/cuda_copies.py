"""Whole blocks on a CUDA device: copied, moved, filled; one launch for all layers stored alike.

Copies between blocks of one kind move bytes; those between sealed blocks and open slots quantise or
read back. A list of both is cut into stretches of one way, whose launches keep the list's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pagedcache._cuda.streams import Stream
from pagedcache.errors import DeviceError, PagedCacheError
from pagedcache.storage.checks import (
    check_copies,
    check_ids,
    check_lengths,
    check_open_targets,
    check_slots,
    check_whole_copies,
    independent,
)
from pagedcache.storage.cuda_base import CudaBase
from pagedcache.storage.cuda_sides import OPEN, SEALED, alike, between, runs
from pagedcache.storage.slabs import KINDS, Array


class CudaCopies(CudaBase):
    """See ``CudaStorage``, which is this with rows."""

    @property
    def _whole(self) -> bool:
        """Whether K or V has blocks that are written whole."""
        return any(self._formats[kind].group_axis == "tokens" for kind in KINDS)

    def _copy_blocks(self, src: Array, dst: Array, rows: Array, queue: Any) -> None:
        size = self.spec.block_size
        check_copies(src, dst, rows, self.num_places, size)
        if self._whole:
            check_whole_copies(dst, rows, self.num_blocks, size)
        if not rows.all():
            src, dst, rows = (values[rows > 0] for values in (src, dst, rows))
        if not len(src):
            return
        queue = queue or self.queue(None)
        with self._changing(queue, src, dst):
            for chosen, origin, target in self._ways(src, dst, self.num_blocks):
                pairs = src[chosen], dst[chosen], rows[chosen]
                if origin == target:
                    self._copy_alike(*pairs, origin, queue)
                else:
                    self._convert(pairs[0].astype(np.int64) * size,
                                  pairs[1].astype(np.int64) * size, pairs[2], origin, queue)

    def _copy_tokens(self, src: Array, dst: Array, queue: Any) -> None:
        size = self.spec.block_size
        check_lengths(len(src), len(dst), "src and dst")
        check_slots(src, self.num_places * size, 0)
        check_slots(dst, self.num_places * size, 0)
        if self._whole:
            check_open_targets(dst, self.num_blocks, size)
        if not len(src):
            return
        queue = queue or self.queue(None)
        with self._changing(queue, src // size, dst // size):
            for chosen, origin, target in self._ways(src, dst, self.num_blocks * size):
                source, goal = src[chosen], dst[chosen]
                if origin != target:
                    self._convert(source, goal, np.ones(len(source), np.int32), origin, queue)
                    continue
                n = len(source)
                with self._uploaded(np.concatenate([source, goal]), queue) as table:
                    for where in alike(self.sides, self.spec.num_layers, origin):
                        self.device.call(
                            "pc_cuda_copy_tokens", *where, table.address, table.address + 8 * n,
                            n, queue.handle,
                        )

    def _ways(self, src: Array, dst: Array, sealed: int) -> Iterator[tuple[Any, int, int]]:
        """(pairs, side of src, side of dst), to be done one after the other; below ``sealed`` a
        place (or slot) is a sealed one. Pairs between two sides have distinct targets."""
        if not self.num_open:
            yield slice(None), SEALED, SEALED
            return
        way = 2 * (src >= sealed) + (dst >= sealed)
        if independent(src, dst):
            for each in range(4):
                chosen = np.flatnonzero(way == each)
                if len(chosen):
                    yield chosen, each // 2, each % 2
            return
        for start, end in runs(way):
            origin, target = int(way[start]) // 2, int(way[start]) % 2
            if origin == target:
                yield slice(start, end), origin, target
                continue
            for first, last in _distinct_stretches(dst[start:end]):
                yield slice(start + first, start + last), origin, target

    def _copy_alike(self, src: Array, dst: Array, rows: Array, where: int, queue: Stream) -> None:
        """Bytes, between blocks of one kind."""
        n, in_order = len(src), not independent(src, dst)
        with self._uploaded(np.concatenate([src, dst, rows]), queue) as table:
            parts = [table.address + 4 * n * part for part in range(3)]
            for slabs in alike(self.sides, self.spec.num_layers, where):
                self.device.call(
                    "pc_cuda_copy_blocks", *slabs, *parts, n, in_order, queue.handle
                )

    def _convert(self, src: Array, dst: Array, rows: Array, origin: int, queue: Stream) -> None:
        """Sealed or reopened: ``rows[i]`` token rows from slot to slot; distinct targets."""
        n, most = len(src), int(rows.max())
        slots = np.concatenate([src, dst]).astype(np.int64)
        packed = np.concatenate([slots.view(np.int32), rows])
        with self._uploaded(packed, queue) as table:
            parts = [table.address + 8 * n * part for part in range(3)]
            for sides in between(self.sides, self.spec.num_layers, origin, 1 - origin):
                self.device.call("pc_cuda_convert", *sides, *parts, n, most, queue.handle)

    def _move_blocks(self, src: Array, dst: Array, queue: Any) -> None:
        check_lengths(len(src), len(dst), "src and dst")
        check_ids(src, self.num_blocks, -1)
        check_ids(dst, self.num_blocks, -1)
        if not len(src):
            return
        queue = queue or self.queue(None)
        moves = np.stack([src, dst], axis=1)
        with self._changing(queue, src[src >= 0], np.concatenate([src, dst])), self._uploaded(
            np.concatenate([moves, moves[::-1, ::-1]]).reshape(-1), queue
        ) as table:
            done = []
            try:
                for where in alike(self.sides, self.spec.num_layers, SEALED):
                    self._launch_moves(where, table.address, len(src), queue)
                    done.append(where)
            except PagedCacheError as error:
                # K moved and V did not: back, so that a refused operation changes nothing.
                try:
                    for where in done:
                        self._launch_moves(where, table.address + 8 * len(src), len(src), queue)
                except PagedCacheError:  # blocks lie where nobody can name them
                    self.device.broken = DeviceError("moves to be undone", str(error), "move")
                raise

    def _launch_moves(
        self, where: tuple[Any, int, int], moves: int, count: int, queue: Stream
    ) -> None:
        self.device.call("pc_cuda_move_blocks", *where, moves, count, queue.handle)

    def fill_blocks(self, places: Array, byte: int, queue: Any = None) -> None:
        """Set every byte of whole blocks in every layer, K and V (zero or poison)."""
        self._open()
        check_ids(places, self.num_places)
        if not len(places):
            return
        queue = queue or self.queue(None)
        opened = places[places >= self.num_blocks]
        sealed = places[places < self.num_blocks] if len(opened) else places
        with self._changing(queue, places[:0], places):
            for where, listed in ((SEALED, sealed), (OPEN, opened)):
                if not len(listed):
                    continue
                with self._uploaded(listed.astype(np.int32), queue) as table:
                    for slabs in alike(self.sides, self.spec.num_layers, where):
                        self.device.call(
                            "pc_cuda_fill_blocks", *slabs, table.address, len(listed), byte,
                            queue.handle,
                        )


def _distinct_stretches(targets: Array) -> Iterator[tuple[int, int]]:
    """(start, end) of stretches without a repeated value."""
    start, seen = 0, set[int]()
    for index, target in enumerate(targets.tolist()):
        if target in seen:
            yield start, index
            start, seen = index, set()
        seen.add(target)
    yield start, len(targets)

"""Whole blocks on a CUDA device: copied, moved, filled; one launch for all layers stored alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcache._cuda.streams import Stream
from pagedcache.errors import DeviceError, PagedCacheError
from pagedcache.storage.checks import (
    check_copies,
    check_ids,
    check_lengths,
    check_slots,
    independent,
)
from pagedcache.storage.cuda_base import CudaBase
from pagedcache.storage.slabs import Array


class CudaCopies(CudaBase):
    """See ``CudaStorage``, which is this with rows."""

    def _copy_blocks(self, src: Array, dst: Array, rows: Array, queue: Any) -> None:
        check_copies(src, dst, rows, self.num_blocks, self.spec.block_size)
        if not len(src):
            return
        queue, n = queue or self.queue(None), len(src)
        in_order = not independent(src, dst)
        with self._changing(queue, src, dst), self._uploaded(
            np.concatenate([src, dst, rows]), queue
        ) as table:
            places = [table.address + 4 * n * part for part in range(3)]
            for geometry, slabs, count in self._geometries():
                self.device.call(
                    "pc_cuda_copy_blocks", geometry, slabs, count, *places, n, in_order,
                    queue.handle,
                )

    def _copy_tokens(self, src: Array, dst: Array, queue: Any) -> None:
        size = self.spec.block_size
        check_lengths(len(src), len(dst), "src and dst")
        check_slots(src, self.num_blocks * size, 0)
        check_slots(dst, self.num_blocks * size, 0)
        if not len(src):
            return
        queue, n = queue or self.queue(None), len(src)
        with self._changing(queue, src // size, dst // size), self._uploaded(
            np.concatenate([src, dst]), queue
        ) as table:
            for geometry, slabs, count in self._geometries():
                self.device.call(
                    "pc_cuda_copy_tokens", geometry, slabs, count, table.address,
                    table.address + 8 * n, n, queue.handle,
                )

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
                for where in self._geometries():
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

    def fill_blocks(self, block_ids: Array, byte: int, queue: Any = None) -> None:
        """Set every byte of whole blocks in every layer, K and V (zero or poison)."""
        self._open()
        check_ids(block_ids, self.num_blocks)
        if not len(block_ids):
            return
        queue = queue or self.queue(None)
        with self._changing(queue, block_ids[:0], block_ids), self._uploaded(
            block_ids.astype(np.int32), queue
        ) as table:
            for where in self._geometries():
                self.device.call(
                    "pc_cuda_fill_blocks", *where, table.address, len(block_ids), byte,
                    queue.handle,
                )

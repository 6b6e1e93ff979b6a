"""Queries, results and sinks of attention on a CUDA device: checked, or made."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.attention import MOST_HEAD_DIM
from pagedcache._cuda.exchange import as_device_array, check_pointer
from pagedcache._cuda.streams import Stream
from pagedcache.arguments import as_layer
from pagedcache.arrays import overlap, row_format
from pagedcache.errors import DeviceError, FormatError, ShapeError, StorageMemoryError
from pagedcache.foreign import is_tensor
from pagedcache.storage.attention import AttentionArrays, num_q_heads
from pagedcache.storage.cpu import filled, host_out
from pagedcache.storage.cpu_attention import check_arrays, check_sinks
from pagedcache.storage.cuda_rows import device_out
from pagedcache.storage.cuda_store import CudaStores
from pagedcache.storage.shadows import shadow
from pagedcache.storage.slabs import Array, covers


class CudaAttentionArrays(CudaStores):
    """See ``CudaAttention``, which is this with the call itself."""

    def attention_arrays(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        sinks: Any = None,
        return_lse: bool = False,
        queue: Any = None,
    ) -> AttentionArrays:
        """See :class:`Storage`. ``q`` and ``out`` lie both on this device or both on the host;
        ``sinks`` on either: on the device as contiguous float32, where nobody looks for NaN."""
        self._open()
        as_layer(layer, self.spec.num_layers)
        queue = queue or self.queue(None)
        if self.spec.head_dim > MOST_HEAD_DIM:
            expected = f"a head_dim of at most {MOST_HEAD_DIM} for attention on a GPU"
            raise ShapeError(expected, self.spec.head_dim, "spec")
        rows = as_device_array(q, "q", self.device)
        target = rows if out is None else as_device_array(out, "out", self.device)
        own = None if sinks is None else as_device_array(sinks, "sinks", self.device)
        at = ["the host" if array is None else array.device for array in (rows, target)]
        if at[0] != at[1] or at[0] not in ("the host", self.device.name):
            raise DeviceError(
                f"q and out on {self.device.name} (or both on the host)",
                f"q on {at[0]}, out on {at[1]}",
                "q, out",
            )
        if rows is None:
            given = sinks if own is None else None
            arrays = check_arrays(self.spec, q, out, given, return_lse, filled, _host)
        else:
            arrays = self._on_this_device(q, rows, out, target, return_lse, queue)
            if own is None:
                arrays = arrays._replace(sinks=check_sinks(sinks, arrays.q.shape[1]))
        if own is not None:
            self._check_sinks(own, arrays.q.shape[1])
            self._follow(queue, own)
            arrays = arrays._replace(sinks=own)
        return arrays

    def _on_this_device(
        self, q: Any, rows: DeviceArray, out: Any, target: Any, return_lse: bool, queue: Stream
    ) -> AttentionArrays:
        fmt = row_format(rows.dtype, "q")
        shape = (rows.shape[0], num_q_heads(self.spec, rows.shape), self.spec.head_dim)
        check_pointer(rows, self.device)
        if out is None:
            out, target = self._result(q, rows.shape, rows.dtype, queue)
        else:
            device_out(target, "out", self.device, rows.shape, fmt)
            outline = shadow(target)
            if overlap(outline, shadow(rows)):
                raise ShapeError("an out that shares no memory with q", "overlapping arrays", "out")
            if covers(self._outlines(), outline):
                raise ShapeError("memory apart from the slabs", "an array over them", "out")
        lse = result_lse = None
        if return_lse:
            result_lse, lse = self._result(q, shape[:2], np.dtype(np.float32), queue)
        for array in (rows, target):
            self._follow(queue, array)
        return AttentionArrays(
            _by_head(rows, shape), _by_head(target, shape), lse, None, out, result_lse
        )

    def _result(
        self, q: Any, shape: tuple[int, ...], dtype: np.dtype[Any], queue: Stream
    ) -> tuple[Any, DeviceArray]:
        """A new array for results, as the caller gets it and as it is written to."""
        what = f"the result of {list(shape)}"
        if not is_tensor(q):
            made = self.new_array(shape, dtype, what)
            made.stream = queue
            return made, made
        torch = sys.modules["torch"]
        try:
            tensor = torch.empty(
                shape,
                dtype=torch.float32 if dtype == np.float32 else q.dtype,
                device=q.device,
            )
        except RuntimeError:  # as torch calls it, too, when it has no memory
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            raise StorageMemoryError(nbytes, what) from None
        array = as_device_array(tensor, "out", self.device)
        assert array is not None
        self._follow(queue, array)  # the memory may have been another tensor's
        return tensor, array

    def _check_sinks(self, sinks: DeviceArray, heads: int) -> None:
        if sinks.device != self.device.name:
            raise DeviceError(f"memory of {self.device.name}", f"memory of {sinks.device}", "sinks")
        if sinks.dtype != np.float32:
            raise FormatError("float32", sinks.dtype, "sinks")
        if sinks.shape != (heads,) or not sinks.is_contiguous:
            got = f"shape {list(sinks.shape)}, strides {list(sinks.strides)}"
            raise ShapeError(f"[{heads}], contiguous", got, "sinks")
        check_pointer(sinks, self.device)

    def _lead(self, queue: Stream, result: Any) -> None:
        """Have the stream of a tensor's library come after ``queue``, of which it knows nothing."""
        array = as_device_array(result, "out", self.device) if is_tensor(result) else None
        if array is not None and array.stream is not None:
            self.order.follow(self.streams.resolve(array.stream), queue)


def _host(shape: tuple[int, ...], fmt: Any) -> Array:
    return host_out(None, "the result", shape, fmt)


def _by_head(array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """``[n, heads, dim]`` over an array of that shape, or of ``[n, heads * dim]``."""
    if array.ndim == 3:
        return array
    step, value = array.strides
    return array.with_layout(shape, (step, value * shape[2], value))

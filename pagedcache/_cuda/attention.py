"""What ``pc_cuda_attend()`` takes, as cuda/abi_attention.h declares it."""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int32, c_int64, c_size_t, c_void_p, sizeof

import numpy as np

from pagedcache._cuda.library import Library

#: Rows (queries times query heads of a KV head) of one item, at most.
ROWS = 8
#: The kernels keep results in registers: no larger head_dim fits.
MOST_HEAD_DIM = 256


class Slab(Structure):
    """``pc_cuda_slab``: K or V of a layer, sealed or open."""

    _fields_ = [("geometry", c_void_p), ("slab", c_void_p), ("block_stride", c_int64)]


class Call(Structure):
    """``pc_cuda_attention``: one call. Addresses are of device memory, but for geometries."""

    _fields_ = [
        ("k", Slab),
        ("v", Slab),
        ("open_k", Slab),
        ("open_v", Slab),
        ("num_blocks", c_int64),
        ("places", c_void_p),
        ("k_pointers", c_void_p),
        ("v_pointers", c_void_p),
        ("items", c_void_p),
        ("num_items", c_int64),
        ("group", c_int64),
        ("q", c_void_p),
        ("q_strides", c_int64 * 3),
        ("out", c_void_p),
        ("out_strides", c_int64 * 3),
        ("window", c_int64),
        ("lse", c_void_p),
        ("sinks", c_void_p),
        ("partials", c_void_p),
        ("tickets", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("dtype", c_int32),
        ("causal", c_int32),
    ]


#: ``pc_cuda_attention_item``: some rows and keys of one sequence.
ITEM = np.dtype(
    [
        ("table", np.int64),
        ("position", np.int64),
        ("token", np.int64),
        ("begin", np.int32),
        ("end", np.int32),
        ("row", np.int32),
        ("rows", np.int32),
        ("parts", np.int32),
        ("first_part", np.int32),
        ("part", np.int32),
        ("ticket", np.int32),
    ]
)


def partial_nbytes(library: Library, head_dim: int) -> int:
    """Bytes that one part of a split needs for each KV head.

    Also sees to it that library and package agree on the structures above.
    """
    sizes = (c_size_t * 3)()
    library.pc_cuda_attend_sizes(head_dim, byref(sizes))
    assert list(sizes[:2]) == [sizeof(Call), ITEM.itemsize], "another cuda/abi_attention.h"
    return int(sizes[2])

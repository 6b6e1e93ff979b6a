from typing import Any

import numpy as np

from pagedcache._native.rows import Slabs

_Array = np.ndarray[Any, Any]

def attend(
    k: Slabs,
    v: Slabs,
    layer: int,
    q: _Array,
    out: _Array,
    dtype: int,
    places: _Array,
    indptr: _Array,
    lengths: _Array,
    q_lens: _Array,
    starts: _Array,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    sinks: _Array | None,
    lse: _Array | None,
    isa: int,
    threads: int,
) -> None: ...

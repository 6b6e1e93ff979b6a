from typing import Any

import numpy as np
from numpy.typing import NDArray

def format_table() -> list[dict[str, Any]]: ...
def status_table() -> dict[int, tuple[str, str]]: ...
def encode(
    code: int, src: NDArray[np.float32], data: NDArray[np.uint8], scale_offset: int, policy: int
) -> int: ...
def decode(
    code: int, data: NDArray[np.uint8], scale_offset: int, dst: NDArray[np.float32]
) -> None: ...
def flat_read(
    code: int,
    data: NDArray[np.uint8],
    scale_offset: int,
    offset: int,
    dst: NDArray[np.float32],
) -> None: ...
def flat_write(
    code: int,
    data: NDArray[np.uint8],
    scale_offset: int,
    num_values: int,
    offset: int,
    src: NDArray[np.float32],
    policy: int,
) -> int: ...
def block_geometry(
    code: int, layout: int, num_heads: int, block_size: int, head_dim: int
) -> dict[str, int]: ...
def row_address(
    code: int,
    layout: int,
    num_heads: int,
    block_size: int,
    head_dim: int,
    block_stride_nbytes: int,
    block: int,
    head: int,
    offset: int,
) -> tuple[int, int]: ...

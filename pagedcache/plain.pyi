from typing import Any

class PlainArrays:
    num_layers: int
    num_heads: int
    head_dim: int
    def __init__(self, storage: Any) -> None: ...

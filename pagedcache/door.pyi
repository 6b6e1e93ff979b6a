from typing import Any

class Door:
    def __init__(self, ledger: Any, storage: Any, code: int) -> None: ...
    def store(self, layer: Any, k: Any, v: Any, mapping: Any) -> bool: ...
    def gather(
        self, state: Any, layer: Any, start: Any, stop: Any, out: Any
    ) -> tuple[Any, Any] | None: ...
    def attend(
        self,
        cache: Any,
        layer: Any,
        q: Any,
        seqs: Any,
        q_lens: Any,
        lengths: Any,
        out: Any,
        scale: Any,
        causal: Any,
        window: Any,
        soft_cap: Any,
    ) -> Any: ...

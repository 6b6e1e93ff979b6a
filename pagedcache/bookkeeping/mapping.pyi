from typing import Any

import numpy as np
import numpy.typing as npt

class SlotMapping:
    slots: npt.NDArray[np.int64]
    place_slots: npt.NDArray[np.int64]
    epoch: int
    def __len__(self) -> int: ...
    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]: ...

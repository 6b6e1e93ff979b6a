"""As much of torch as the README's example uses, over device arrays: for machines on which torch
sees no GPU, the emulation above all. A module to put into ``sys.modules``."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache.checks.devices import upload

_DTYPES = {
    "torch.bfloat16": np.dtype(ml_dtypes.bfloat16),
    "torch.uint16": np.dtype(np.uint16),
    "torch.float32": np.dtype(np.float32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Tensor:
    """A CUDA tensor, as far as it is asked."""

    layout = "torch.strided"
    requires_grad = False

    def __init__(self, array: DeviceArray) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, _NAMES[array.dtype]
        self.device = SimpleNamespace(type="cuda", index=array.gpu.ordinal)

    def is_neg(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.array.address

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def view(self, dtype: str) -> Tensor:
        return Tensor(self.array.view(_DTYPES[dtype]))

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key])

    def __len__(self) -> int:
        return self.shape[0]

    def numpy(self) -> np.ndarray:
        return np.asarray(self.array)


class TorchStandIn(ModuleType):
    """``torch`` on one device of ours. ``close()`` destroys its streams."""

    def __init__(self, device: Any) -> None:
        super().__init__("torch")
        self._device, self._streams = device, list[Any]()
        self.Tensor, self.strided = Tensor, Tensor.layout
        self.bfloat16, self.float32 = "torch.bfloat16", "torch.float32"
        self.cuda = SimpleNamespace(Stream=self._stream, current_stream=lambda device: _DEFAULT)

    def _stream(self) -> Any:
        with self._device.current():
            made = self._device.pycuda.Stream()
        self._streams.append(made)
        return SimpleNamespace(cuda_stream=made.handle, device_index=self._device.ordinal)

    def randn(self, *shape: int, device: str, dtype: str) -> Tensor:
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        return Tensor(upload(values.astype(_DTYPES[dtype]), device))

    def empty(self, shape: tuple[int, ...], *, dtype: str, device: Any) -> Tensor:
        assert (device.type, device.index) == ("cuda", self._device.ordinal)
        return Tensor(upload(np.zeros(shape, _DTYPES[dtype]), self._device.name))

    def from_dlpack(self, x: Any) -> Tensor:
        assert x.__dlpack_device__() == (2, self._device.ordinal)
        capsule = x.__dlpack__(stream=1, max_version=(1, 0))  # the current stream, the default one
        assert type(capsule).__name__ == "PyCapsule"
        return Tensor(x.with_owner((x.owner, capsule)))

    def close(self) -> None:
        with self._device.current():
            self._streams.clear()


_DEFAULT = SimpleNamespace(cuda_stream=0)

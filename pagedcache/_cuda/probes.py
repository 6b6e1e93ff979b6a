"""What CUDA needs and this machine may lack: every probe says what is missing and the cure."""

from __future__ import annotations

from functools import partial
from typing import Any

from pagedcache._cuda.libcuda import open_driver
from pagedcache._cuda.library import load
from pagedcache.errors import CudaUnavailableError

SPAWN = 'CUDA works in no forked child; start workers with multiprocessing\'s method "spawn"'
FORKED = f"this process was forked after CUDA was used: {SPAWN}"

_NOT_INITIALISED = 3  # what a driver that was used before a fork answers to the child


def problem(ordinal: int = 0) -> str | None:
    """Why ``cuda:<ordinal>`` cannot be used: all that is missing and how to get it; None if usable.

    Four things are needed: PyCUDA, the NVIDIA driver, the GPU itself and the compiled kernels.
    """
    parts = []
    for probe in (import_pycuda, open_driver, partial(_need_gpu, ordinal), load):
        try:
            probe()
        except CudaUnavailableError as error:
            if error.reason not in parts:
                parts.append(error.reason)
    return "; ".join(parts) if parts else _mismatch()


def _mismatch() -> str | None:
    """Why driver and kernels, which are there, do not work together; None if they do."""
    code, _ = load().device_count()
    if code != 35:
        return None
    return (
        "the NVIDIA driver is too old for the compiled kernels: install a newer one, or build "
        "pagedcache by a CUDA toolkit that it supports (PAGEDCACHE_CUDA=on pip install .)"
    )


def import_pycuda() -> Any:
    """PyCUDA's ``driver`` module."""
    try:
        import pycuda.driver
    except Exception as error:  # whatever its parts do when they do not fit
        missing = getattr(error, "name", None) in ("pycuda", "pycuda.driver")
        if "libcuda" in str(error):  # PyCUDA is there, what it links to is not
            open_driver()
        what = "PyCUDA is not installed" if missing else f"PyCUDA cannot be loaded ({error})"
        raise CudaUnavailableError(
            f"{what}: pip install 'pagedcache[cuda]' (PyCUDA is compiled then: it needs the CUDA "
            "toolkit)"
        ) from None
    return pycuda.driver


def _need_gpu(ordinal: int) -> None:
    driver = open_driver()
    code, count = driver.device_count()
    if code == _NOT_INITIALISED:
        raise CudaUnavailableError(FORKED)
    if code not in (0, 100):
        raise CudaUnavailableError(
            f"the NVIDIA driver does not start ({driver.error_name(code)}: "
            f"{driver.error_text(code)}): see nvidia-smi"
        )
    if not count:
        raise CudaUnavailableError(
            "there is no GPU (the driver finds none): see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if ordinal >= count:
        names = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise CudaUnavailableError(
            f"there is no cuda:{ordinal}: the driver finds {count} GPU{'s' * (count > 1)} "
            f"({names}); see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )

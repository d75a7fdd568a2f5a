"""The device without torch: whether it is there, its name, and its memory while other processes use it."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define


def cuda_devices() -> int:
    """Number of GPUs that CUDA's driver sees. Makes no context on any of them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    seen = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if seen else 0


def name_and_driver(device: str) -> tuple[str, str]:
    """Name of the first GPU and version of its driver; `CPU` and nothing without one."""
    if device != "cuda":
        return "CPU", ""
    nvml = _nvml()
    if nvml is None:
        import torch

        return torch.cuda.get_device_name(), ""
    return nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)), nvml.nvmlSystemGetDriverVersion()


@define
class DeviceUse:
    """What was seen of the first GPU while all processes used it."""

    peak_bytes: int | None = None
    """Largest memory in use, CUDA's own included. None: it was not seen."""

    busy: float | None = None
    """Mean share of time in which a kernel ran, as the driver counts it."""


@contextmanager
def watched(device: str, every: float = 0.05) -> Iterator[DeviceUse]:
    """Looks at the GPU every few milliseconds while the block runs; needs the package nvidia-ml-py."""
    use, ended, shares = DeviceUse(), threading.Event(), list[float]()
    nvml = _nvml() if device == "cuda" else None
    if nvml is None:
        yield use
        return
    handle = nvml.nvmlDeviceGetHandleByIndex(0)

    def look() -> None:
        while not ended.wait(every):
            use.peak_bytes = max(use.peak_bytes or 0, nvml.nvmlDeviceGetMemoryInfo(handle).used)
            shares.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    try:
        yield use
    finally:
        ended.set()
        looks.join()
        use.busy = sum(shares) / len(shares) if shares else None


def _nvml() -> Any:
    """The package pynvml, ready to ask; None without it."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    pynvml.nvmlInit()
    return pynvml

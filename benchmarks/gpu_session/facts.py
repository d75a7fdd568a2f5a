"""What the device can do at most: one large matrix product, and copies of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from benchmarks.gpu_session.shapes import dtype_of, finish
from benchmarks.gpu_session.stages import Job, Parts, Result


def facts(job: Job) -> Parts:
    """Rates of the device."""
    device = torch.device(job.device)
    return [("matrix product", lambda: _product(device)), ("copies", lambda: _copies(device))]


@lru_cache
def matmul_rate(device: torch.device) -> float:
    """Operations per second of a product of square matrices in bfloat16 (float32 on a CPU), best of ten."""
    size = 8192 if device.type == "cuda" else 256
    one, other = (torch.randn(size, size, device=device).to(dtype_of(device)) for _ in range(2))
    return 2.0 * size**3 / _best(device, lambda: one @ other)


def _product(device: torch.device) -> Result:
    rate = matmul_rate(device)
    return {"flops": rate, "summary": f"{rate / 1e12:.2f} TFLOP/s"}


def _copies(device: torch.device) -> Result:
    count = 2**28 if device.type == "cuda" else 2**20
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    on_host = torch.empty(count, pin_memory=device.type == "cuda")
    within = 2 * source.nbytes / _best(device, lambda: target.copy_(source))
    to_host = source.nbytes / _best(device, lambda: on_host.copy_(source, non_blocking=True))
    summary = f"{within / 1e9:.0f} GB/s read and written, {to_host / 1e9:.0f} GB/s to the host"
    return {"bytes_per_second": within, "to_host_bytes_per_second": to_host, "summary": summary}


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """Fewest seconds of ten."""
    seconds = []
    for _ in range(10):
        finish(device)
        start = time.perf_counter()
        work()
        finish(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)

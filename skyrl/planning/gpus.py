"""Facts about kinds of GPU, as published by their manufacturers: memory, and the speeds that bound a step."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

MIB = 2**20


@frozen(kw_only=True)
class GpuKind:
    """One kind of GPU."""

    memory: int
    """Bytes that the driver reports."""

    flops: float
    """Operations per second in dense bfloat16 matrix products, without sparsity."""

    bandwidth: float
    """Bytes per second from and to GPU memory."""

    link: float
    """Bytes per second from one GPU to the others in the same machine, in one direction."""

    source: str
    """Address of the data sheet."""


GPU_KINDS: Mapping[str, GpuKind] = {
    "H100-80": GpuKind(
        memory=81559 * MIB,
        flops=989e12,
        bandwidth=3.35e12,
        link=450e9,
        source="https://www.nvidia.com/en-us/data-center/h100/",
    ),
    "H200-141": GpuKind(
        memory=143771 * MIB,
        flops=989e12,
        bandwidth=4.8e12,
        link=450e9,
        source="https://www.nvidia.com/en-us/data-center/h200/",
    ),
    "A100-40": GpuKind(
        memory=40536 * MIB,
        flops=312e12,
        bandwidth=1.555e12,
        link=300e9,
        source="https://www.nvidia.com/en-us/data-center/a100/",
    ),
    "A100-80": GpuKind(
        memory=81251 * MIB,
        flops=312e12,
        bandwidth=2.039e12,
        link=300e9,
        source="https://www.nvidia.com/en-us/data-center/a100/",
    ),
    "L40S": GpuKind(
        memory=46068 * MIB,
        flops=362e12,
        bandwidth=864e9,
        link=32e9,
        source="https://www.nvidia.com/en-us/data-center/l40s/",
    ),
}
"""Name of a kind, as in `trainer.placement.gpu_kind` -> its facts. Memory is the total that nvidia-smi shows."""

NODE_LINK = 50e9
"""Bytes per second from one GPU to another machine: a 400 Gbit/s adapter for each GPU, as in NVIDIA's DGX H100."""

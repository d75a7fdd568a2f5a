"""The norm of a gradient whose parts are on different meshes of ranks, and clipping by it.

A parameter that is cut by tensor parallelism is on a mesh of two dimensions. Any other parameter is on the mesh of the
ranks that shard it, and is the same on all ranks of the other dimension. torch takes gradients of one mesh at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from skyrl.learners.ranks import EXPERT
from skyrl.models.parallel.expert_parallel import local_part

CLIP_EPS = 1e-6
"""Number that torch adds to the norm before it divides by it."""


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The mesh of ranks that a tensor is distributed over; None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the joint L2 norm of all gradients to `max_norm`. Returns the norm before, with each number counted once.

    If that norm is not finite, gradients stay as they are. Collective.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(mesh_of(parameter), []).append(parameter)
    norms = [_norm([item.grad for item in group if item.grad is not None]) for group in groups.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    result = float(norm.item())  # here the host waits for the gradient, once
    if math.isfinite(result) and result + CLIP_EPS > max_norm:  # else torch would multiply every gradient by 1
        for group in groups.values():
            clip_grads_with_norm_(group, max_norm, norm)
    return result


def _norm(gradients: list[Tensor]) -> Tensor:
    norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def sum_over(group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
    """Replace each gradient by its sum over the group, for parameters that every rank has whole and of whose gradient
    each rank has one summand. Collective.
    """
    own = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not own:
        return
    together = torch.cat([entry.flatten() for entry in own])
    dist.all_reduce(together, group=group)
    for item, summed in zip(own, together.split([element.numel() for element in own]), strict=True):
        item.copy_(summed.view(item.shape))


def is_on_experts(parameter: Tensor) -> bool:
    """Whether the parameter belongs to experts that are spread over ranks."""
    mesh = mesh_of(parameter)
    return mesh is not None and EXPERT in (mesh.mesh_dim_names or ())


def divide(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Divide the gradient of each parameter, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).div_(factor)

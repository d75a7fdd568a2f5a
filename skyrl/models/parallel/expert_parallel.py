"""Expert parallelism (GShard, arXiv:2006.16668): each rank holds some of the experts of every layer.

Each rank routes the tokens of its own rows. One all-to-all sends a copy of every token to the ranks that hold its
experts, a second one returns the outputs, and the sending rank sums them with the router's weights. No token is
dropped. Attention, norms and routers are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from skyrl.errors import ModelError
from skyrl.models.files.naming import is_experts
from skyrl.planning.batches import uneven_parts


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold all experts of a layer, in order of layers."""
    for name in dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters() if is_experts(name)):
        yield model.get_submodule(name)


def refuse_unspreadable(model: nn.Module, size: int, ranks: int, field: str) -> None:
    """Raises `ModelError`, which names `field`, if no `size` of the `ranks` can share the experts of this model."""
    modules: list[Any] = list(expert_modules(model))
    if not modules:
        raise ModelError(f"this model has no experts that ranks could share: set {field} = 1")
    if any(module.is_transposed or module.has_bias or not module.has_gate for module in modules):
        raise ModelError(f"the experts of this model are not gated ones without biases: set {field} = 1")
    if mismatch := uneven_parts({"experts": int(modules[0].num_experts)}, size, ranks):
        _, uneven = mismatch
        sizes = " or ".join(map(str, uneven.nearest))
        raise ModelError(f"{size} ranks cannot share the model's {uneven.total} experts: set {field} = {sizes}")


def spread(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of a one-dimensional mesh its part of the experts of every layer of a model on the meta device.
    Returns the modules that were changed.
    """
    changed = list(expert_modules(model))
    for module in changed:
        for name, parameter in list(module.named_parameters()):
            own = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        experts: Any = module
        experts.forward = _Dispatch(module, mesh.get_group())
    return changed


@frozen(eq=False)
class _Dispatch:
    """Forward pass of the experts of a layer, of which this rank holds some. Collective over the group."""

    experts: Any
    group: dist.ProcessGroup

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden (T, H), chosen experts and their weights (T, K) -> (T, H)."""
        order = chosen.flatten().argsort(stable=True)
        sent = chosen.flatten().bincount(minlength=self.experts.num_experts)
        received = torch.empty_like(sent)  # counts for each rank and local expert
        dist.all_to_all_single(received, sent, group=self.group)
        out, into = (item.view(self.group.size(), -1).sum(1).tolist() for item in (sent, received))
        tokens = _EXCHANGE(hidden[order // chosen.shape[1]], out, into, self.group)
        answers = _EXCHANGE(self._computed(tokens, received), into, out, self.group)
        restored = torch.empty_like(answers).index_copy(0, order, answers)
        return (restored.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _computed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Outputs of this rank's experts for the tokens received from each rank, in order of experts."""
        counts_by_rank = counts.view(self.group.size(), -1)
        expert = (
            torch.arange(counts_by_rank.shape[1], device=tokens.device)
            .repeat(len(counts_by_rank))
            .repeat_interleave(counts)
        )
        order = expert.argsort(stable=True)
        gate_up, down = local_part(self.experts.gate_up_proj), local_part(self.experts.down_proj)
        sizes = counts_by_rank.sum(0)
        inner = self.experts._apply_gate(grouped_product(tokens[order], gate_up, sizes))
        return torch.empty_like(tokens).index_copy(0, order, grouped_product(inner, down, sizes))


def grouped_product(rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
    """Each group of rows times the matrix of its expert: rows (N, in), sorted by experts, matrices (E, out, in), sizes
    (E,) of the groups -> (N, out).

    On CUDA, in bfloat16, it is one kernel, torch's `grouped_mm`; otherwise one product per expert.
    """
    if rows.device.type == "cuda" and rows.dtype is torch.bfloat16 and rows.numel():
        return one_kernel(rows, matrices, sizes)
    return product_of_each(rows, matrices, sizes)


def product_of_each(rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
    """`grouped_product` as one product per expert."""
    parts = rows.split(sizes.tolist())
    return torch.cat([nn.functional.linear(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


def one_kernel(rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
    """`grouped_product` as torch's single kernel for all experts."""
    product: Tensor = nn.functional.grouped_mm(rows, matrices.transpose(1, 2), offs=sizes.cumsum(0).int())
    return product


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that is distributed over ranks; any other tensor as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: sends groups of sizes `out` to the ranks of a group and receives groups of sizes `into`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (into, out), group
        return _exchanged(rows, out, into, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        out, into = ctx.sizes
        return _exchanged(gradients[0], out, into, ctx.group), None, None, None


def _exchanged(rows: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(into), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), into, out, group=group)
    return received


_EXCHANGE: Any = _Exchange.apply

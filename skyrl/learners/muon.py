"""Muon: the momentum of each hidden matrix is orthogonalized before it is applied; AdamW trains all other weights.

The orthogonalization is torch's own (`torch.optim.Muon`): five iterations of Newton-Schulz in bfloat16, whatever the
type of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from skyrl.learners.sharing import share_of
from skyrl.models.output_head import output_embeddings
from skyrl.models.parallel.expert_parallel import local_part


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Weights of `model` that Muon trains: matrices between the embeddings and the head. A critic's head, a single row,
    is not among them.
    """
    head = output_embeddings(model)
    outer = [head, *(module for module in model.modules() if isinstance(module, nn.Embedding))]
    kept_apart = {parameter for module in outer if module is not None for parameter in module.parameters()}
    return {
        parameter
        for parameter in model.parameters()
        if parameter.dim() == 2 and min(parameter.shape) > 1 and parameter not in kept_apart
    }


class Muon(Optimizer):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices and AdamW for all other weights.

    With momentum m <- mu m + (1 - mu) g and its look-ahead u = mu m + (1 - mu) g, a matrix of R rows and C columns
    becomes (1 - lr wd) W - 0.2 lr sqrt(max(R, C)) NS(u). The factor matches the size of AdamW's step
    (arXiv:2502.16982, eq. 4), so that both can use one learning rate. Updates of sharded matrices are gathered, one at
    a time, for NS only; weights and momentum stay sharded.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        adam: Mapping[str, Any],
    ) -> None:
        """`matrices` and `others` are groups of parameters with their `weight_decay`; `adam` is given to AdamW."""
        super().__init__([*matrices, *others], {"lr": lr})
        self._momentum, self._of_matrices = momentum, self.param_groups[: len(matrices)]
        self._adamw = torch.optim.AdamW(self.param_groups[len(matrices) :], lr=lr, **adam) if others else None
        if self._adamw is not None:
            self._adamw.state = self.state  # one state dictionary for both; the groups are shared already

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # of overloads
        """One step of every parameter that has a gradient; `closure`, if given, computes the loss and the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._of_matrices:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._step(matrix, group)
        if self._adamw is not None:
            self._adamw.step()
        return loss

    def _step(self, matrix: nn.Parameter, group: dict[str, Any]) -> None:
        assert matrix.grad is not None
        slots = self.state[matrix]
        if "momentum_buffer" not in slots:
            slots["momentum_buffer"] = torch.zeros_like(matrix.grad)
        buffer: Tensor = slots["momentum_buffer"]
        buffer.lerp_(matrix.grad, 1 - self._momentum)
        update = matrix.grad.lerp(buffer, self._momentum)
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        full_update = update.full_tensor() if isinstance(update, DTensor) else update
        local_part(matrix).add_(share_of(_orthogonal_step(full_update, group["lr"]), matrix))


def _orthogonal_step(update: Tensor, lr: float) -> Tensor:
    """The step that `torch.optim.Muon` takes from zero weights for the gradient `update`, with its momentum off."""
    step = nn.Parameter(torch.zeros_like(update))
    step.grad = update
    torch.optim.Muon(
        [step], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()
    return step.detach()

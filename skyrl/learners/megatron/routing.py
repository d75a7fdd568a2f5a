"""Costs and metrics of the routers of a mixture of experts under Megatron-core.

Every pipeline stage has its own routers, but only the last stage has the loss. Costs are therefore added on the stage
of their router, and metrics are summed once, at the end of the step. Importing this module requires Megatron-core.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl.learners.routing import RouterCosts, RouterWork
from skyrl.learners.strategy import nan_unless_finite
from skyrl.models.megatron.layout import Mixture
from skyrl.models.routers import RowLoads


class RouterWatch:
    """Collects the loads of the routers of a pipeline stage; see `skyrl.models.megatron.routers.LoadWatch`."""

    def __init__(self, costs: RouterCosts, mixture: Mixture, device: torch.device) -> None:
        """`mixture` describes the experts of the whole model, not only of this stage."""
        self._costs, self._mixture, self._device = costs, mixture, device
        self.begin(1.0)

    def begin(self, factor: float) -> None:
        """Reset the sums. `factor` is the divisor that Megatron-core applies to the sum of all losses."""
        self._factor = factor
        self._parts = dict.fromkeys(self._costs.parts, torch.zeros((), device=self._device))
        shape = (len(self._mixture.layers), self._mixture.experts)
        self._loads = torch.zeros(shape, device=self._device, dtype=torch.float64)

    def __call__(self, layer: int, loads: RowLoads, row_weights: Tensor) -> Tensor:
        """Cost of a layer for a micro-batch, times the factor."""
        parts: dict[str, Tensor] = {}
        layers = len(self._mixture.layers)
        cost = self._costs.added(row_weights.new_zeros(()), parts, loads, row_weights) / layers
        for name, value in parts.items():
            self._parts[name] = self._parts[name] + value.detach() / layers
        self._loads[layer] += (loads.chosen[0] * (row_weights != 0)[:, None]).sum(0)
        return nan_unless_finite(cost) * self._factor

    def work(self) -> RouterWork:
        """The collected sums over all ranks that together hold one copy of the model. Collective."""
        own = [part.double().reshape(1) for part in self._parts.values()]
        everything = torch.cat([*own, self._loads.flatten()])
        groups = (
            parallel_state.get_tensor_and_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(everything, group=group)
        parts, loads = everything[: len(own)], everything[len(own) :]
        return RouterWork(parts=dict(zip(self._parts, parts, strict=True)), loads=loads.view_as(self._loads))

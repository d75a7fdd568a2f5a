"""Costs and metrics of the routers of a mixture of experts under Megatron-core.

Every pipeline stage has routers of its own, and the last one alone has the loss: costs are added where their routers
are, and what is logged of them comes together once, at the end of the step. Importing this needs Megatron-core.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl.learners.routing import RouterCosts, RouterWork
from skyrl.learners.strategy import nan_unless_finite
from skyrl.models.megatron_layout import Mixture
from skyrl.models.routers import RowLoads


class RouterWatch:
    """Sees the loads of the routers of a pipeline stage; see `skyrl.models.megatron_routers.Watch`."""

    def __init__(self, costs: RouterCosts, mixture: Mixture, device: torch.device) -> None:
        """`mixture` are the sizes of the whole model."""
        self._costs, self._mixture, self._device = costs, mixture, device
        self.begin(1.0)

    def begin(self, factor: float) -> None:
        """Forget what was seen. `factor` is what Megatron-core divides the sum of all losses by."""
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
        """Sum of what was seen over all ranks that have a copy of the model among them. Collective."""
        own = [each.double().reshape(1) for each in self._parts.values()]
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

"""Losses of the routers of a mixture of experts, and metrics of their loads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.models.routers import RowLoads

Loads = tuple[tuple[float, ...], ...]
"""Tokens that chose each expert, in each layer."""


@frozen(kw_only=True)
class RouterCosts:
    """Router losses that are added to the loss, each as coefficient x mean over the rows of a mini-batch."""

    aux_coef: float = 0.0
    """Coefficient of the load-balancing loss (Switch Transformer, arXiv:2101.03961, eq. 4), taken row by row
    (DeepSeek-V3, arXiv:2412.19437, eq. 17), scaled as in transformers to K for even loads, not 1."""

    z_coef: float = 0.0
    """Coefficient of the z-loss (ST-MoE, arXiv:2202.08906, eq. 5)."""

    @classmethod
    def of(cls, section: ShardedModelConfig) -> RouterCosts:
        """The coefficients of a model's section of the configuration; zero for all but a policy."""
        return cls(aux_coef=section.router_aux_loss_coef, z_coef=section.router_z_loss_coef)

    def __bool__(self) -> bool:
        return bool(self.aux_coef or self.z_coef)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that `added` writes, the entropy of the routers first."""
        return ("router_entropy", *(f"router_{name}_loss" for name, coef in self._coefs if coef))

    @property
    def _coefs(self) -> tuple[tuple[str, float], ...]:
        return ("aux", self.aux_coef), ("z", self.z_coef)

    def added(self, loss: Tensor, parts: dict[str, Tensor], loads: RowLoads, row_weights: Tensor) -> Tensor:
        """The scalar loss of a micro-batch plus its share of the router losses. Writes these losses and the routers'
        entropy to `parts`, by name. `row_weights` (B,) is the share of each row in the mini-batch.
        """
        parts["router_entropy"] = (loads.entropy * row_weights).sum()
        for (name, coef), cost in zip(self._coefs, (loads.balance, loads.z), strict=True):
            if coef:
                mean = (cost * row_weights).sum()
                loss, parts[f"router_{name}_loss"] = loss + coef * mean, mean.detach()
        return loss

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Scalar sum that the named parts add to the loss."""
        return sum((coef * parts[f"router_{name}_loss"] for name, coef in self._coefs if coef), torch.zeros(()))


@frozen(kw_only=True, eq=False)
class RouterWork:
    """Losses and loads of a strategy's own routers in an optimizer step, on the rows of a replica."""

    parts: Mapping[str, Tensor]
    """Parts of the loss by the names of `RouterCosts.parts`, scalars without gradient."""

    loads: Tensor
    """(layers, E): tokens that chose each expert, in all layers with experts."""


def load_metrics(loads: Loads) -> dict[str, float]:
    """Metrics of how evenly the tokens of a mini-batch were routed; none for a model without experts."""
    if not loads:
        return {}
    means = [sum(layer) / len(layer) or 1.0 for layer in loads]
    violations = [max(layer) / mean - 1 for layer, mean in zip(loads, means, strict=True)]
    unused = [sum(count == 0 for count in layer) / len(layer) for layer in loads]
    return {
        "router_max_violation": max(violations),
        "router_mean_violation": sum(violations) / len(loads),
        "router_unused_experts": sum(unused) / len(loads),
    }

"""The protocol of strategies, which spread a model over ranks; `strategies.py` lists the built-in ones.

Everything here is collective: all ranks call the same methods in the same order. State has one form under every
strategy and any number of ranks: tensors by name, of which each rank stores what it holds and reads what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor, nn

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.config import OptimizerConfig
from skyrl.learners.loss_scale import LossScale
from skyrl.learners.moving import DeviceMover
from skyrl.learners.ranks import Ranks
from skyrl.learners.routing import RouterCosts, RouterWork
from skyrl.learners.row_layouts import MicroBatch
from skyrl.models.stored_weights import StoredWeights

T = TypeVar("T")


@frozen(kw_only=True)
class ModelSource:
    """Factories of a model."""

    load: Callable[[torch.device], Any]
    """The model with its weights in float32, on the given device. Raises `ModelError`."""

    meta_model: Callable[[], Any]
    """The same modules without values, on the meta device."""

    stored: StoredWeights | None = None
    """The weights where they lie, for strategies that never have the whole model on one rank. None where they are not
    stored: a model that is drawn."""

    drawn: Callable[[], Mapping[str, Tensor]] = dict
    """The weights that do not lie among `stored`, by name, in float32 on the host: adapters, and a new head."""


@frozen(kw_only=True)
class StrategyContext:
    """Arguments that every strategy is given."""

    ranks: Ranks
    device: torch.device
    compute_dtype: torch.dtype

    optimizer: OptimizerConfig | None
    """None for a model that never changes: it gets no optimizer, and no memory for gradients."""

    micro_batch_rows: int = 1

    tensor_parallel: int = 1
    """Consecutive ranks that cut matrices among them."""

    tensor_parallel_field: str = "tensor_parallel_size"
    """Path of the field that says so, for messages."""

    section_field: str = ""
    """Path of the model's section of the configuration, for messages."""

    expert_parallel: int = 1
    """Consecutive ranks that hold different experts of every layer."""

    expert_parallel_field: str = "expert_parallel_size"
    """Path of the field that says so, for messages."""

    strategy_field: str = "trainer.strategy"
    """Path of the field that names the strategy, for messages."""

    loss_scale: LossScale | None = None
    """Factor of the loss for gradients in float16; None where they are in a type with the range of float32."""

    router_costs: RouterCosts = field(factory=RouterCosts)
    """Costs of the routers of a mixture of experts, for strategies that compute with modules of their own."""

    mover: DeviceMover = field(factory=DeviceMover)


class Strategy(Protocol):
    """One model on the ranks of its role."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, whose learning rate a schedule sets."""

    @property
    def meta_model(self) -> nn.Module:
        """The plain transformers model whose names and configuration an export has. Its values mean nothing."""

    def probe(self, look: Callable[[Any], T]) -> T:
        """`look(model)`, without gradient, in the type of the weights where computing in another one is a choice."""

    def forward(self, micro_batches: Sequence[MicroBatch], read: Callable[[Any, MicroBatch], T]) -> list[T]:
        """`read(model, micro_batch)` of each micro-batch, without gradient, in order; the micro-batches that `read`
        gets are on the device. Afterwards no gathered weights are left.

        `model` is what a forward pass calls. The order of passes is the strategy's own, as a pipeline wants it. A rank
        without outputs, such as one in the middle of a pipeline, returns an empty list.
        """

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: Callable[[Any, MicroBatch], T],
        loss_of: Callable[[T, MicroBatch], Tensor],
    ) -> RouterWork | None:
        """Accumulate for `step` the gradient of the sum of `loss_of(read(model, micro_batch), micro_batch)`, a scalar,
        over the micro-batches of all ranks that have rows of their own. What was accumulated before is dropped.

        `loss_of` is called once for each micro-batch on every rank that reports. Where a loss is not finite on any
        rank, the gradient is not finite on all (`nan_unless_finite`).

        Returns what routers did that are modules of the strategy's own, and whose costs it has added; None where there
        are none, and `loss_of` sees those of transformers.
        """

    def shards(self, *, optimizer: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every weight, of whatever shape, and of the optimizer's state if `optimizer`; not
        collective.
        """

    def step(self) -> float:
        """Clip, let the optimizer step, and return the L2 norm of the whole gradient before clipping.

        Where that is not finite nothing is changed on any rank.
        """

    def named_shapes(self) -> dict[str, Tensor]:
        """Every weight by name, tied ones once: tensors whose shape and type are those of the whole weight."""

    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, in its whole shape, one at a time; the model's own tensors where nothing is sharded or
        rounded. Weights are in float32, or rounded to `dtype`, if possible before they travel between ranks.
        """

    def tensor_shards(self) -> Iterator[TensorShard]:
        """`model.<name>` and `optimizer.<name>.<slot>`: what this rank is to store. Those of all ranks are the whole
        state, each number once. A piece holds until the next is asked for.
        """

    def load_state(self, source: TensorSource) -> None:
        """Become what the pieces of all ranks were; every rank reads what it holds. Raises `ResumeError` on every
        rank.
        """

    def offload(self, *, model: bool, optimizer: bool) -> int:
        """Leave the device: gradients are dropped, the named parts go to host memory. Bytes moved on this rank."""

    def onload(self, *, model: bool, optimizer: bool) -> int:
        """Come back to the device. Bytes moved on this rank."""

    def close(self) -> None:
        """Let go of what outlives the model."""


def nan_unless_finite(loss: Tensor) -> Tensor:
    """The loss, a scalar; where it is not finite, NaN with a gradient of NaN, so that all ranks skip the step.

    A token whose ratio is held at its bound may have an infinite loss and a gradient of 0: the norm alone would let
    the step pass.
    """
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan)

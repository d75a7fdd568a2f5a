"""The protocol of strategies, which spread a model over ranks; `workers/strategies.py` lists the built-in ones.

Everything here is collective: all ranks call the same methods in the same order. State has the same form under every
strategy and number of ranks: tensors by name, of which each rank stores the parts it holds and reads the parts it
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor, nn

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.config import OptimizerConfig
from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.learners.loss_scale import LossScale
from skyrl.learners.offloading import DeviceMover
from skyrl.learners.ranks import Ranks
from skyrl.learners.routing import RouterCosts, RouterWork
from skyrl.learners.row_layouts import MicroBatch
from skyrl.learners.row_support import RowSupport
from skyrl.learners.schedule import StepSettings
from skyrl.models.files.stored_weights import StoredWeights
from skyrl.planning.topology import Degrees

T = TypeVar("T")


@frozen(kw_only=True)
class ModelSource:
    """Factories of a model."""

    load: Callable[[torch.device], Any]
    """The model with its weights in float32, on the given device. Raises `ModelError`."""

    meta_model: Callable[[], Any]
    """The same modules without values, on the meta device."""

    rows: RowSupport
    """The layout of its rows, and the attention with which the model is made."""

    stored: StoredWeights | None = None
    """The stored weights, for strategies that never have the whole model on one rank. None for a model with random
    weights, which is not stored."""

    random_weights: Callable[[], Mapping[str, Tensor]] = dict
    """The weights that `stored` does not contain, by name, in float32 on the host: adapters, and a new head."""


@frozen(kw_only=True)
class StrategyContext:
    """Arguments that every strategy is given."""

    run: RunBasics
    section: ShardedModelConfig
    """The model's table of the configuration."""

    ranks: Ranks
    device: torch.device
    compute_dtype: torch.dtype

    optimizer: OptimizerConfig | None
    """None for a model that never changes: it gets no optimizer, and no memory for gradients."""

    micro_batch_rows: int = 1

    degrees: Degrees = field(factory=Degrees)
    """Ranks along each dimension of the model; those along one that the strategy does not have are 1."""

    loss_scale: LossScale | None = None
    """Factor of the loss for gradients in float16; None if their type has the range of float32."""

    router_costs: RouterCosts = field(factory=RouterCosts)
    """Router losses of a mixture of experts, for strategies that replace transformers' modules by their own."""

    mover: DeviceMover = field(factory=DeviceMover)


class Strategy(Protocol):
    """One model on the ranks of its role."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, whose learning rate is set by a schedule."""

    @property
    def hf_model(self) -> nn.Module:
        """The transformers model, with its names and configuration. Under FSDP2 and ZeRO it is the model that computes,
        with this rank's parts of the weights; under Megatron it is on the meta device and has no values.
        """

    def probe(self, look: Callable[[Any], T]) -> T:
        """`look(model)`, without gradient, computed in the type of the weights if the strategy can choose."""

    def forward(self, micro_batches: Sequence[MicroBatch], read: Callable[[Any, MicroBatch], T]) -> list[T]:
        """Returns `read(model, micro_batch)` for each micro-batch, in order, without gradient; `read` gets the
        micro-batches on the device. Gathered weights are freed afterwards.

        `model` is the module to call. The strategy chooses the order of passes, for example for a pipeline. A rank
        without outputs, such as one in the middle of a pipeline, returns an empty list.
        """

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: Callable[[Any, MicroBatch], T],
        loss_of: Callable[[T, MicroBatch], Tensor],
    ) -> RouterWork | None:
        """Add the gradient of the sum of `loss_of(read(model, micro_batch), micro_batch)`, a scalar, over the
        micro-batches of all replicas to the gradients that `step` will use.

        `loss_of` is called once for each micro-batch on every rank that reports. If a loss is not finite on any rank,
        the gradient is not finite on all of them (`nan_unless_finite`).

        Returns the losses and loads of the strategy's own routers, whose losses it has added; None if it has none, and
        `loss_of` adds the losses of transformers' routers.
        """

    def shards(self, *, optimizer: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every weight, in any shape, and of the optimizer's state if `optimizer`; not
        collective.
        """

    def step(self, settings: StepSettings) -> float:
        """Clip, let the optimizer step, and return the L2 norm of the whole gradient before clipping. Gradients are
        dropped.

        If the norm is not finite, neither weights nor optimizer change on any rank.
        """

    def zero_grad(self) -> None:
        """Drop the gradients accumulated since the last step."""

    def named_shapes(self) -> dict[str, Tensor]:
        """Every weight by name, each tied weight once: tensors with the shape and type of the whole weight."""

    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, in its whole shape, one at a time; the model's own tensors if nothing is sharded or
        rounded. Weights are in float32, or rounded to `dtype`, if possible before ranks send them to each other.
        """

    def tensor_shards(self) -> Iterator[TensorShard]:
        """The pieces that this rank stores, named `model.<name>` and `optimizer.<name>.<slot>`. The pieces of all ranks
        together are the whole state, each number once. A piece is valid until the next is requested.
        """

    def load_state(self, source: TensorSource) -> None:
        """Load the state that the pieces of all ranks form; every rank reads the parts it holds. Raises `ResumeError`
        on every rank.
        """

    def offload(self, *, model: bool, optimizer: bool) -> int:
        """Move the named parts to host memory, but no gradients: these must have been dropped. Returns the bytes moved
        on this rank.
        """

    def onload(self, *, model: bool, optimizer: bool) -> int:
        """Move the named parts back to the device. Returns the bytes moved on this rank."""

    def close(self) -> None:
        """Release resources that would outlive the model."""


def nan_unless_finite(loss: Tensor) -> Tensor:
    """The scalar loss; if it is not finite, NaN with a gradient of NaN, so that all ranks skip the step.

    A token whose ratio is clamped may have an infinite loss and a gradient of 0, which the gradient norm alone would
    not reveal.
    """
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan)

"""One rank of a model that learns: what the policy and the critic have in common."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.checkpoint.shards import TensorSource
from skyrl.config import DeepSpeedConfig, FSDPConfig, OptimizerConfig, SkyRLLoraConfig, TrainerConfig
from skyrl.errors import NonFiniteError
from skyrl.learners.budget import micro_batches
from skyrl.learners.forward import ForwardFn
from skyrl.learners.model_worker import ModelWorker
from skyrl.learners.moving import DeviceMover
from skyrl.learners.rank_metrics import Metrics, Moments, RankMetrics, added
from skyrl.learners.ranks import Ranks
from skyrl.learners.schedule import (
    learning_rate_schedule,
    move_schedule,
    recompute_activations,
    updates_per_training_step,
)
from skyrl.learners.strategy import ModelSource, nan_unless_finite
from skyrl.models.lora import adapter_alone, dropping, merged, merged_shapes

R = TypeVar("R")

_log = logging.getLogger(__name__)


class Objective(Protocol):
    """What an update minimises: weights for the whole mini-batch, then the loss of each micro-batch, with its parts,
    which add up, and numbers, whose mean over all micro-batches is logged.
    """

    def weigh(self, batch: TrainingBatch) -> TrainingBatch: ...

    def __call__(
        self, outputs: Tensor, batch: TrainingBatch, entropy: Tensor | None, /
    ) -> tuple[Tensor, Metrics, dict[str, Tensor]]: ...


class LearningWorker(ModelWorker):
    """A model that learns: scoring, optimizer steps, and its weights and state for others to copy."""

    def __init__(
        self,
        trainer: TrainerConfig,
        source: ModelSource,
        read: ForwardFn,
        sharding: tuple[FSDPConfig, DeepSpeedConfig],
        ranks: Ranks,
        *,
        role: str,
        objective: Objective,
        lora: SkyRLLoraConfig,
        optimizer: OptimizerConfig,
        num_training_steps: int | None,
        mover: DeviceMover | None,
    ) -> None:
        super().__init__(trainer, source, read, sharding, ranks, role=role, optimizer=optimizer, mover=mover)
        self.objective = objective
        self._lora, self._seed = lora, trainer.seed
        self._train_rows = trainer.micro_train_batch_size_per_gpu
        self._max_skipped = 0 if trainer.faults.on_non_finite == "abort" else optimizer.max_skipped_updates
        self._skipped = 0  # in a row
        if trainer.recompute_activations:
            recompute_activations(self.model, use_reentrant=trainer.gradient_checkpointing_use_reentrant)
        assert self.strategy.optimizer is not None
        self.optimizer = self.strategy.optimizer
        updates = updates_per_training_step(trainer, getattr(trainer, f"{role}_mini_batch_size"))
        self.schedule = learning_rate_schedule(self.optimizer, optimizer, num_training_steps, updates)

    async def update(self, batch: TrainingBatch) -> Metrics:
        """One optimizer step over the mini-batch, in micro-batches whose number changes nothing but memory.

        A step whose loss or gradient is not finite is left out and counted in `skipped_updates`. Raises
        `NonFiniteError` when more than `optimizer_config.max_skipped_updates` are left out in a row: the weights are
        then as they were. Also where the learning rate is not finite, before the step, or a weight, after it.
        """
        [share] = self._budget.plan([self.objective.weigh(batch)])
        return (await self.update_share(share)).metrics()

    async def update_share(self, batch: TrainingBatch) -> RankMetrics:
        """The same, together with the other ranks: `batch` is this rank's rows of a mini-batch that was weighed."""
        with dropping(self.model, self._lora, hash((self._seed, self.schedule.last_epoch, self.ranks.rank))):
            return self._step(batch)

    def _step(self, batch: TrainingBatch) -> RankMetrics:
        sums: Metrics = {}
        seen: dict[str, Moments] = {}
        cut = [micro for _, micro in micro_batches(batch, self._train_rows)]
        self.strategy.zero_grad()
        for index, micro in enumerate(cut):
            micro = micro.to(self.device)
            outputs = self._forward(micro)
            loss, parts, numbers = self.objective(outputs.values, micro, outputs.entropy)
            self.strategy.backward(nan_unless_finite(loss), last=index == len(cut) - 1)
            sums = added(sums, parts)
            for name, values in (outputs.numbers | numbers).items():
                seen[name] = seen.get(name, Moments()) + Moments.from_tensor(values)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        if not math.isfinite(learning_rate):
            raise NonFiniteError(
                f"the {self._role}'s learning rate is {learning_rate}: the optimizer step was not taken. Look at "
                f"trainer.{self._role}.optimizer_config"
            )
        norm = self.strategy.step()
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._skipped > self._max_skipped:
            raise NonFiniteError(self._why_to_stop(norm, sums))
        if not self._skipped:
            self._refuse_non_finite(f"after an update with gradient norm {norm:.4g}")
            self.schedule.step()
        _log.info("update of %d rows: gradient norm %.4g%s", len(batch), norm, ", left out" if self._skipped else "")
        shared = {
            f"{self._role}_lr": learning_rate,
            "grad_norm": norm,
            "skipped_updates": float(self._skipped > 0),
        }
        return RankMetrics(sums=sums, moments=seen, shared=shared)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every weight, tied ones once, under the names of the stored model; an adapter is merged
        into the weights that it is for.

        With several ranks all of them must go through it together, and a value holds until the next is asked for.
        """
        return merged(self.strategy.gather(), self._lora)

    def metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        shapes = merged_shapes(iter(self.strategy.named_shapes().items()))
        return [(name, tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in shapes]

    async def stream(
        self,
        consume: Callable[[Iterator[tuple[str, Tensor]]], R],
        *,
        everywhere: bool = False,
        adapter: bool = False,
    ) -> R | None:
        """Hand the whole weights, one at a time, to `consume` on rank 0, or on all; what it returns, None elsewhere.

        With `adapter` it gets the tensors of the adapter alone, as PEFT names them. All ranks take part in gathering
        each weight, to the last one, also where `consume` fails or stops early.
        """
        weights = adapter_alone(self.strategy.gather()) if adapter else self.weights()
        try:
            return consume(weights) if everywhere or self.ranks.rank == 0 else None
        finally:
            for _ in weights:
                pass

    def stage(self) -> tuple[dict[str, Any], int]:
        _, size = super().stage()
        return {"optimizer_steps": self.schedule.last_epoch, "skipped_in_a_row": self._skipped}, size

    def load_state(self, source: TensorSource, numbers: Mapping[str, Any]) -> None:
        super().load_state(source, numbers)
        move_schedule(self.schedule, numbers["optimizer_steps"])
        self._skipped = int(numbers["skipped_in_a_row"])

    def _why_to_stop(self, norm: float, sums: Metrics) -> str:
        parts = ", ".join(f"{name} {value:g}" for name, value in sums.items())
        times = f"{self._skipped} times in a row" if self._skipped > 1 else "now"
        return (
            f"the {self._role}'s gradient norm is {norm} ({times}; {parts}): the optimizer step was not taken and the "
            f"weights are as they were. Lower trainer.{self._role}.optimizer_config.lr, or look at the rewards and "
            "log-probabilities of this step."
        )

"""One rank of a model that learns, the common base of policy and critic."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Unpack

import attrs
import torch
from torch import Tensor, nn

from skyrl.algorithms.reductions import token_mean
from skyrl.batch import TrainingBatch
from skyrl.checkpoint.shards import TensorSource
from skyrl.config.settings.learners import LearnerConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of, reads
from skyrl.errors import NonFiniteError, RunError
from skyrl.learners.budget import micro_batches
from skyrl.learners.forward import PARITY, ForwardFn, Outputs
from skyrl.learners.offloading import HostActivations
from skyrl.learners.profiling import UpdateProfiler
from skyrl.learners.rank_metrics import Measurements, Metrics, Moments, RankMetrics
from skyrl.learners.routing import Loads, RouterCosts
from skyrl.learners.row_layouts import MicroBatch
from skyrl.learners.schedule import (
    StepSettings,
    learning_rate_schedule,
    move_schedule,
    recompute_activations,
)
from skyrl.learners.strategy import ModelSource
from skyrl.learners.workers.model_worker import ModelWorker, Placed
from skyrl.models.dropout import dropping, dropping_modules
from skyrl.models.lora import adapter_alone, merge_adapters, merged_shapes

R = TypeVar("R")

_log = logging.getLogger(__name__)


class Objective(Protocol):
    """What `forward_backward` adds the gradient of: a loss over the rows of a batch. It is sent to every rank, so that
    pickle must be able to store it.

    A class that derives from this one only has to define `__call__`:

        class Likelihood(Objective):
            def __call__(self, outputs, batch, entropy=None):
                loss = -(outputs * batch.loss_weights).sum()
                return loss, {"loss": loss.detach()}, {}
    """

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The whole batch, with `loss_weights`, the share of each of its tokens in the loss: by default the same for
        each selected token, together 1. May leave out rows.
        """
        return batch.with_fields(loss_weights=token_mean(batch.loss_mask))

    def measured_only(self, batch: TrainingBatch) -> tuple[TrainingBatch, float] | None:
        """A sample of the rows that `weigh` leaves out, which is only measured, and the number of left-out tokens that
        each of its tokens stands for. None, the default: every row is measured, or those left out do not matter.
        """
        return None

    def __call__(
        self, outputs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None, /
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss of one micro-batch, a scalar with gradient; its parts, scalars without gradient that add up over
        micro-batches; and metrics by name, numbers (N,) of tokens, sequences or pairs, whose mean over all
        micro-batches is logged. All of it may stay on the device: it is read once, at the end of the pass.

        `outputs` and `entropy` are (B, L): the model's output (log-probabilities in nats, or a critic's values) and
        entropy at each selected token. `batch` has what the rows carry besides tokens in `extras`.
        """
        ...


def weighed(objective: Objective, batch: TrainingBatch) -> TrainingBatch:
    """A whole mini-batch with the share of each token, and of each row, in the loss."""
    batch = objective.weigh(batch)
    return batch.with_fields(row_weights=torch.full(batch.lengths.shape, 1 / len(batch)))


def trace_folder(run: RunBasics, section: LearnerConfig, rank: int) -> Path | None:
    """The folder that this rank's updates are traced into from the start, under Megatron. None: no traces."""
    if not reads(run, "megatron_config"):
        return None
    traces = section.megatron_config.torch_profiler_config
    return Path(traces.save_path) if traces.enable and traces.save_path and rank in traces.ranks else None


class LearningWorker(ModelWorker):
    """A model that learns: scoring, optimizer steps, and export of its weights and state."""

    role: ClassVar[Literal["policy", "critic"]]
    """The name of the model in a checkpoint."""

    def __init__(
        self,
        run: RunBasics,
        section: LearnerConfig,
        source: ModelSource,
        read: ForwardFn,
        num_training_steps: int | None,
        updates: int,
        **placed: Unpack[Placed],
    ) -> None:
        """Loads the model of `section` with a new optimizer; `source` and `read` are as in `ModelWorker`.

        `num_training_steps` counts optimizer steps; only schedules with an end (linear, cosine, ...) need it. `updates`
        is the number of them in a training step.
        """
        role, optimizer = self.role, section.optimizer_config
        super().__init__(run, section, source, read, role=role, optimizer=optimizer, **placed)
        facts = facts_of(run)
        self._lora, self._seed = section.model.lora, run.seed
        self._tensor_parallel = facts.degrees_of(section).tensor
        self._optimizer_name = optimizer.optimizer
        self._train_rows = run.micro_train_batch_size_per_gpu * run.rows_of_an_item
        self._max_skipped = 0 if run.faults.on_non_finite == "abort" else optimizer.max_skipped_updates
        self._passes = 0  # whose gradients the next optimizer step uses
        self._sums: Metrics = {}  # of their losses, on this rank
        self._skipped = 0  # optimizer steps in a row
        self._router_costs = RouterCosts.of(section)
        self._profiler = UpdateProfiler(f"{role}-{self.ranks.rank}", record_memory=run.record_memory)
        self._profiler.write_to(trace_folder(run, section, self.ranks.rank))
        field = section.path_of("use_dropout")
        self._dropout_modules = dropping_modules(self.model, self._lora, own=section.use_dropout, field=field)
        if run.recompute_activations and facts.recomputation is None:
            reentrant = run.gradient_checkpointing_use_reentrant
            recompute_activations(self.model, use_reentrant=reentrant, draws=bool(self._dropout_modules))
            if run.offload_activations:
                HostActivations().attach(self.model)
        assert self.strategy.optimizer is not None
        self.optimizer = self.strategy.optimizer
        self.schedule = learning_rate_schedule(self.optimizer, optimizer, num_training_steps, updates)

    async def forward_backward(self, batch: TrainingBatch, objective: Objective) -> Metrics:
        """Add the gradient of the objective over the batch, in micro-batches whose number affects only memory, to those
        that `optimizer_step` will use. Returns metrics of the pass.
        """
        [share] = self._budget.plan([weighed(objective, batch)])
        measured = objective.measured_only(batch)
        seen = [] if measured is None else [await self.measure_share(self._budget.plan([measured[0]])[0], objective)]
        learned = await self.forward_backward_share(share, objective)
        return (learned if measured is None else learned.merged_with(seen, measured[1])).metrics()

    async def forward_backward_share(self, batch: TrainingBatch, objective: Objective) -> RankMetrics:
        """`forward_backward` together with the other ranks; `batch` is the share of this rank's replica in a weighed
        batch.
        """
        # for each optimizer step, pass and rank; equal on tensor-parallel ranks, which compute on the same tokens
        later = (self._passes,) if self._passes else ()
        seed = hash((self._seed, self.schedule.last_epoch, self.ranks.rank // self._tensor_parallel, *later))
        with self._profiler.part(), dropping(self._dropout_modules, self.device, seed):
            sums, moments, loads = self._accumulate(batch, objective)
        self._passes += 1
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        _log.info("forward and backward pass of %d rows", len(batch))
        return RankMetrics(sums=sums, moments=moments, loads=loads)

    async def optimizer_step(self, settings: StepSettings) -> Metrics:
        """One optimizer step, together with the other ranks, with the gradients of all `forward_backward` since the
        last one, which are dropped. Returns the learning rate, the norm of the gradient, and whether the step was
        skipped.

        A step whose gradient is not finite is skipped and counted in `skipped_updates`. Raises `NonFiniteError` if more
        than `optimizer_config.max_skipped_updates` steps in a row are skipped, which leaves the weights unchanged, if
        the learning rate is not finite before the step, and if a weight is not finite after it; `RunError` if there is
        no gradient; `UserError` for a setting that the optimizer does not have.
        """
        if not self._passes:
            raise RunError(f"the {self._title} has no gradient: call forward_backward before optimizer_step")
        settings.refuse_unknown(self.optimizer, self._optimizer_name)
        with self._profiler.part(last=True):
            learning_rate = float(self.optimizer.param_groups[0]["lr"]) if settings.lr is None else settings.lr
            if not math.isfinite(learning_rate):
                raise NonFiniteError(
                    f"the {self._title}'s learning rate is {learning_rate}: the optimizer step was not taken. Look at "
                    f"{self._section.path_of('optimizer_config')}"
                )
            norm = self.strategy.step(settings)
            sums, self._sums, self._passes = self._sums, {}, 0
            is_finite = math.isfinite(norm)
            metrics = {f"{self._role}_lr": learning_rate, "grad_norm": norm}
            overflowed = False  # skipped because the loss scale was too large, which does not count
            if self._loss_scale is not None:
                metrics["loss_scale"] = self._loss_scale.value
                overflowed = self._loss_scale.adapt(finite=is_finite)
            if is_finite:
                self._skipped = 0
            elif not overflowed:
                self._skipped += 1
            if self._skipped > self._max_skipped:
                raise NonFiniteError(self._bad_norm_message(norm, sums))
            if is_finite:
                self._refuse_non_finite(f"after an update with gradient norm {norm:.4g}")
                self.schedule.step()
        _log.info("optimizer step: gradient norm %.4g%s", norm, "" if is_finite else ", left out")
        return metrics | {"skipped_updates": float(not is_finite)}

    async def measure_share(self, batch: TrainingBatch, objective: Objective) -> dict[str, Moments]:
        """Moments of the numbers that `forward_backward` would log of these rows, from a pass without gradient together
        with the other ranks; `batch` is the share of this rank's replica.
        """
        measured, options = Measurements(), attrs.evolve(self._options, measures=True)

        def read(model: nn.Module, micro: MicroBatch) -> None:
            outputs = self._read(model, micro, options)
            _, _, numbers = objective(outputs.values, micro.rows, outputs.entropy)
            measured.add({}, outputs.numbers | numbers)

        self.strategy.forward([options.prepare(micro) for _, micro in micro_batches(batch, self._train_rows)], read)
        return measured.read()[1]

    def profile(self, folder: Path | None) -> None:
        """Write a trace of each update from now on into `folder`. None stops tracing."""
        self._profiler.write_to(folder)

    def _accumulate(self, batch: TrainingBatch, objective: Objective) -> tuple[Metrics, dict[str, Moments], Loads]:
        """Accumulate gradients for the next step. Returns the parts of the loss and the measurements of the pass."""
        measured = Measurements()

        def loss_of(outputs: Outputs, micro: MicroBatch) -> Tensor:
            loss, parts, numbers = objective(outputs.values, micro.rows, outputs.entropy)
            rows, without_costs = micro.rows, loss
            if outputs.token_costs is not None:
                assert rows.loss_weights is not None
                added = (outputs.token_costs * rows.loss_weights).sum()
                parts["distillation_loss"] = added.detach()
                loss = loss + added
            if self._options.routers is not None:
                assert rows.row_weights is not None
                loads = self._options.routers.loads()
                measured.add_loads((loads.chosen * (rows.row_weights != 0)[:, None]).sum(1))
                loss = self._router_costs.added(loss, parts, loads, rows.row_weights)
            if loss is not without_costs and "final_loss" in parts:
                parts["final_loss"] = loss.detach()
            measured.add(parts | outputs.sums, outputs.numbers | numbers)
            return loss

        cut = [self._options.prepare(micro) for _, micro in micro_batches(batch, self._train_rows)]
        work = self.strategy.accumulate(cut, self._forward, loss_of)
        if work is not None:  # of routers whose costs the strategy itself has added to the loss
            parts = dict(work.parts)
            if self._router_costs and measured.has("final_loss"):
                parts["final_loss"] = self._router_costs.total(parts)
            measured.add(parts, {})
            measured.add_loads(work.loads)
        return measured.read()

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every weight, each tied weight once, under the names of the stored model. An adapter is
        merged into the weights that it adapts, in float32; without an adapter, weights are rounded to `dtype` if it is
        given.

        Each weight has its whole shape. With several ranks, all of them must iterate together, and a value is valid
        until the next is requested.
        """
        rounded = None if dtype is None or self._lora.rank else getattr(torch, dtype)
        return merge_adapters(self.strategy.gather(rounded), self._lora)

    def shapes(self, adapter: bool = False) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every weight that `weights` yields, in order; with `adapter`, of the adapter only."""
        weights = iter(self.strategy.named_shapes().items())
        shapes = adapter_alone(weights) if adapter else merged_shapes(weights)
        return [(name, tuple(item.shape)) for name, item in shapes]

    async def export_weights(
        self,
        consume: Callable[[Iterator[tuple[str, Tensor]]], R],
        *,
        everywhere: bool = False,
        adapter: bool = False,
        dtype: str | None = None,
    ) -> R | None:
        """Call `consume` on an iterator over the whole weights, on rank 0 or, with `everywhere`, on all ranks. Returns
        its result, and None elsewhere.

        Each weight has its whole shape. With `adapter` it gets only the adapter's tensors, under PEFT's names. A
        consumer that rounds all weights to one type names it as `dtype`, so that ranks send them in that type. All
        ranks take part in gathering each weight, to the last one, even if `consume` fails or stops early.
        """
        weights = adapter_alone(self.strategy.gather()) if adapter else self.weights(dtype)
        try:
            return consume(weights) if everywhere or self.ranks.rank == 0 else None
        finally:
            for _ in weights:
                pass

    def stage(self) -> tuple[dict[str, Any], int]:
        self._refuse_waiting_gradients("be saved")
        _, size = super().stage()
        numbers: dict[str, Any] = {"optimizer_steps": self.schedule.last_epoch, "skipped_in_a_row": self._skipped}
        return numbers | ({"loss_scale": self._loss_scale.state()} if self._loss_scale else {}), size

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Move weights, optimizer state, or both to host memory. Returns the bytes moved on this rank. Raises
        `RunError` if gradients wait for a step: they do not move.
        """
        self._refuse_waiting_gradients("leave the device")
        return await super().offload(model=model, optimizer=optimizer)

    def _refuse_waiting_gradients(self, action: str) -> None:
        """Raises `RunError` if gradients of a `forward_backward` would be lost."""
        if self._passes:
            raise RunError(f"the {self._title} cannot {action}: gradients wait for it, call optimizer_step first")

    def load_state(self, source: TensorSource, numbers: Mapping[str, Any]) -> None:
        """Load a staged state; see `ModelWorker.load_state`. Gradients that wait for a step are dropped."""
        self.strategy.zero_grad()
        self._passes, self._sums = 0, {}
        super().load_state(source, numbers)
        move_schedule(self.schedule, numbers["optimizer_steps"])
        self._skipped = int(numbers["skipped_in_a_row"])
        if self._loss_scale is not None and "loss_scale" in numbers:
            self._loss_scale.load(numbers["loss_scale"])

    def _bad_norm_message(self, norm: float, sums: Metrics) -> str:
        parts = ", ".join(f"{name} {value:g}" for name, value in sums.items() if not name.startswith(PARITY))
        times = f"{self._skipped} times in a row" if self._skipped > 1 else "now"
        data = ", or look at the rewards and log-probabilities of this step" if self._section.table_path else ""
        return (
            f"the {self._title}'s gradient norm is {norm} ({times}; {parts}): the optimizer step was not taken and the "
            f"weights are unchanged. Lower {self._section.path_of('optimizer_config.lr')}{data}."
        )

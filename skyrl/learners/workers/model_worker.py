"""One rank of a model that scores batches, the common base of policy, critic, reference and teacher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypedDict

import attrs
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from skyrl.batch import RowTensors, TrainingBatch
from skyrl.checkpoint.manifest import StoredFile
from skyrl.checkpoint.shards import TensorShard, TensorSource, write_shards
from skyrl.checkpoint.store import could_not_write, file_of_rank
from skyrl.config import OptimizerConfig
from skyrl.config.settings.learners import LearnerConfig, ShardedModelConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of
from skyrl.errors import ModelError, NonFiniteError, RunError
from skyrl.learners.budget import TokenBudget, micro_batches
from skyrl.learners.forward import ForwardFn, Outputs, probe_forward, read_hidden, read_token_logprobs
from skyrl.learners.loss_scale import loss_scale_of
from skyrl.learners.offloading import DeviceMover
from skyrl.learners.rank_metrics import to_host
from skyrl.learners.ranks import ALONE, Ranks
from skyrl.learners.routing import RouterCosts
from skyrl.learners.row_layouts import MicroBatch, refuse_unshareable
from skyrl.learners.strategy import ModelSource, StrategyContext
from skyrl.learners.workers.strategies import strategy_named
from skyrl.models.attention.segment_attention import leave_out_cudnn
from skyrl.models.routers import Routers, known_routers
from skyrl.storage.disk import Storage
from skyrl.tree import required

_log = logging.getLogger(__name__)


class Placed(TypedDict, total=False):
    """Where a worker computes: its ranks, by default itself alone, and what moves its state off the device."""

    ranks: Ranks
    mover: DeviceMover | None


class ModelWorker:
    """A model on the ranks of its role, and how it scores a batch."""

    def __init__(
        self,
        run: RunBasics,
        section: ShardedModelConfig,
        source: ModelSource,
        read: ForwardFn,
        *,
        role: str,
        optimizer: OptimizerConfig | None = None,
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
    ) -> None:
        """`section` is the model's own part of the configuration; `source` loads the model before it has learned
        anything; `read` computes the scores; `role` is the model's name in a checkpoint.

        Raises `ModelError` if the model cannot be loaded or is not causal, `ConfigError` if a field that `resolve()`
        derives is unset, `ProcessError` if the ranks cannot connect.
        """
        self.ranks, self._role, self._section, self._read = ranks, role, section, read
        self._staged: list[TensorShard] = []
        start, facts = strategy_named(run.strategy, run.path_of("strategy")), facts_of(run)
        degrees = facts.degrees_of(section)
        sharing = {"sequence": degrees.sequence, "context": degrees.context, "tensor": degrees.tensor}
        self.device = torch.device(required_device(run))
        self._forward_rows = run.micro_forward_batch_size_per_gpu
        self._budget = token_budget(run)
        if run.deterministic:
            torch.use_deterministic_algorithms(True)
        if self.device.type == "cuda":
            leave_out_cudnn()
        context = _context(run, section, ranks, optimizer, mover)
        self._loss_scale = context.loss_scale
        with ExitStack() as failed:
            self._joined = ranks.size > 1 or facts.joins_alone
            if self._joined:
                ranks.join(self.device)
                failed.callback(ranks.leave)
            self.strategy = start(source, section, context)
            failed.callback(self.strategy.close)
            if degrees.sequence * degrees.context > 1:
                refuse_unshareable(self.model, ranks.size, section, **sharing)
            if source.rows.reason and ranks.rank == 0:
                _log.warning("%s: %s", self._title, source.rows.reason)
            probe = partial(
                probe_forward,
                pack=source.rows.pack,
                share_prompts=source.rows.share_prompts,
                device=self.device,
                packing_field=run.path_of("use_sample_packing"),
                row_sharing=ranks.row_sharing(**sharing),
            )
            options = self.strategy.probe(probe)
            routed = self._asks_routers(section)
            replaced = routed and not facts.own_modules
            routers = Routers(self.model, learned=bool(context.router_costs)) if replaced else None
            self._options = attrs.evolve(
                options, routers=routers, routed=routed, replays=section.moe_enable_routing_replay
            )
            failed.pop_all()

    @property
    def model(self) -> nn.Module:
        """The transformers model, as this rank holds it."""
        return self.strategy.hf_model

    @property
    def _title(self) -> str:
        """The name of the model in messages: its role, or "model" if the run has only one."""
        return self._role if self._section.table_path else "model"

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) float32, without gradient: the model's score of each selected token, 0 elsewhere; (0, L) on a rank
        that does not report. `batch` is the share of this rank's replica.
        """
        cut, outputs = self._outputs(batch, lambda model, micro: self._forward(model, micro).values)
        scored = torch.zeros(batch.input_ids.shape)
        if not self.ranks.reports:
            return scored[:0]
        for (index, _), values in zip(cut, outputs, strict=True):
            scored[index, : values.shape[1]] = values
        return scored

    async def hidden(self, batch: TrainingBatch) -> RowTensors:
        """The last hidden states (n, H) of each row at its n selected tokens, in the type of the computation; no rows
        on a rank that does not report. Needs a model with a plain head; `batch` is as in `score`.
        """
        return await self._read_selected(batch, partial(read_hidden, options=self._options))

    async def token_logprobs(self, batch: TrainingBatch, count: int, temperature: float) -> RowTensors:
        """Ids and log-probabilities (n, 2, count + K) float32 of each row at its n selected tokens: of the `count`
        likeliest tokens, then of the K tokens that rows carry as `STUDENT_IDS`; no rows on a rank that does not report.
        """
        read = partial(read_token_logprobs, options=self._options, count=count, temperature=temperature)
        return await self._read_selected(batch, read)

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Move weights, optimizer state, or both to host memory. Returns the bytes moved on this rank."""
        return self.strategy.offload(model=model, optimizer=optimizer)

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Move weights, optimizer state, or both back to the device. Returns the bytes moved on this rank."""
        return self.strategy.onload(model=model, optimizer=optimizer)

    def refuse_non_finite_state(self) -> None:
        """Check the state before it is saved. Raises `NonFiniteError`, which names the weight or the part of the
        optimizer's state that is not finite.
        """
        self._refuse_non_finite("before saving", optimizer=True)

    def stage(self) -> tuple[dict[str, Any], int]:
        """Copy this rank's part of the state into host memory, where it stays unchanged until `write_staged`.

        Returns the numbers to store with it, and the bytes of its tensors.
        """
        self._staged = [shard.copy_to_host() for shard in self.strategy.tensor_shards()]
        return {}, sum(shard.numbers.nbytes for shard in self._staged)

    async def write_staged(self, storage: Storage, folder: str) -> StoredFile:
        """Write the staged state into the folder of a checkpoint, in a thread, while this rank continues. Raises
        `RunError` if writing fails.
        """
        staged, self._staged = self._staged, []
        name = file_of_rank(self._role, self.ranks.rank, self.ranks.size)
        try:
            return await asyncio.to_thread(write_shards, staged, storage, folder, name)
        except OSError as error:
            need = sum(shard.numbers.nbytes for shard in staged)
            raise RunError(could_not_write(storage, f"{storage.where}/{folder}/{name}", error, need)) from error

    def load_state(self, source: TensorSource, numbers: Mapping[str, Any]) -> None:
        """Load a staged state, bit for bit, whatever strategy and number of ranks staged it.

        Raises `ResumeError` on every rank if the state belongs to another model.
        """
        self.strategy.load_state(source)

    def mix(self, source: TensorSource, share: float) -> None:
        """Replace the weights w by share w' + (1 - share) w, with the weights w' of `source`. Raises `ResumeError` if
        they are those of another model.
        """
        before = [weight.detach().clone() for _, weight in self.strategy.shards(optimizer=False)]
        self.load_state(source, {})
        if share < 1:
            for (_, weight), own in zip(self.strategy.shards(optimizer=False), before, strict=True):
                weight.detach().mul_(share).add_(own, alpha=1 - share)

    def close(self) -> None:
        """Leave the process group. Only `close` may be called afterwards, and does nothing then."""
        if self._joined:
            self._joined = False
            self.strategy.close()
            self.ranks.leave()

    def _refuse_non_finite(self, when: str, *, optimizer: bool = False) -> None:
        named = [(name, entry.detach()) for name, entry in self.strategy.shards(optimizer=optimizer) if entry.numel()]
        numbers = [item for _, item in named if item.is_floating_point()]
        if get_total_norm(numbers).isfinite():  # NaN and infinity survive in a norm
            return
        broken = next(
            (name for name, element in named if not element.isfinite().all()), None
        )  # or only the norm overflowed
        if broken is not None:
            raise NonFiniteError(
                f"{broken} of the {self._title} holds NaN or infinity {when}: it is not saved, and no engine gets it. "
                f"Lower {self._section.path_of('optimizer_config.lr')}"
            )

    def _asks_routers(self, section: ShardedModelConfig) -> bool:
        """Whether the model has routers that are measured or replayed. Raises `ModelError` if that is configured for a
        model without routers.
        """
        costs, replays = RouterCosts.of(section), section.moe_enable_routing_replay
        if known_routers(self.model):
            return replays or isinstance(section, LearnerConfig)
        if costs or replays:
            name = "moe_enable_routing_replay" if replays else f"router_{'aux' if costs.aux_coef else 'z'}_loss_coef"
            raise ModelError(
                "this model has no experts, or its type of router is not supported: remove " + section.path_of(name)
            )
        return False

    async def _read_selected(self, batch: TrainingBatch, read: Callable[[nn.Module, MicroBatch], Tensor]) -> RowTensors:
        """What `read` gives for the selected tokens of a micro-batch, by row; none on a rank that does not report."""
        cut, outputs = self._outputs(batch, read)
        if not self.ranks.reports:
            return RowTensors(values=torch.zeros(0), counts=torch.zeros(0, dtype=torch.int64))
        rows: dict[int, Tensor] = {}
        for (index, micro), states in zip(cut, outputs, strict=True):
            row_states = states.split(micro.loss_mask.sum(1).tolist())
            rows |= zip(index.tolist(), row_states, strict=True)
        return RowTensors.of([rows[row] for row in range(len(batch))])

    def _outputs(
        self, batch: TrainingBatch, read: Callable[[nn.Module, MicroBatch], Tensor]
    ) -> tuple[list[tuple[Tensor, TrainingBatch]], list[Tensor]]:
        """Micro-batches with the indices of their rows, and what `read` gives for each, in host memory if this rank
        reports.
        """
        if batch.micro_batches is None:
            [batch] = self._budget.plan([batch])
        cut = list(micro_batches(batch, self._forward_rows))
        outputs = self.strategy.forward([self._options.prepare(micro) for _, micro in cut], read)
        return cut, to_host(outputs) if self.ranks.reports else outputs

    def _forward(self, model: nn.Module, micro: MicroBatch) -> Outputs:
        return self._read(model, micro, self._options)


def token_budget(run: RunBasics) -> TokenBudget:
    """The configured token budget of micro-batches."""
    limit = run.max_tokens_per_microbatch
    return TokenBudget(
        tokens=limit if limit > 0 else None,
        at_least=run.min_microbatches,
        keep_groups=run.use_sample_packing and run.share_group_prompts,
    )


def _context(
    run: RunBasics,
    section: ShardedModelConfig,
    ranks: Ranks,
    optimizer: OptimizerConfig | None,
    mover: DeviceMover | None,
) -> StrategyContext:
    """The arguments of a strategy on these ranks."""
    return StrategyContext(
        run=run,
        section=section,
        ranks=ranks,
        device=torch.device(required_device(run)),
        compute_dtype=getattr(torch, required(run.compute_dtype, run.path_of("compute_dtype"))),
        optimizer=optimizer,
        micro_batch_rows=run.micro_train_batch_size_per_gpu * run.rows_of_an_item,
        loss_scale=loss_scale_of(run, section, ranks.size) if optimizer else None,
        mover=mover or DeviceMover(),
        degrees=facts_of(run).degrees_of(section),
        router_costs=RouterCosts.of(section),
    )


def required_device(run: RunBasics) -> Literal["cpu", "cuda"]:
    """The device once `resolve()` has replaced `auto`. Raises `ConfigError` if it has not."""
    return required(None if run.device == "auto" else run.device, run.path_of("device"))

"""All ranks of a role as one learner, which the training loop calls wherever the ranks run.

Rows are dealt to the replicas of the model: in order and in equal numbers, or for an update whose micro-batches are
bounded in tokens, packed over the whole batch into equally many micro-batches. The ranks of one replica get the same
rows, and one of them reports. Token weights, which depend on the whole mini-batch, are computed here before rows are
dealt, and reports are merged here afterwards. The number of ranks therefore does not change the result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import attrs
import torch
from torch import Tensor

from skyrl.batch import RowTensors, TrainingBatch, is_per_token
from skyrl.checkpoint.manifest import StoredFile
from skyrl.checkpoint.shards import TensorSource
from skyrl.learners.budget import TokenBudget
from skyrl.learners.rank_metrics import Metrics, Moments, merge_metrics
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import LearningWorker, Objective, weighed
from skyrl.learners.workers.model_worker import ModelWorker
from skyrl.planning.replicas import Replicas
from skyrl.processes.handles import Group
from skyrl.storage.disk import Storage

W_co = TypeVar("W_co", bound=ModelWorker, covariant=True)
L_co = TypeVar("L_co", bound=LearningWorker, covariant=True)
R = TypeVar("R")
T = TypeVar("T")


class ScorerGroup(Generic[W_co]):
    """The ranks of a model that scores."""

    def __init__(
        self,
        ranks: Group[W_co],
        budget: TokenBudget | None = None,
        *,
        replicas: Replicas | None = None,
        rows_of_an_item: int = 1,
    ) -> None:
        """`budget` bounds micro-batches by tokens; it must equal the workers' budget, and is planned here for all.

        `replicas` says which ranks compute on the same rows; by default each rank has its own rows. The `Ranks` of the
        workers must come from the same `replicas`. `rows_of_an_item`: see `deal`.
        """
        self.ranks = ranks
        self._rows_of_an_item = rows_of_an_item
        self._budget = budget or TokenBudget()
        self._replicas = replicas or Replicas(tuple(range(len(ranks))))

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) float32: the scores of all rows, as a single worker would compute them."""
        return await self.scored_by(ModelWorker.score, batch)

    async def scored_by(
        self, method: Callable[[W_co, TrainingBatch], Awaitable[Tensor]], batch: TrainingBatch
    ) -> Tensor:
        """(B, L) float32: the scores of all rows by a method of the workers, with the contract of `score`."""
        results = self._reported(await self.ranks.deal(method, self._shares(batch)))
        scored = torch.zeros(sum(len(rows) for rows in results), batch.input_ids.shape[1])
        start = 0
        for rows in results:
            scored[start : start + len(rows), : rows.shape[1]] = rows
            start += len(rows)
        return scored[: len(batch)]

    async def hidden(self, batch: TrainingBatch) -> RowTensors:
        """The last hidden states of all rows at their selected tokens; see `ModelWorker.hidden`."""
        return self._results_by_row(batch, await self.ranks.deal(ModelWorker.hidden, self._shares(batch)))

    async def token_logprobs(
        self, batch: TrainingBatch, count: int, temperature: float
    ) -> tuple[RowTensors, RowTensors]:
        """Ids (n, count + K) int64 and log-probabilities of all rows at their selected tokens; see
        `ModelWorker.token_logprobs`.
        """
        method = ModelWorker.token_logprobs
        table = self._results_by_row(batch, await self.ranks.deal(method, self._shares(batch), count, temperature))
        return attrs.evolve(table, values=table.values[:, 0].long()), attrs.evolve(table, values=table.values[:, 1])

    def _results_by_row(self, batch: TrainingBatch, results: Sequence[RowTensors]) -> RowTensors:
        return RowTensors.of([row for result in self._reported(results) for row in result.rows()][: len(batch)])

    def _shares(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """The rows of each rank, which are the rows of its replica."""
        shares = self._budget.plan(deal(batch, self._replicas.count, rows_of_an_item=self._rows_of_an_item))
        return [shares[replica] for replica in self._replicas.of_rank]

    def _packed(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """The rows of each rank for an update, whose order does not matter."""
        count = self._replicas.count
        if self._budget.tokens is None or count == 1:
            return self._shares(batch)
        shares = self._budget.pack(_divisible(batch, count, self._rows_of_an_item), count)
        return [shares[replica] for replica in self._replicas.of_rank]

    def _reported(self, results: Sequence[T]) -> list[T]:
        """One result for each replica, in order of replicas."""
        return [results[rank] for rank in self._replicas.reporting]

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Every rank offloads its state from its device. Returns the bytes moved by all."""
        return sum(await self.ranks.call(ModelWorker.offload, model=model, optimizer=optimizer))

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Every rank loads its state back onto its device. Returns the bytes moved by all."""
        return sum(await self.ranks.call(ModelWorker.onload, model=model, optimizer=optimizer))

    async def refuse_non_finite_state(self) -> None:
        """Raises `NonFiniteError` if a weight or a part of the optimizer's state is not finite on any rank."""
        await self.ranks.call(ModelWorker.refuse_non_finite_state)

    async def stage(self) -> tuple[dict[str, Any], int]:
        """Every rank copies its part of the state into host memory. Returns the numbers to store with it, and bytes."""
        staged = await self.ranks.call(ModelWorker.stage)
        return staged[0][0], sum(size for _, size in staged)

    async def write_staged(self, storage: Storage, folder: str) -> list[StoredFile]:
        """Every rank writes its staged state into the folder of a checkpoint, and may continue learning meanwhile."""
        return await self.ranks.call(ModelWorker.write_staged, storage, folder)

    async def load_state(self, source: TensorSource, numbers: Mapping[str, Any]) -> None:
        """Load a staged state, whatever strategy and number of ranks staged it. Raises `ResumeError`."""
        await self.ranks.call(ModelWorker.load_state, source, numbers)

    async def mix(self, source: TensorSource, share: float) -> None:
        """Mix other weights into those of a model that does not learn: see `ModelWorker.mix`."""
        await self.ranks.call(ModelWorker.mix, source, share)

    async def close(self) -> None:
        """Every rank leaves the process group."""
        await self.ranks.call(ModelWorker.close)


class LearnerGroup(ScorerGroup[L_co]):
    """The ranks of a model that learns."""

    def __init__(
        self,
        ranks: Group[L_co],
        budget: TokenBudget | None = None,
        *,
        replicas: Replicas | None = None,
        rows_of_an_item: int = 1,
    ) -> None:
        """See `ScorerGroup` for the arguments."""
        super().__init__(ranks, budget, replicas=replicas, rows_of_an_item=rows_of_an_item)
        self._shapes_of: dict[bool, list[tuple[str, tuple[int, ...]]]] = {}

    async def forward_backward(self, batch: TrainingBatch, objective: Objective) -> Metrics:
        """Add the gradient of the objective over the batch to those that `optimizer_step` will use. Gradients of calls
        add up: an objective that is a mean is one over each call's batch.

        Returns metrics over all tokens of the batch; of rows that are left out, over a sample.
        """
        shares = self._packed(weighed(objective, batch))
        measured = objective.measured_only(batch)
        seen: list[dict[str, Moments]] = []
        if measured is not None:
            measure, sample = LearningWorker.measure_share, self._shares(measured[0])
            seen = self._reported(await self.ranks.deal(measure, sample, objective))
        learned = merge_metrics(
            self._reported(await self.ranks.deal(LearningWorker.forward_backward_share, shares, objective))
        )
        return (learned if measured is None else learned.merged_with(seen, measured[1])).metrics()

    async def optimizer_step(self, settings: StepSettings) -> Metrics:
        """One optimizer step with the gradients of all `forward_backward` since the last one, which are dropped.
        Returns metrics of the step. Raises the errors of `LearningWorker.optimizer_step`.
        """
        return self._reported(await self.ranks.call(LearningWorker.optimizer_step, settings))[0]

    async def profile(self, folder: Path | None) -> None:
        """Every rank traces its updates into `folder` from now on; None: no rank does."""
        await self.ranks.call(LearningWorker.profile, folder)

    async def shapes(self, *, adapter: bool = False) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every weight, in the order in which they are streamed; with `adapter`, only of the
        adapter's tensors. The answer is cached: training changes only values.
        """
        if adapter not in self._shapes_of:
            self._shapes_of[adapter] = (await self.ranks.call(LearningWorker.shapes, adapter))[0]
        return self._shapes_of[adapter]

    async def export_weights(
        self,
        consume: Callable[[Iterator[tuple[str, Tensor]]], R],
        *,
        everywhere: bool = False,
        adapter: bool = False,
        dtype: str | None = None,
    ) -> R:
        """Call `consume`, which can be pickled, on an iterator over the whole weights in the process of rank 0. Returns
        its result.

        With `everywhere` it is called on every rank; with `adapter` it gets only the adapter's tensors. Each weight has
        its whole shape. A consumer that rounds all weights to one type names it as `dtype`.
        """
        results = await self.ranks.call(
            LearningWorker.export_weights, consume, everywhere=everywhere, adapter=adapter, dtype=dtype
        )
        return cast(R, results[0])  # None on other ranks only


def deal(batch: TrainingBatch, replicas: int, *, rows_of_an_item: int = 1) -> list[TrainingBatch]:
    """Deal equal numbers of consecutive rows to the replicas; the rows of an item (such as a pair) stay together. If
    the items do not divide evenly, the last is repeated with no token selected, which changes no sum and no mean.
    """
    batch = _divisible(batch, replicas, rows_of_an_item)
    return list(batch.split(len(batch) // replicas))


def _divisible(batch: TrainingBatch, replicas: int, rows_of_an_item: int) -> TrainingBatch:
    """The batch with the last item repeated until the items divide evenly, its tokens not selected."""
    rows, size = len(batch), rows_of_an_item
    count = -(rows // size) % replicas
    if not count:
        return batch
    index = torch.cat([torch.arange(rows), torch.arange(rows - size, rows).repeat(count)])
    tensors = attrs.asdict(batch, recurse=False, filter=attrs.filters.exclude("extras"))
    present = {name: value[index] for name, value in tensors.items() if value is not None}
    for name in ("loss_mask", "loss_weights", "row_weights", "kl_weights", "entropy_weights"):
        if name in present:
            present[name] = present[name].clone()
            present[name][rows:] = 0
    if size > 1:  # separate items, which may be in other micro-batches
        first = int(batch.groups.max()) + 1
        present["groups"][rows:] = torch.arange(first, first + count).repeat_interleave(size)
    extras = {name: carried.select(index) for name, carried in batch.extras.items()}
    for name in filter(is_per_token, extras):  # nothing is selected in idle rows
        carried = batch.extras[name]
        none = carried.counts.new_zeros(len(index) - rows)
        extras[name] = attrs.evolve(carried, counts=torch.cat([carried.counts, none]))
    return attrs.evolve(batch, extras=extras, **present)

"""All ranks of a role as one learner: what the loop calls, wherever the ranks live.

Rows are dealt in order and in equal numbers to the replicas of the model; the ranks of one replica get the same rows,
and one of them reports. What has to be computed over the whole mini-batch, the weights of its tokens, is computed here,
before; what is reported is merged here, after. So the number of ranks changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import attrs
import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.checkpoint.manifest import StoredFile
from skyrl.checkpoint.shards import TensorSource
from skyrl.learners.budget import TokenBudget
from skyrl.learners.learning_worker import LearningWorker, Objective, weighed
from skyrl.learners.model_worker import ModelWorker
from skyrl.learners.rank_metrics import Metrics, merged
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
        """`budget` bounds micro-batches by tokens; it is the one that the workers have, and planned here for all.

        `replicas` says which ranks compute on the same rows; by default each has rows of its own. The `Ranks` of the
        workers have to come from the same. `rows_of_an_item`: see `deal`.
        """
        self.ranks = ranks
        self._rows_of_an_item = rows_of_an_item
        self._budget = budget or TokenBudget()
        self._replicas = replicas or Replicas(tuple(range(len(ranks))))

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) float32: row by row what one worker would say."""
        results = self._reported(await self.ranks.deal(ModelWorker.score, self._shares(batch)))
        scored = torch.zeros(sum(len(rows) for rows in results), batch.input_ids.shape[1])
        start = 0
        for rows in results:
            scored[start : start + len(rows), : rows.shape[1]] = rows
            start += len(rows)
        return scored[: len(batch)]

    def _shares(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """The rows of each rank: those of its replica."""
        shares = self._budget.plan(deal(batch, self._replicas.count, rows_of_an_item=self._rows_of_an_item))
        return [shares[replica] for replica in self._replicas.of_rank]

    def _reported(self, results: Sequence[T]) -> list[T]:
        """One result for each replica, in order of replicas."""
        return [results[rank] for rank in self._replicas.reporting]

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Every rank leaves its device. Bytes moved by all."""
        return sum(await self.ranks.call(ModelWorker.offload, model=model, optimizer=optimizer))

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Every rank comes back to its device. Bytes moved by all."""
        return sum(await self.ranks.call(ModelWorker.onload, model=model, optimizer=optimizer))

    async def refuse_non_finite_state(self) -> None:
        """Raises `NonFiniteError` if a weight or a part of the optimizer's state is not finite on any rank."""
        await self.ranks.call(ModelWorker.refuse_non_finite_state)

    async def stage(self) -> tuple[dict[str, Any], int]:
        """Every rank copies its part of the state into host memory. The numbers that belong to it, and its bytes."""
        staged = await self.ranks.call(ModelWorker.stage)
        return staged[0][0], sum(size for _, size in staged)

    async def write_staged(self, storage: Storage, folder: str) -> list[StoredFile]:
        """Every rank writes what it staged into the folder of a checkpoint, and may learn on meanwhile."""
        return await self.ranks.call(ModelWorker.write_staged, storage, folder)

    async def load_state(self, source: TensorSource, numbers: Mapping[str, Any]) -> None:
        """Become what was staged, by whatever strategy and number of ranks. Raises `ResumeError`."""
        await self.ranks.call(ModelWorker.load_state, source, numbers)

    async def close(self) -> None:
        """Every rank leaves the others."""
        await self.ranks.call(ModelWorker.close)


class LearnerGroup(ScorerGroup[L_co]):
    """The ranks of a model that learns."""

    def __init__(
        self,
        ranks: Group[L_co],
        objective: Objective,
        budget: TokenBudget | None = None,
        *,
        replicas: Replicas | None = None,
        rows_of_an_item: int = 1,
    ) -> None:
        """`objective` is the one that the workers have: here it weighs whole mini-batches."""
        super().__init__(ranks, budget, replicas=replicas, rows_of_an_item=rows_of_an_item)
        self.objective = objective
        self._metadata: dict[bool, list[tuple[str, tuple[int, ...], str]]] = {}

    async def update(self, batch: TrainingBatch) -> Metrics:
        """One optimizer step over the mini-batch; the metrics are those of all its tokens."""
        shares = self._shares(weighed(self.objective, batch))
        results = await self.ranks.deal(LearningWorker.update_share, shares)
        return merged(self._reported(results)).metrics()

    async def profile(self, folder: Path | None) -> None:
        """Every rank traces its updates into `folder` from now on; None: no rank does."""
        await self.ranks.call(LearningWorker.profile, folder)

    async def metadata(self, *, adapter: bool = False) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and type of every weight, in the order in which they are streamed; with `adapter`, of the tensors
        of the adapter alone. The ranks are asked once: training changes values only.
        """
        if adapter not in self._metadata:
            self._metadata[adapter] = (await self.ranks.call(LearningWorker.metadata, adapter))[0]
        return self._metadata[adapter]

    async def stream(
        self,
        consume: Callable[[Iterator[tuple[str, Tensor]]], R],
        *,
        everywhere: bool = False,
        adapter: bool = False,
        dtype: str | None = None,
    ) -> R:
        """Call `consume`, which can be pickled, on the whole weights, one at a time, in the process of rank 0; returns
        its result.

        With `everywhere` it is given all of them on every rank; with `adapter`, those of the adapter alone. Each weight
        has its whole shape. A consumer that rounds all weights to one type names it as `dtype`.
        """
        results = await self.ranks.call(
            LearningWorker.stream, consume, everywhere=everywhere, adapter=adapter, dtype=dtype
        )
        return cast(R, results[0])  # None on other ranks only


def deal(batch: TrainingBatch, replicas: int, *, rows_of_an_item: int = 1) -> list[TrainingBatch]:
    """Deal as many consecutive rows to each replica, those of an item (such as both of a pair) together. Where they do
    not divide, the last item is repeated with no token selected: it changes no sum and no mean.
    """
    missing = -(len(batch) // rows_of_an_item) % replicas
    if missing:
        batch = _with_idle_items(batch, missing, rows_of_an_item)
    return list(batch.split(len(batch) // replicas))


def _with_idle_items(batch: TrainingBatch, count: int, size: int) -> TrainingBatch:
    rows = len(batch)
    index = torch.cat([torch.arange(rows), torch.arange(rows - size, rows).repeat(count)])
    present = {name: value[index] for name, value in attrs.asdict(batch, recurse=False).items() if value is not None}
    for name in ("loss_mask", "loss_weights", "row_weights", "kl_weights", "entropy_weights"):
        if name in present:
            present[name] = present[name].clone()
            present[name][rows:] = 0
    if size > 1:  # items of their own, which may be in other micro-batches
        first = int(batch.groups.max()) + 1
        present["groups"][rows:] = torch.arange(first, first + count).repeat_interleave(size)
    return attrs.evolve(batch, **present)

"""Micro-batches bounded by a number of tokens: which rows of each rank go through the model together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import attrs
import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.planning.micro_batches import Plan, dealt_plans, equal_plans


@attrs.frozen(kw_only=True)
class TokenBudget:
    """`trainer.max_tokens_per_microbatch`, and the rows that stay in one micro-batch."""

    tokens: int | None = None
    """Bound on the tokens of a micro-batch. None: micro-batches have a fixed number of rows."""

    at_least: int = 1
    """Least number of micro-batches; there are never more of them than rows."""

    keep_groups: bool = True
    """Neighbouring rows of one group stay together, and the prompt that they share counts once."""

    def plan(self, shares: Sequence[TrainingBatch]) -> list[TrainingBatch]:
        """The rows of each rank, each with the number of its micro-batch; all ranks get equally many micro-batches."""
        if self.tokens is None:
            return list(shares)
        for keep_groups in (self.keep_groups, False):  # without groups where a rank has fewer than others micro-batches
            items = [_items(share, keep_groups) for share in shares]
            tokens = [[count for _, count in own] for own in items]
            plans = equal_plans(tokens, self.tokens, at_least=self.at_least)
            if all(item for plan in plans for item in plan):
                break
        return [
            share.with_fields(micro_batches=_numbers(share, [row for row, _ in own], plan))
            for share, own, plan in zip(shares, items, plans, strict=True)
        ]

    def pack(self, batch: TrainingBatch, replicas: int) -> list[TrainingBatch]:
        """Rows for each replica, packed over the whole batch, each with the number of its micro-batch; all replicas get
        equally many micro-batches. `replicas` divides the number of rows, of which stretches of a group stay together.
        """
        assert self.tokens is not None
        for keep_groups in (self.keep_groups, False):  # without groups where they are fewer than micro-batches
            items = _items(batch, keep_groups)
            plans = dealt_plans([tokens for _, tokens in items], self.tokens, replicas, at_least=self.at_least)
            if all(item for plan in plans for item in plan):
                break
        return [_share(batch, [row for row, _ in items], plan) for plan in plans]


def micro_batches(batch: TrainingBatch, rows: int) -> Iterator[tuple[Tensor, TrainingBatch]]:
    """Indices (R,) int64 of the rows of each micro-batch, and the rows themselves: as planned, or `rows` at a time."""
    if batch.micro_batches is None:
        indices = torch.arange(len(batch), device=batch.lengths.device).split(rows)
    else:
        count = int(batch.micro_batches.max()) + 1
        indices = tuple((batch.micro_batches == number).nonzero().squeeze(1) for number in range(count))
    for index in indices:
        yield index, batch.select(index)


def _items(batch: TrainingBatch, keep_groups: bool) -> list[tuple[tuple[int, ...], int]]:
    """Rows that stay together, and their number of tokens."""
    lengths = batch.lengths.tolist()
    if not keep_groups or batch.answer_lengths is None or batch.trajectories is not None:  # steps differ in prompts
        return [((row,), length) for row, length in enumerate(lengths)]
    answers, groups = batch.answer_lengths.tolist(), batch.groups.tolist()
    items = []
    for _, members in groupby(range(len(batch)), key=groups.__getitem__):
        rows = tuple(members)
        items.append((rows, lengths[rows[0]] - answers[rows[0]] + sum(answers[row] for row in rows)))
    return items


def _share(batch: TrainingBatch, items: Sequence[tuple[int, ...]], plan: Plan) -> TrainingBatch:
    """The rows of one replica, in the order of the batch, with the numbers of their micro-batches."""
    numbers = {row: number for number, own in enumerate(plan) for item in own for row in items[item]}
    rows = sorted(numbers)
    share = batch.select(torch.tensor(rows))
    return share.with_fields(micro_batches=torch.tensor([numbers[row] for row in rows]))


def _numbers(batch: TrainingBatch, items: Sequence[tuple[int, ...]], plan: Sequence[Sequence[int]]) -> Tensor:
    numbers = torch.zeros(len(batch), dtype=torch.long)
    for number, own in enumerate(plan):
        for item in own:
            numbers[list(items[item])] = number
    return numbers.to(batch.lengths.device)

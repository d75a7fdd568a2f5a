"""The training batch: rows of token ids and, for each token, the numbers that the objective needs.

One row is prompt, then response, then padding: `input_ids[b, t]` is the t-th token of row b, and every per-token tensor
has the same shape (B, L) and describes that token. So `old_logprobs[b, t]` is log pi_old(token t | tokens before t), in
nats, and is only meaningful where `loss_mask` is true. A batch is frozen; each stage of a step returns a copy with more
fields filled:

    batch = batch.with_fields(old_logprobs=...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Self

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class RowTensors:
    """One tensor for each row of a batch, with as many entries as the row needs: the pixel values of its images, a
    teacher's distribution at each of its tokens.

    Example: rows with 2, 0 and 1 entries of one number make `values=[[5.], [6.], [7.]]`, `counts=[2, 0, 1]`.
    """

    values: Tensor
    """(n_1 + ... + n_B, ...): the entries of all rows, one row after the other."""

    counts: Tensor
    """(B,) int64: number of entries of each row. Always on the host, which cuts by them."""

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> Self:
        """From one tensor (n, ...) for each row. Raises `ValueError` if they differ in type or in another size."""
        kinds = {(row.dtype, row.shape[1:]) for row in rows}
        if len(kinds) > 1:
            descriptions = " and ".join(sorted(f"{dtype} (n, {', '.join(map(str, shape))})" for dtype, shape in kinds))
            raise ValueError(f"rows of one batch carry different tensors: {descriptions}")
        return cls(values=torch.cat(list(rows)), counts=torch.tensor([len(row) for row in rows]))

    def __len__(self) -> int:
        return len(self.counts)

    def rows(self) -> tuple[Tensor, ...]:
        """The tensor (n, ...) of each row."""
        parts: tuple[Tensor, ...] = self.values.split(self.counts.tolist())
        return parts

    def select(self, rows: Tensor) -> Self:
        """The tensors of the rows at these indices (K,), in this order."""
        tensors = self.rows()
        return attrs.evolve(
            self,
            values=torch.cat([self.values[:0], *(tensors[row] for row in rows.tolist())]),
            counts=self.counts[rows],
        )

    def padded(self, width: int) -> Tensor:
        """(B, width, ...): the entries of each row, then zeros; for one entry per token, from the first token on, as
        the tensors of a `TrainingBatch`. Raises `ValueError` for a row with more entries.
        """
        if len(self) and int(self.counts.max()) > width:
            raise ValueError(f"a row carries {int(self.counts.max())} entries, and {width} are expected at most")
        indices = (torch.arange(width) < self.counts.unsqueeze(1)).flatten().nonzero().squeeze(1)
        zeros = self.values.new_zeros(len(self) * width, *self.values.shape[1:])
        placed: Tensor = zeros.index_copy(0, to_device(indices, self.values.device), self.values)
        return placed.view(len(self), width, *zeros.shape[1:])

    def to(self, device: torch.device | str) -> Self:
        """The same on another device; the host does not wait for it."""
        return attrs.evolve(self, values=to_device(self.values, device))


@attrs.frozen(kw_only=True, eq=False)
class TrainingBatch:
    """B rows of at most L tokens. Fields that a later stage fills are None until then.

    Example: the rows [5, 6 | 7, 8] and [5 | 9], prompt before the bar, make
    `input_ids=[[5, 6, 7, 8], [5, 9, 0, 0]]`, `lengths=[4, 2]`, `loss_mask=[[0, 0, 1, 1], [0, 1, 0, 0]]`.
    """

    input_ids: Tensor
    """(B, L) int64; positions after a row's length are padding and are never read."""

    lengths: Tensor
    """(B,) int64: number of tokens in each row, padding excluded."""

    loss_mask: Tensor
    """(B, L) bool: true where the policy sampled the token. Never true at column 0."""

    rollout_logprobs: Tensor | None
    """(B, L) float32: the engine's log-probability of the token when it was sampled. None if they were not requested
    from the engine."""

    rewards: Tensor
    """(B, L) float32: reward credited to the token; a row's sum is its return."""

    groups: Tensor
    """(B,) int64: rows with the same number answer the same prompt."""

    answer_lengths: Tensor | None = None
    """(B,) int64: number of tokens of each row after its prompt, including the observations of later turns."""

    trajectory_lengths: Tensor | None = None
    """(B,) int64: `Trajectory.length` of the row's trajectory, the same in all of its rows."""

    baselines: Tensor | None = None
    """(B,) float32: raw reward of the greedy answer to the same prompt."""

    trajectories: Tensor | None = None
    """(B,) int64: rows with the same number are turns of one trajectory. None: each row is a whole trajectory."""

    last_step: Tensor | None = None
    """(B,) bool: the row is the last turn of its trajectory. Given together with `trajectories`."""

    token_weights: Tensor | None = None
    """(B, L) float32: weight of each token as given by the data, 0 where `loss_mask` is false. None: all tokens count
    the same."""

    micro_batches: Tensor | None = None
    """(B,) int64: index of the micro-batch of each row, from 0 without gaps. None: micro-batches are cut by number of
    rows."""

    routed_experts: Tensor | None = None
    """(B, L, layers, K) int16: the K experts that the engine chose for each token in each MoE layer; -1 where it chose
    none. None: the engine did not report them."""

    engines: Tensor | None = None
    """(B, L) int64: number of the engine that drew the token, in rows that were drawn with the weights that the policy
    had when the batch was made; -1 elsewhere. None: it is not known."""

    selected: Tensor | None = None
    """(N,) int64: indices of the true entries of the flattened (B x L) `loss_mask`. Filled on the host before a
    micro-batch goes to a device: indexing with a mask there would make the host wait for the device."""

    old_logprobs: Tensor | None = None
    """(B, L) float32: log-probabilities under the policy before this batch's first update. None if they equal the
    current ones, or if nothing reads them."""

    interpolation: Tensor | None = None
    """(B, L) float32: share of the current policy in log pi_old; `old_logprobs` is then the engine's part, see
    `skyrl.algorithms.off_policy`. None: `old_logprobs` is log pi_old itself."""

    ref_logprobs: Tensor | None = None
    """(B, L) float32: log-probabilities under the reference model."""

    teacher_logprobs: Tensor | None = None
    """(B, L) float32: log-probabilities under the teacher."""

    advantages: Tensor | None = None
    """(B, L) float32: advantage of each token, 0 where `loss_mask` is false."""

    values: Tensor | None = None
    """(B, L) float32: the critic's value, before this batch's first update, of the state the token was sampled in."""

    returns: Tensor | None = None
    """(B, L) float32: the target that the critic learns to predict at each token."""

    loss_weights: Tensor | None = None
    """(B, L) float32: weight of each token in the loss of the mini-batch."""

    row_weights: Tensor | None = None
    """(B,) float32: weight of each row in the router losses of the mini-batch; 0 for rows that only pad a rank's
    share."""

    kl_weights: Tensor | None = None
    """(B, L) float32: weight of each token in the KL loss of the mini-batch."""

    entropy_weights: Tensor | None = None
    """(B, L) float32: weight of each token in the entropy of the mini-batch."""

    extras: Mapping[str, RowTensors] = attrs.field(factory=dict)
    """Tensors that rows carry besides tokens, by name. They stay with their rows wherever the batch is cut, packed or
    sent. The objective reads them."""

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    def with_fields(self, **fields: Tensor | None) -> Self:
        """A copy with some fields filled. Raises `ValueError` if the shape of a tensor is not (B, L), or not (B,) for a
        field with one number per row.
        """
        for name, value in fields.items():
            expected_shape = self.lengths.shape if name in PER_ROW else self.input_ids.shape
            if name not in _OTHER_SHAPES and isinstance(value, Tensor) and value.shape != expected_shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, the batch {tuple(self.input_ids.shape)}")
        filled: Mapping[str, Any] = fields
        return attrs.evolve(self, **filled)

    def carrying(self, **extras: RowTensors) -> Self:
        """A copy whose rows carry more `extras`. Raises `ValueError` for those of another number of rows."""
        for name, carried in extras.items():
            if len(carried) != len(self):
                raise ValueError(f"extras {name!r} are those of {len(carried)} rows, the batch has {len(self)}")
        return attrs.evolve(self, extras={**self.extras, **extras})

    @property
    def scores(self) -> Tensor:
        """(B,) float32: the return of each row, the sum of its rewards."""
        return self.rewards.sum(dim=1)

    def over_trajectories(self, values: Tensor, reduce: Literal["sum", "amax"] = "sum") -> Tensor:
        """(B,) to (B,): sum or maximum of `values` over all rows of each row's trajectory; `values` unchanged if every
        row is a whole trajectory.
        """
        if self.trajectories is None:
            return values
        zeros = torch.zeros(int(self.trajectories.max()) + 1, dtype=values.dtype, device=values.device)
        return zeros.scatter_reduce(0, self.trajectories, values, reduce, include_self=False)[self.trajectories]

    @property
    def ends(self) -> Tensor:
        """(B,) bool: one row of each trajectory, its last."""
        return torch.ones_like(self.lengths, dtype=torch.bool) if self.last_step is None else self.last_step

    def with_selected(self) -> Self:
        """A copy with `selected` filled in; call it while the batch is on the host."""
        return attrs.evolve(self, selected=self.loss_mask.flatten().nonzero().squeeze(1))

    def pick(self, values: Tensor) -> Tensor:
        """(B, L) -> (N,): the values at the selected tokens, row by row."""
        return values[self.loss_mask] if self.selected is None else values.flatten()[self.selected]

    def scatter(self, values: Tensor) -> Tensor:
        """(N,) float32 of the selected tokens, row by row -> (B, L), 0 elsewhere. The inverse of `pick`."""
        zeros = torch.zeros(self.input_ids.shape, device=values.device)
        if self.selected is None:
            return zeros.masked_scatter(self.loss_mask, values)  # its gradient would make the host wait for the GPU
        return zeros.flatten().index_copy(0, self.selected, values).view_as(zeros)

    def select(self, rows: Tensor) -> Self:
        """The rows at these indices (K,), in this order, padding trimmed to the longest of them."""
        width = int(self.lengths[rows].max())
        return self._map(
            lambda tensor: tensor[rows] if tensor.dim() == 1 else tensor[rows, :width],
            lambda carried: carried.select(rows),
        )

    def rows(self, start: int, stop: int) -> Self:
        """The rows from `start` to `stop` (exclusive), padding trimmed to the longest of them."""
        width = int(self.lengths[start:stop].max())
        return self._map(
            lambda tensor: tensor[start:stop] if tensor.dim() == 1 else tensor[start:stop, :width],
            lambda carried: carried.select(torch.arange(start, stop)),
        )

    def split(self, size: int) -> Iterator[Self]:
        """Consecutive batches of `size` rows; the last may be smaller."""
        for start in range(0, len(self), size):
            yield self.rows(start, min(start + size, len(self)))

    @property
    def answers(self) -> int:
        """Number of trajectories: the number of rows, or fewer if some rows are turns of one trajectory."""
        return len(self) if self.last_step is None else int(self.last_step.sum())

    def split_by_answers(self, size: int) -> Iterator[Self]:
        """Consecutive batches of `size` trajectories with all their rows; the last may have fewer."""
        if self.last_step is None:
            yield from self.split(size)
            return
        ends = [row + 1 for row in self.last_step.nonzero().squeeze(1).tolist()]
        bounds = [0, *ends[size - 1 :: size]]
        bounds += [] if bounds[-1] == len(self) else [len(self)]
        for start, stop in pairwise(bounds):
            yield self.rows(start, stop)

    def to(self, device: torch.device | str) -> Self:
        """A copy of the batch on another device; the host does not wait for it."""
        moved = None if self.selected is None else to_device(self.selected, device)
        changed = self._map(lambda tensor: to_device(tensor, device), lambda carried: carried.to(device))
        return attrs.evolve(changed, selected=moved)

    def _map(self, change: Callable[[Tensor], Tensor], carry: Callable[[RowTensors], RowTensors]) -> Self:
        tensors = {
            field.name: getattr(self, field.name)
            for field in attrs.fields(type(self))
            if field.name not in ("selected", "extras")
        }
        changed = {name: change(tensor) for name, tensor in tensors.items() if tensor is not None}
        extras = {name: carry(carried) for name, carried in self.extras.items()}
        return attrs.evolve(self, selected=None, extras=extras, **changed)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor, of any shape, on `device`. A copy from host memory to a GPU goes through page-locked memory, so the
    host does not wait for it.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_OTHER_SHAPES = frozenset({"selected", "routed_experts"})

TEACHER_HIDDEN = "teacher_hidden"
"""Name of the extras with the last hidden states (H,) of the teacher; of several teachers, `teacher_hidden/<name>`, in
the rows of each."""

TEACHER_IDS = "teacher_ids"
"""Name of the extras with the ids (K,) of the tokens whose probabilities are compared with the teacher's; -1 for none.
"""

TEACHER_LOGPROBS = "teacher_logprobs"
"""Name of the extras with the teacher's log-probabilities (K,) of the tokens in `TEACHER_IDS`."""

STUDENT_IDS = "student_ids"
"""Name of the extras with the ids (K,) of the policy's likeliest tokens."""


def is_per_token(name: str) -> bool:
    """Whether the extras of this name have one entry for each selected token of their rows."""
    return name.partition("/")[0] in {TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOGPROBS, STUDENT_IDS}


TEACHER_PROMPT = "teacher_prompt"
"""Name of the extras with the prompt of each row as the teacher reads it: token ids, a hint among them."""

PER_ROW = frozenset(
    {
        "lengths",
        "groups",
        "answer_lengths",
        "trajectory_lengths",
        "baselines",
        "trajectories",
        "last_step",
        "micro_batches",
        "row_weights",
    }
)
"""Fields that hold one number for each row; the others hold one for each token."""

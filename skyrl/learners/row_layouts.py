"""Layouts of the rows of a batch for a model: padded, packed into one row, or packed with one copy of each prompt; and
the part of a packed row that a rank computes, if several ranks share the row.

All layouts give the same result for every token, up to rounding, at different cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any, Self

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from skyrl.batch import TrainingBatch, to_device
from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.errors import ModelError
from skyrl.models.attention.segment_attention import Segments, sees_whole_rows, takes_segments
from skyrl.models.attention.segments import Segment, joined_ranges
from skyrl.models.attention.shared_rows import RowSharing, SequenceGroup
from skyrl.models.routers import RoutedTokens
from skyrl.planning.batches import uneven_heads


@attrs.frozen(kw_only=True, eq=False)
class Stretch:
    """The n of the N selected tokens of a row that are predicted in this rank's stretch, if ranks share the row."""

    group: SequenceGroup

    own: Tensor
    """(n,) int64: indices of these tokens among the N."""

    most: int
    """The largest n of any rank, at least 1."""

    positions: Tensor
    """(N,) int64: index of each selected token in (ranks x most,), where the values of all ranks are concatenated."""

    @classmethod
    def of(cls, readers: Tensor, group: SequenceGroup) -> Self:
        """The stretch of this rank; `readers` (N,) int64 is the rank that reads each selected token."""
        of_rank = torch.nn.functional.one_hot(readers, group.size)  # (N, ranks)
        number = of_rank.cumsum(0).gather(1, readers.unsqueeze(1)).squeeze(1) - 1  # among those of the same rank
        most = max(int(of_rank.sum(0).max()), 1)
        own = (readers == group.rank).nonzero().squeeze(1)
        return cls(group=group, own=own, most=most, positions=readers * most + number)

    def join(self, values: Tensor) -> Tensor:
        """(n, ...) of this rank's tokens -> (N, ...) of all. Collective: every rank must call it, also with n = 0."""
        padding = values.new_zeros((self.most - len(values), *values.shape[1:]))
        return self.group.gather(torch.cat([values, padding]))[self.positions]

    def to(self, device: torch.device) -> Self:
        """The stretch on another device; the host does not wait for the copy."""
        return attrs.evolve(self, own=to_device(self.own, device), positions=to_device(self.positions, device))


@attrs.frozen(kw_only=True, eq=False)
class RowLayout:
    """Inputs of a model, and the positions of the selected tokens in its output."""

    inputs: dict[str, Any]
    """Keyword arguments of the model; `logits_to_keep` names the columns whose output is needed."""

    chosen: Tensor
    """(n,) int64: places of the selected tokens that this rank reads, in row order, in the flattened rows x kept
    columns of the output."""

    stretch: Stretch | None = None
    """None: this rank reads all N selected tokens."""

    routed: RoutedTokens | None = None
    """The tokens as the routers of a mixture of experts see them. None: routers are neither measured nor replayed."""

    def pick(self, answer: Tensor) -> Tensor:
        """The output at the tokens that this rank reads: (rows, kept columns, ...) -> (n, ...)."""
        return answer.flatten(0, 1)[self.chosen]

    def local(self, values: Tensor) -> Tensor:
        """(N, ...) of all selected tokens -> (n, ...) of the tokens that this rank reads."""
        return values if self.stretch is None else values[self.stretch.own]

    def join(self, values: Tensor) -> Tensor:
        """(n, ...) of the tokens that this rank reads -> (N, ...) of all selected tokens, joined from all ranks."""
        return values if self.stretch is None else self.stretch.join(values)

    def to(self, device: torch.device) -> Self:
        """The layout of a batch on another device; the host does not wait for it."""
        return attrs.evolve(
            self,
            inputs={name: _moved(value, device) for name, value in self.inputs.items()},
            chosen=to_device(self.chosen, device),
            stretch=None if self.stretch is None else self.stretch.to(device),
            routed=None if self.routed is None else _tokens_to_device(self.routed, device),
        )


def _tokens_to_device(tokens: RoutedTokens, device: torch.device) -> RoutedTokens:
    return attrs.evolve(
        tokens,
        lengths=to_device(tokens.lengths, device),
        rows=to_device(tokens.rows, device),
        positions=to_device(tokens.positions, device),
        replayed=None if tokens.replayed is None else to_device(tokens.replayed, device),
    )


def _moved(value: object, device: torch.device) -> object:
    match value:
        case Tensor():
            return to_device(value, device)
        case Segments():
            return attrs.evolve(value, device=device)
        case _:
            return value


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together, with their layout. Everything that depends on their lengths is computed
    on the host before they move to a device, so that the host never waits for the device afterwards.
    """

    rows: TrainingBatch
    layout: RowLayout

    engines: tuple[int, ...] = ()
    """Numbers of the engines that drew tokens of the rows with the policy's weights."""

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> Self:
        """The micro-batch on another device."""
        return attrs.evolve(self, rows=self.rows.to(device), layout=self.layout.to(device))


def padded(batch: TrainingBatch, *, routed: bool = False) -> RowLayout:
    """The batch as padded rows. Padding is on the right, where causal attention hides it from real tokens, so no mask
    is needed.

    A batch without selected tokens still goes through the model, because other ranks wait for this one in every layer.
    `routed` adds the positions of tokens for routers.
    """
    used, tokens = batch.loss_mask.any(0), batch.input_ids.numel()
    first = int(used.int().argmax()) if used.any() else len(used)  # no column before it is ever selected
    columns = torch.arange(first - 1, batch.input_ids.shape[1] - 1, device=batch.input_ids.device)
    chosen = batch.loss_mask[:, first:].flatten().nonzero().squeeze(1)
    return RowLayout(
        inputs={"input_ids": batch.input_ids, "logits_to_keep": columns},
        chosen=chosen,
        routed=_routed(batch, torch.arange(tokens).view_as(batch.input_ids), tokens) if routed else None,
    )


def packed(
    batch: TrainingBatch, *, segmented: bool, share_prompts: bool, lengths_given: bool = False, routed: bool = False
) -> RowLayout:
    """One row without padding, in which positions start again with each sequence.

    `segmented`: the model's attention accepts `segments`. Otherwise transformers isolates packed sequences by their
    positions, but only without attention mask and cache; with either, sequences see each other without a warning.
    `lengths_given` passes the lengths to FlashAttention's kernels, which every layer would have to find otherwise.
    `share_prompts` puts neighbouring rows of one prompt behind one copy of it; it requires segments. `routed` adds the
    positions of tokens for routers.
    """
    units = list(_units(batch, share_prompts and segmented))
    rows, starts, lengths = torch.tensor([piece for unit in units for piece in unit.pieces]).unbind(1)
    owners, positions = rows.repeat_interleave(lengths), joined_ranges(starts, lengths)
    ids, tokens = batch.input_ids[owners, positions], len(positions)
    column_of = torch.empty_like(batch.input_ids)  # where in the packed row each token of the batch is
    column_of[owners, positions] = torch.arange(tokens)
    offsets = list(accumulate((unit.tokens for unit in units), initial=0))
    copies = [(row, offset, unit.prompt) for unit, offset in zip(units, offsets, strict=False) for row in unit.rows[1:]]
    if copies:  # prompts that are read where the first row of their unit has them
        rows, starts, lengths = torch.tensor(copies).unbind(1)
        owners, columns = rows.repeat_interleave(lengths), joined_ranges(torch.zeros_like(starts), lengths)
        column_of[owners, columns] = joined_ranges(starts, lengths)
    segments = (Segment(offset, unit.prompt, unit.answers) for unit, offset in zip(units, offsets, strict=False))
    rows, columns = batch.loss_mask.nonzero(as_tuple=True)
    predicting = column_of[rows, columns - 1]  # a token is predicted at the one before it
    keep, chosen = predicting.unique(return_inverse=True)
    inputs: dict[str, Any] = {
        "input_ids": ids.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "logits_to_keep": keep,
    }
    if segmented:
        inputs["segments"] = Segments(tuple(segments), ids.device)
    elif lengths_given:
        bounds = pad(batch.lengths.cumsum(0), (1, 0)).int()
        longest = int(batch.lengths.max())
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return RowLayout(inputs=inputs, chosen=chosen, routed=_routed(batch, column_of, tokens) if routed else None)


def _routed(batch: TrainingBatch, place_of: Tensor, tokens: int) -> RoutedTokens:
    """The tokens of a batch for routers; `place_of` (B, L) is each token's index among the `tokens` of the input."""
    columns = torch.arange(batch.input_ids.shape[1])
    rows, columns = (columns < batch.lengths.unsqueeze(1)).nonzero(as_tuple=True)
    positions, replayed = place_of[rows, columns], None
    if batch.routed_experts is not None:
        replayed = batch.routed_experts.new_full((tokens, *batch.routed_experts.shape[2:]), -1)
        replayed[positions] = batch.routed_experts[rows, columns]
    return RoutedTokens(lengths=batch.lengths, rows=rows, positions=positions, replayed=replayed)


@attrs.frozen(kw_only=True)
class _Unit:
    """Rows that are laid out together: their prompt once, then the rest of each row."""

    rows: tuple[int, ...]
    prompt: int
    answers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of all answers."""
        return self.prompt + sum(self.answers)

    @property
    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Row, first column and number of tokens of each stretch, in order."""
        yield self.rows[0], 0, self.prompt
        for row, tokens in zip(self.rows, self.answers, strict=False):
            yield row, self.prompt, tokens


def _units(batch: TrainingBatch, share_prompts: bool) -> Iterator[_Unit]:
    """Units of neighbouring rows of one group, if they have answers and the same prompt; else one unit per row."""
    lengths = batch.lengths.tolist()
    single_units = [_Unit(rows=(row,), prompt=length, answers=()) for row, length in enumerate(lengths)]
    if not share_prompts or batch.answer_lengths is None:
        yield from single_units
        return
    answers, groups = batch.answer_lengths.tolist(), batch.groups.tolist()
    for _, members in groupby(range(len(batch)), key=groups.__getitem__):
        rows = tuple(members)
        prompts = {lengths[row] - answers[row] for row in rows}
        if len(rows) > 1 and len(prompts) == 1 and _share_prompt(batch, rows, min(prompts)):
            yield _Unit(rows=rows, prompt=min(prompts), answers=tuple(answers[row] for row in rows))
        else:
            yield from (single_units[row] for row in rows)


def _share_prompt(batch: TrainingBatch, rows: tuple[int, ...], length: int) -> bool:
    prompts = batch.input_ids[rows[0] : rows[-1] + 1, :length]
    selected = batch.loss_mask[rows[0] : rows[-1] + 1, :length]
    return length > 0 and bool((prompts == prompts[0]).all()) and not selected.any()


def local_stretch(row: RowLayout, sharing: RowSharing) -> RowLayout:
    """The part of a packed row, laid out with segments, that this rank computes.

    All ranks have the same number of tokens. Padding after the row's end is a separate segment.
    """
    tokens = row.inputs["input_ids"].shape[1]
    everyone, order = sharing.everyone, sharing.order(tokens)
    length, padding = len(order) // everyone.size, len(order) - tokens
    first = length * everyone.rank
    columns = order[first : first + length]
    ids, positions = (pad(row.inputs[name], (0, padding))[:, columns] for name in ("input_ids", "position_ids"))
    segments: Segments = row.inputs["segments"]
    if padding:
        segments = attrs.evolve(segments, items=(*segments.items, Segment(tokens, padding)))
    predicting = order.argsort()[row.inputs["logits_to_keep"][row.chosen]]  # (N,): places in the order of all ranks
    stretch = Stretch.of(predicting // length, everyone)
    keep, chosen = (predicting[stretch.own] - first).unique(return_inverse=True)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": positions,
        "logits_to_keep": keep,
        "segments": segments,
        "row_sharing": sharing,
    }
    routed = None if row.routed is None else _local_tokens(row.routed, order, columns, sharing)
    return RowLayout(inputs=inputs, chosen=chosen, stretch=stretch, routed=routed)


def _local_tokens(row: RoutedTokens, order: Tensor, columns: Tensor, sharing: RowSharing) -> RoutedTokens:
    """The tokens of a packed row at this rank's columns (n,); `order` lists the columns of all ranks."""
    positions = order.argsort()[row.positions] - len(columns) * sharing.everyone.rank
    own = (positions >= 0) & (positions < len(columns))
    replayed = row.replayed
    if replayed is not None:
        padding = replayed.new_full((len(order) - len(replayed), *replayed.shape[1:]), -1)
        replayed = torch.cat([replayed, padding])[columns]
    return attrs.evolve(row, rows=row.rows[own], positions=positions[own], replayed=replayed, group=sharing.everyone)


def refuse_unshareable(
    model: nn.Module, ranks: int, section: ShardedModelConfig, *, sequence: int, context: int, tensor: int
) -> None:
    """Raises `ModelError`, which names a field of `section`, if `sequence` x `context` of the `ranks` cannot
    share a row of this transformers model, whose heads are divided among `tensor` ranks.
    """
    config: Any = model.config
    field = section.path_of(f"{'sequence' if sequence > 1 else 'context'}_parallel_size")
    if not takes_segments(model) or not sees_whole_rows(config):
        raise ModelError(
            "ranks can share a sequence only if attention is sdpa and every layer of the model sees the whole "
            f"sequence, without windows or chunks: set {field} = 1"
        )
    heads = config.get_text_config().num_attention_heads // tensor
    if uneven := uneven_heads(heads, sequence, ranks // tensor):
        sizes = " or ".join(map(str, uneven.nearest))
        raise ModelError(
            f"{sequence} ranks cannot share the model's {uneven.total} attention heads: set {field} = {sizes}, or "
            f"{section.path_of('context_parallel_size')} = {sequence}, which needs no heads"
        )

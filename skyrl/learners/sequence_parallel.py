"""The part of a packed row that this rank computes, if several ranks share the row."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.errors import ModelError
from skyrl.learners.row_layouts import RowLayout
from skyrl.learners.stretches import Stretch
from skyrl.models.attention.segment_attention import Segments, sees_whole_rows, takes_segments
from skyrl.models.attention.segments import Segment
from skyrl.models.attention.shared_rows import RowSharing
from skyrl.models.routers import RoutedTokens
from skyrl.planning.batches import uneven_heads


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
    transformer: Any = model
    field = section.path_of(f"{'sequence' if sequence > 1 else 'context'}_parallel_size")
    if not takes_segments(model) or not sees_whole_rows(transformer.config):
        raise ModelError(
            "ranks can share a sequence only if attention is sdpa and every layer of the model sees the whole "
            f"sequence, without windows or chunks: set {field} = 1"
        )
    heads = transformer.config.get_text_config().num_attention_heads // tensor
    if uneven := uneven_heads(heads, sequence, ranks // tensor):
        sizes = " or ".join(map(str, uneven.nearest))
        raise ModelError(
            f"{sequence} ranks cannot share the model's {uneven.total} attention heads: set {field} = {sizes}, or "
            f"{section.path_of('context_parallel_size')} = {sequence}, which needs no heads"
        )

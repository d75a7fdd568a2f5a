"""The stretch of a packed row that one of the ranks that share sequences computes."""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn
from torch.nn.functional import pad

from skyrl.errors import ModelError
from skyrl.learners.row_layouts import RowLayout
from skyrl.learners.stretches import Stretch
from skyrl.models.segment_attention import Segments, takes_segments
from skyrl.models.segments import Segment
from skyrl.models.ulysses import SequenceGroup
from skyrl.planning.batches import uneven_heads


def own_stretch(row: RowLayout, group: SequenceGroup) -> RowLayout:
    """The part of a packed row, laid out with segments, that this rank computes.

    The row is cut into equal stretches. Padding behind its end, fewer tokens than ranks, is a segment of its own.
    """
    tokens = row.inputs["input_ids"].shape[1]
    length = -(-tokens // group.size)
    first, padding = length * group.rank, length * group.size - tokens
    ids, positions = (
        pad(row.inputs[name], (0, padding))[:, first : first + length] for name in ("input_ids", "position_ids")
    )
    segments: Segments = row.inputs["segments"]
    if padding:
        segments = attrs.evolve(segments, each=(*segments.each, Segment(tokens, padding)))
    predicting = row.inputs["logits_to_keep"][row.chosen]  # (N,): columns of the whole row
    stretch = Stretch.of(predicting // length, group)
    keep, chosen = (predicting[stretch.own] - first).unique(return_inverse=True)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": positions,
        "logits_to_keep": keep,
        "segments": segments,
        "sequence_group": group,
    }
    return RowLayout(inputs=inputs, chosen=chosen, stretch=stretch)


def refuse_unshareable(model: nn.Module, sharing: int, ranks: int, field: str, *, tensor: int = 1) -> None:
    """Raises `ModelError`, which names `field`, if no `sharing` of the `ranks` can share a row of this transformers
    model, each of whose heads `tensor` ranks have among them.
    """
    transformer: Any = model
    if not takes_segments(model):
        raise ModelError(
            "ranks can share a sequence where attention is sdpa and every layer of the model sees the whole sequence, "
            f"without windows or chunks: set {field} = 1"
        )
    heads = transformer.config.get_text_config().num_attention_heads // tensor
    if uneven := uneven_heads(heads, sharing, ranks // tensor):
        sizes = " or ".join(map(str, uneven.nearest))
        raise ModelError(
            f"{sharing} ranks cannot share the model's {uneven.whole} attention heads: set {field} = {sizes}"
        )

"""Layout of rows of which every token's output is read, whatever is predicted there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skyrl.learners.forward import ForwardOptions
from skyrl.learners.row_layouts import RowLayout
from skyrl.models.attention.segment_attention import Segments
from skyrl.models.attention.segments import Segment

LEAST_SHARED = 16
"""Tokens from which a common beginning of rows is computed once; below, attention costs more than it saves."""


@frozen(kw_only=True, eq=False)
class WholeRows:
    """Rows laid out for a model."""

    layout: RowLayout
    """Its `chosen` are the places of all tokens, row after row."""

    starts: tuple[int, ...]
    """Place of the first token of each stretch in the flattened input, and at the end the number of places."""


def whole_rows(stretches: Sequence[Sequence[Tensor]], options: ForwardOptions) -> WholeRows:
    """Stretches of rows of token ids (T,) int64 on the host, packed into one row if the model allows it, else padded.
    In a packed row, the common beginning of neighbouring rows of a stretch occurs once if `options` say so.
    """
    if not options.pack:
        lines = [row for stretch in stretches for row in stretch]
        padded = pad_sequence(lines, batch_first=True)
        width = padded.shape[1]
        filled = torch.arange(width) < torch.tensor([len(row) for row in lines]).unsqueeze(1)
        layout = RowLayout(inputs={"input_ids": padded}, chosen=filled.flatten().nonzero().squeeze(1))
        places = accumulate((len(stretch) * width for stretch in stretches), initial=0)
        return WholeRows(layout=layout, starts=tuple(places))
    shares = options.segmented and options.share_prompts
    ids, positions, chosen, segments, starts = [], [], [], list[Segment](), [0]
    offset = 0
    for stretch in stretches:
        for shared, rows in _units(stretch, shares):
            answers = tuple(len(row) - shared for row in rows) if len(rows) > 1 else ()
            segments.append(Segment(offset, shared, answers))
            ids.append(rows[0][:shared])
            positions.append(torch.arange(shared))
            beginning = torch.arange(offset, offset + shared)
            offset += shared
            for row in rows:
                after = offset + len(row) - shared
                ids.append(row[shared:])
                positions.append(torch.arange(shared, len(row)))
                chosen += [beginning, torch.arange(offset, after)]
                offset = after
        starts.append(offset)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat(ids).unsqueeze(0),
        "position_ids": torch.cat(positions).unsqueeze(0),
    }
    if options.segmented:
        inputs["segments"] = Segments(tuple(segments), torch.device("cpu"))
    elif options.lengths_given:
        bounds = torch.tensor([*(segment.start for segment in segments), offset], dtype=torch.int32)
        longest = max(segment.tokens for segment in segments)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return WholeRows(layout=RowLayout(inputs=inputs, chosen=torch.cat(chosen)), starts=tuple(starts))


def _units(rows: Sequence[Tensor], shares: bool) -> Iterator[tuple[int, list[Tensor]]]:
    """Neighbouring rows that are laid out together, with the number of tokens at their beginning that occur once: all
    of a row that is alone. A row joins the ones before it if they then still save as many tokens.
    """
    unit, shared = [rows[0]], len(rows[0])
    for row in rows[1:]:
        common = min(_common_beginning(unit[0], row), shared, len(unit[0]) - 1, len(row) - 1)
        if shares and common >= LEAST_SHARED and common * len(unit) >= shared * (len(unit) - 1):
            unit.append(row)
            shared = common
        else:
            yield shared, unit
            unit, shared = [row], len(row)
    yield shared, unit


def _common_beginning(one: Tensor, other: Tensor) -> int:
    """Number of tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.int().argmax()) if differ.any() else length

"""Layout of rows of which every token's output is read, whatever is predicted there."""

from __future__ import annotations

from collections.abc import Sequence
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


@frozen(kw_only=True, eq=False)
class WholeRows:
    """Rows laid out for a model."""

    layout: RowLayout
    """Its `chosen` are the places of all tokens, row after row."""

    starts: tuple[int, ...]
    """Place of the first token of each row in the flattened input, and at the end the number of places."""


def whole_rows(rows: Sequence[Tensor], options: ForwardOptions) -> WholeRows:
    """Rows of token ids (T,) int64 on the host, packed into one row if the model allows it, else padded."""
    lengths = [len(row) for row in rows]
    if not options.pack:
        ids = pad_sequence(list(rows), batch_first=True)
        width = ids.shape[1]
        filled = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        layout = RowLayout(inputs={"input_ids": ids}, chosen=filled.flatten().nonzero().squeeze(1))
        return WholeRows(layout=layout, starts=tuple(range(0, ids.numel() + 1, width)))
    starts = tuple(accumulate(lengths, initial=0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    inputs: dict[str, Any] = {"input_ids": torch.cat(list(rows)).unsqueeze(0), "position_ids": positions.unsqueeze(0)}
    if options.segmented:
        each = tuple(Segment(start, length) for start, length in zip(starts, lengths, strict=False))
        inputs |= {"segments": Segments(each, positions.device)}
    elif options.lengths_given:
        bounds, longest = torch.tensor(starts, dtype=torch.int32), max(lengths)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return WholeRows(layout=RowLayout(inputs=inputs, chosen=torch.arange(starts[-1])), starts=starts)

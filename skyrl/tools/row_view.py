"""Shows one row of a run's data as the run trains on it: its tokens, the learned ones marked, cut or left out."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from skyrl.chats.masks import Ids, Weights
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.chats.view import marked_text
from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.loading.kinds import kind_named, kind_of
from skyrl.data.row_streams import rows_in_order
from skyrl.data.sources import BadRow, Row, checked_rows, place_of
from skyrl.data.tokenized_rows import LabelledRow, PairRow, PreferenceRow, RankedRow, SupervisedRow
from skyrl.errors import DataError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.sampling import columns_of, prompt_maker
from skyrl.tools.data_report import is_streamed
from skyrl.tree import get_at


def row_page(run: Any, source: int, index: int) -> str:
    """Row number `index` of source number `source` of a run, both counted from 0, as text.

    Raises `DataError` with the reason if the row does not exist or is bad.
    """
    kind = kind_named(run.kind)
    sources = get_at(run, kind.data)
    if not 0 <= source < len(sources):
        raise DataError(f"there is no source {source}: the run has {len(sources)}, counted from 0")
    name = sources[source]
    row = _row(run, name, index)  # before the tokenizer, which may have to be fetched from the hub
    experiment: Any = experiment_class(run)(run)
    if kind.rows == "prompts":
        return _prompt(run, experiment.tokenizer, row, name, index)
    tokenizer, max_length = experiment.tokenizer, experiment.max_length
    try:
        return _supervised(run, tokenizer, row, name, max_length)
    except DataError as error:
        raise DataError(f"{place_of(name, index)}: {error}") from error


def _supervised(run: SupervisedConfig, tokenizer: ChatTokenizer, row: Row, source: str, max_length: int) -> str:
    reader = kind_of(run).row_reader()((source,), tokenizer, run, max_length)
    full_row = reader.read_full(row, source, f"{source}:0")
    trained = reader.shortened(full_row)
    size = f"{full_row.length} tokens, more than max_length = {max_length}"
    if trained is None:
        reason = "too_long = skip" if run.too_long == "skip" else "cut there, nothing of it is learned"
        fate = f"this row is left out: it has {size} ({reason})"
    else:
        fate = f"cut: it has {size} (too_long = truncate)" if trained is not full_row else ""
    return "\n".join(
        filter(None, (_page(tokenizer, full_row if trained is None else trained, trained is not None), fate))
    )


def _page(
    tokenizer: ChatTokenizer, row: SupervisedRow | PreferenceRow | PairRow | RankedRow | LabelledRow, is_learned: bool
) -> str:
    if isinstance(row, SupervisedRow):
        weights = row.weights if is_learned else np.zeros_like(row.weights)
        return _marked(tokenizer, row.token_ids, weights)
    if isinstance(row, LabelledRow):
        page = _marked(tokenizer, row.token_ids, is_learned * row.mask.astype(np.float32))
        return f"{page}; the answer is {'good' if row.label else 'bad'}"
    if isinstance(row, PairRow | RankedRow):
        numbers = [str(index + 1) for index in range(len(row.sides))]
        names = ["chosen", "rejected"] if isinstance(row, PairRow) else numbers
        pages = [_marked(tokenizer, ids, is_learned * mask.astype(np.float32)) for ids, mask in row.sides]
        return "\n\n".join(f"===== {name}\n{page}" for name, page in zip(names, pages, strict=True))
    texts = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (row.chosen, row.rejected))
    sizes = f"{len(row.chosen)} and {len(row.rejected)} tokens, margin {row.margin:g}"
    return "\n\n".join(
        (
            *(f"===== {name}\n{text}" for name, text in zip(("chosen", "rejected"), texts, strict=True)),
            f"{sizes}; the score is read at the last token of each" if is_learned else sizes,
        )
    )


def _marked(tokenizer: ChatTokenizer, ids: Ids, weights: Weights) -> str:
    learned = int((weights != 0).sum())
    return f"{marked_text(tokenizer, ids, weights)}\n\n{len(ids)} tokens, {learned} of them learned"


def _row(run: Any, source: str, index: int) -> Row:
    columns = columns_of(run) if kind_of(run).rows == "prompts" else None
    rows = rows_in_order(source, columns, streamed=is_streamed(run))
    row = next(islice(rows if columns is None else checked_rows(source, columns, rows), index, None), None)
    if row is None:
        raise DataError(f"{source} has no row {index}; rows are counted from 0")
    if isinstance(row, BadRow):
        raise DataError(row.reason)
    return row


def _prompt(run: SkyRLTrainConfig, tokenizer: ChatTokenizer, row: Row, source: str, index: int) -> str:
    """The text of a prompt, none of which is learned."""
    prompt, longest = prompt_maker(run, tokenizer).of_row(row, source, index), run.trainer.max_prompt_length
    if isinstance(prompt, BadRow):
        raise DataError(f"{prompt.reason} (data.bad_rows = skip)")
    text = tokenizer.decode(prompt.token_ids, clean_up_tokenization_spaces=False)
    size = f"{text}\n\n{len(prompt.token_ids)} tokens"
    if len(prompt.token_ids) > longest:
        return f"{size}\nthis row is left out: it has more than trainer.max_prompt_length = {longest}"
    return f"{size}; what is sampled after them is learned"

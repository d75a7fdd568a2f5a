"""Shows one row of a run's data as the model receives it, with the learned tokens marked."""

from __future__ import annotations

from itertools import islice
from typing import Any

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.chats.view import marked_text
from skyrl.config import RewardModelConfig, SFTConfig
from skyrl.config.kinds import kind_named
from skyrl.data.conversations import without_nulls
from skyrl.data.row_forms import PreferenceForms, SupervisedForms
from skyrl.data.sources import BadRow, Row, in_table, iterate_rows
from skyrl.errors import DataError
from skyrl.experiments.experiment import experiment_class
from skyrl.tree import get_at


def row_page(run: Any, source: int, place: int) -> str:
    """Row number `place` of source number `source` of a run, both counted from 0, as text.

    Raises `DataError` with the reason if the row does not exist or cannot be trained on.
    """
    kind = kind_named(run.kind)
    sources = get_at(run, kind.data)
    if not 0 <= source < len(sources):
        raise DataError(f"there is no source {source}: the run has {len(sources)}, counted from 0")
    row = _row(sources[source], place)  # before the tokenizer, which may have to be fetched from the hub
    experiment: Any = experiment_class(run)(run)
    if run.kind == "rl":
        return _prompt(experiment, source, place)
    try:
        return _page(run, experiment.tokenizer, row)
    except DataError as error:
        raise DataError(f"{sources[source]}, row {place}: {error}") from error


def _page(run: object, tokenizer: ChatTokenizer, row: Row) -> str:
    if isinstance(run, SFTConfig):
        ids, weights = SupervisedForms(tokenizer, run)(row)
        return (
            f"{marked_text(tokenizer, ids, weights)}\n\n{len(ids)} tokens, {int((weights != 0).sum())} of them learned"
        )
    assert isinstance(run, RewardModelConfig)
    chosen, rejected, margin = PreferenceForms(tokenizer, run)(row)
    texts = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (chosen, rejected))
    sizes = f"{len(chosen)} and {len(rejected)} tokens, margin {margin:g}; the score is read at the last token of each"
    return "\n\n".join(f"===== {name}\n{text}" for name, text in zip(("chosen", "rejected"), texts, strict=True)) + (
        f"\n\n{sizes}"
    )


def _row(source: str, place: int) -> Row:
    found = next(islice(iterate_rows(source), place, None), None)
    if found is None:
        raise DataError(f"{source} has no row {place}; rows are counted from 0")
    if isinstance(found, BadRow):
        raise DataError(found.reason)
    row: Row = without_nulls(found) if in_table(source) else found
    return row


def _prompt(experiment: Any, source: int, place: int) -> str:
    """The text of a prompt, none of which is learned."""
    for prompt in experiment.train_dataset.prompts:
        if prompt.id == f"{source}:{place}":
            text = experiment.tokenizer.decode(prompt.token_ids, clean_up_tokenization_spaces=False)
            return f"{text}\n\n{len(prompt.token_ids)} tokens; what is sampled after them is learned"
    raise DataError(f"row {place} of source {source} has no prompt: it is too long, invalid or missing")

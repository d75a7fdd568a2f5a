"""`skyrl data inspect`, `split` and `show`: the data of a run, read as the run reads it.

Nothing is trained and no model is loaded: only its tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import evolve, frozen
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from skyrl.chats.masks import Ids, Weights, marked_text
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.loading.kinds import kind_of, reads_chats, samples_rollouts
from skyrl.data.conversations import without_inner_nulls
from skyrl.data.row_streams import rows_in_order
from skyrl.data.sources import BadRow, Row, checked_rows, kind_of_value, place_of
from skyrl.data.tokenized_rows import LabelledRow, PairRow, PreferenceRow, RankedRow, SupervisedRow
from skyrl.errors import DataError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.sampling import columns_of, prompt_maker
from skyrl.runs.run_tree import AnyRun
from skyrl.storage.atomic import atomic_file
from skyrl.tree import evolve_at, get_at

Part = Literal["train", "validation"]

PERCENTILES = (10, 50, 90, 99)
_ANY_LENGTH = 1 << 30
_EVALUATED = {"prompts": "data.val_data", "chats": "eval_datasets", "pairs": "eval_datasets"}
_BOUND = {"prompts": "trainer.max_prompt_length", "chats": "max_length", "pairs": "max_length"}
_QUESTION = {"prompts": "data.prompt_column", "chats": "messages_key", "pairs": "prompt_key"}


@frozen(kw_only=True)
class SourceReport:
    """One source, after the chat template."""

    part: Part
    source: str
    used: int = 0
    """Rows that the run would use."""

    columns: dict[str, str]
    """Type of each column of the first row."""

    tokens: dict[str, int]
    """Percentiles of the length of rows in tokens, those that are too long included; `longest` is the maximum."""

    too_long: int = 0
    cut: bool = False
    """Whether rows that are too long are cut, and used."""

    bound: int
    """Longest row that is used, in tokens."""

    bad: tuple[str, ...] = ()
    """Why rows are bad, in order."""

    repeated: int = 0
    """Rows that are equal to an earlier one of the same part, after the template."""

    refused: str = ""
    """Why the run would refuse the whole source."""


@frozen(kw_only=True)
class DataReport:
    """All sources of a run."""

    sources: tuple[SourceReport, ...]
    overlap: int
    """Validation rows that are also trained on, after the template."""

    bound: str
    """Path of the field that bounds the length of rows."""


def data_report(run: AnyRun) -> DataReport:
    """Read every source of the run."""
    kind = kind_of(run)
    seen: dict[Part, set[bytes]] = {"train": set(), "validation": set()}
    experiment: Any = experiment_class(run)(run)
    bound = run.trainer.max_prompt_length if samples_rollouts(run) else experiment.max_length
    reports, overlap = list[SourceReport](), 0
    parts: tuple[tuple[Part, str], ...] = (("train", kind.data), ("validation", _EVALUATED[kind.rows]))
    for part, path in parts:
        for source in get_at(run, path):
            report, keys = _report_source(run, kind, experiment.tokenizer, part, source, bound)
            overlap += sum(key in seen["train"] for key in keys) if part == "validation" else 0
            distinct = {*keys} - seen[part]
            seen[part] |= distinct
            reports.append(evolve(report, repeated=len(keys) - len(distinct)))
    return DataReport(sources=tuple(reports), overlap=overlap, bound=_BOUND[kind.rows])


def _report_source(
    run: AnyRun, kind: RunKind, tokenizer: ChatTokenizer, part: Part, source: str, bound: int
) -> tuple[SourceReport, list[bytes]]:
    """The report of a source, and a key for each row that is used: equal rows have equal keys."""
    try:
        streamed = part == "train" and is_streamed(run)
        first = next(iter(rows_in_order(source, streamed=streamed)), None)
        values = {} if first is None or isinstance(first, BadRow) else first
        columns = {name: kind_of_value(value) for name, value in values.items()}
        rows, bad = _read_rows(run, kind, tokenizer, source, streamed)
    except DataError as error:
        refused = SourceReport(part=part, source=source, columns={}, tokens={}, bound=bound, refused=str(error))
        return refused, []
    lengths = np.array([length for _, length in rows])
    tokens = {f"{share} %": int(np.percentile(lengths, share)) for share in PERCENTILES} if rows else {}
    keys = [key for key, length in rows if length <= bound or _cuts(run)]
    report = SourceReport(
        part=part,
        source=source,
        used=len(keys),
        columns=columns,
        tokens=tokens | ({"longest": int(lengths.max())} if rows else {}),
        too_long=int((lengths > bound).sum()) if rows else 0,
        cut=_cuts(run),
        bound=bound,
        bad=bad,
    )
    return report, keys


def _read_rows(
    run: AnyRun, kind: RunKind, tokenizer: ChatTokenizer, source: str, streamed: bool
) -> tuple[list[tuple[bytes, int]], tuple[str, ...]]:
    """Digest and length of every row that is not bad, and why the others are."""
    if samples_rollouts(run):
        prompts, bad = [], list[str]()
        rows_of_source = rows_in_order(source, columns_of(run), streamed=streamed)
        for prompt in prompt_maker(run, tokenizer).of_rows(rows_of_source, source):
            if isinstance(prompt, BadRow):
                bad.append(prompt.reason)
            else:
                ids = np.asarray(prompt.token_ids)
                prompts.append((xxh3_128_digest(ids.tobytes()), len(ids)))
        if not prompts:
            raise DataError(f"no row of {source} is a prompt; the first: {bad[0]}")
        return prompts, tuple(bad)
    reader = kind.row_reader()((source,), tokenizer, evolve_at(run, "bad_rows", "skip"), _ANY_LENGTH)
    sources = [rows_in_order(source, streamed=streamed)]
    rows = [(xxh3_128_digest(row.to_bytes()), row.length) for row in reader.rows(sources)]
    return rows, tuple(reader.tally.bad_rows)


def _cuts(run: AnyRun) -> bool:
    return reads_chats(run) and run.too_long == "truncate"


def text_of(report: DataReport) -> str:
    """The report for people."""
    lines: list[str] = []
    for source in report.sources:
        lines.append(f"{source.part}: {source.source}")
        if source.refused:
            lines.append(f"  refused   {source.refused}")
            continue
        left_out = len(source.bad) + (0 if source.cut else source.too_long)
        lines.append(f"  rows      {source.used + left_out}, of which {source.used} are used")
        lines.append(f"  columns   {', '.join(f'{name} ({kind})' for name, kind in source.columns.items())}")
        lines.append(f"  tokens    {', '.join(f'{name} {count}' for name, count in source.tokens.items())}")
        if source.too_long:
            fate = "are cut" if source.cut else "are left out"
            lines.append(
                f"  too long  {source.too_long} have more than {report.bound} = {source.bound} tokens and {fate}"
            )
        if source.bad:
            lines.append(f"  bad       {len(source.bad)}; the first: {source.bad[0]}")
        if source.repeated:
            lines.append(f"  repeated  {source.repeated} are equal to an earlier row")
    if report.overlap:
        lines.append(f"{report.overlap} validation rows are also trained on")
    return "\n".join(lines)


@frozen(kw_only=True)
class Halves:
    """The two files of a split."""

    train: str
    validation: str
    rows: tuple[int, int]
    """Rows of each."""


def split_data(run: AnyRun, folder: Path, share: float, seed: int) -> Halves:
    """Write the rows of all training sources to `train.jsonl` and `validation.jsonl` in `folder`, about `share` of them
    to the latter. Rows with the same prompt stay together. Raises `DataError` for a row that cannot be read, if a file
    is there already, and if a part would be empty.
    """
    names = np.fromiter((_question(row, run, seed) for row in _whole_rows(run)), np.uint64)
    questions = np.unique(names)  # of hashes, so that the first ones are a random choice
    held_out = round(share * len(questions))
    if held_out in (0, len(questions)):
        part = "train" if held_out else "validation"
        raise DataError(f"{len(questions)} different prompts leave none for {part} at a share of {share:g}")
    train, validation = (folder / f"{part}.jsonl" for part in ("train", "validation"))
    if existing := [file for file in (train, validation) if file.exists()]:
        raise DataError(f"{existing[0]} is there already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    is_held_out = names < questions[held_out]
    with ExitStack() as files:
        scratches = [files.enter_context(atomic_file(file)) for file in (train, validation)]
        kept, apart = (files.enter_context(scratch.open("w", encoding="utf-8")) for scratch in scratches)
        for row, is_apart in zip(_whole_rows(run), is_held_out, strict=True):
            (apart if is_apart else kept).write(f"{_json(row)}\n")
    sizes = int((~is_held_out).sum()), int(is_held_out.sum())
    return Halves(train=str(train), validation=str(validation), rows=sizes)


def _whole_rows(run: AnyRun) -> Iterator[Row]:
    """The rows of all training sources, read one by one."""
    for source in get_at(run, kind_of(run).data):
        for row in rows_in_order(source, streamed=is_streamed(run)):
            if isinstance(row, BadRow):
                raise DataError(row.reason)
            yield without_inner_nulls(row, source)


def is_streamed(run: AnyRun) -> bool:
    """Whether the run streams its training rows."""
    return bool(get_at(run, "data.streaming" if samples_rollouts(run) else "streaming"))


def _question(row: Row, run: AnyRun, seed: int) -> int:
    """A hash of what two rows have to share to be on the same side: the prompt, or the whole row if it has none."""
    column = get_at(run, _QUESTION[kind_of(run).rows])
    return xxh3_64_intdigest(_json(row.get(column, row)).encode(), seed=seed % (1 << 64))


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"a row has a value that JSON cannot hold: {error}") from error


def row_page(run: Any, source: int, index: int) -> str:
    """Row number `index` of source number `source` of a run, both counted from 0, as text.

    Raises `DataError` with the reason if the row does not exist or is bad.
    """
    kind = kind_of(run)
    sources = get_at(run, kind.data)
    if not 0 <= source < len(sources):
        raise DataError(f"there is no source {source}: the run has {len(sources)}, counted from 0")
    name = sources[source]
    row = _row(run, name, index)  # before the tokenizer, which may have to be fetched from the hub
    experiment: Any = experiment_class(run)(run)
    if kind.rows == "prompts":
        return _prompt(run, experiment.tokenizer, row, name, index)
    tokenizer, max_length = experiment.tokenizer, experiment.max_length  # their errors are not the row's
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

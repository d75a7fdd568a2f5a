"""The rows of a data file, read before a run starts: how many there are, which are bad, and what is odd in the others.

Reads only files, without torch and transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import Factory, frozen

from skyrl.chats.contents import ROLES, Blanks, asks_nothing, blanks_of
from skyrl.chats.masks import message_weights
from skyrl.chats.text import Message
from skyrl.config import ChatTemplateConfig, PreferenceConfig, RewardModelConfig, SkyRLTrainConfig, SupervisedConfig
from skyrl.config.foundation.reasoning_tasks import SCHEME
from skyrl.config.loading.kinds import is_preference_run, is_reward_model_run, reads_chats
from skyrl.data.conversations import refuse_media, without_inner_nulls
from skyrl.data.cursor import Tail, ends_before
from skyrl.data.preference_rows import answers_of
from skyrl.data.row_forms import blanks_of_text, chat_in, label_of, learns_all, margin_of, preference_chat
from skyrl.data.sources import BadRow, Columns, Row, answered, chat_of, iterate_rows
from skyrl.data.supervised_rows import row_of_token_ids
from skyrl.errors import ConfigError, DataError, Problem
from skyrl.experiments.model_checks import readable_files
from skyrl.models.files.chat_templates import configured_template
from skyrl.models.files.facts import ModelFiles
from skyrl.tree.names import nearest

QUICK_BYTES = 32 * 2**20
"""Largest file that is read before a run starts: about a fifth of a second of reading."""

_SHOWN = 2
"""Number of bad rows whose reasons are given."""


@frozen(kw_only=True)
class CountedRows:
    """Rows of a file."""

    rows: int
    """Number of rows, bad ones included."""

    bad: tuple[str, ...] = ()
    """Reasons of the bad ones; each begins with the place of the row."""

    blanks: Blanks | None = None
    """Empty prompts and answers; None if the rows were only counted."""

    roles: Mapping[str, int] = Factory(dict)
    """Index of the first row with a message of each role."""

    @property
    def good(self) -> int:
        """Number of rows that are not bad. Some may still be too long for the run."""
        return self.rows - len(self.bad)


@frozen
class JudgedRow:
    """Contents of a row that is not bad."""

    blanks: Blanks = Factory(Blanks)
    roles: frozenset[str] = frozenset()
    """Roles of its messages."""


Judge = Callable[[Row, int, str], JudgedRow]
"""Reads a row, given its number from 0 and the name of its source. Raises `DataError` for a bad one."""


def count_rows(source: str, judge: Judge, *, all_rows: bool) -> CountedRows | None:
    """The rows of a file or of a task of reasoning-gym; None if they cannot be counted quickly and `all_rows` does not
    ask for it.

    Raises `DataError` for a file that cannot be read.
    """
    path = Path(source).expanduser()
    if not all_rows and not source.startswith(SCHEME) and os.path.getsize(path) > QUICK_BYTES:
        return CountedRows(rows=_rows_of_parquet(path)) if path.suffix == ".parquet" else None
    rows, bad, blanks, roles = 0, [], Blanks(), dict[str, int]()
    for row in iterate_rows(source):
        rows += 1
        try:
            if isinstance(row, BadRow):
                raise DataError(row.reason)
            judged = judge(row, rows - 1, source)
        except DataError as error:
            bad.append(str(error))
        else:
            blanks += judged.blanks
            roles = {**dict.fromkeys(judged.roles - roles.keys(), rows - 1), **roles}
    return CountedRows(rows=rows, bad=tuple(bad), blanks=blanks, roles=roles)


def _rows_of_parquet(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def prompts_of(run: SkyRLTrainConfig) -> Judge:
    """Whether a row is a prompt with an answer and a task."""
    columns = Columns(prompt=run.data.prompt_column, answer=run.data.answer_column)

    def judge(row: Row, index: int, source: str) -> JudgedRow:
        full_row = answered(row, index, source, columns)
        chat = chat_of(full_row, index, source, columns)
        if not isinstance(full_row.get("env_class") or run.environment.task, str):
            raise DataError(f"{source}, row {index} names no env_class, and environment.env_class gives no default")
        return JudgedRow(Blanks(prompts=int(asks_nothing(chat))), _roles_in([chat]))

    return judge


def supervised_rows_of(run: SupervisedConfig) -> Judge:
    """Whether a row is a chat with something to learn, a pair of them, an answer with a label, or tokens of which some
    are learned. Rows of plain text pass, and rows of tokens where the tokenizer's files do not tell its vocabulary.
    """
    files = readable_files(run.model.path, run.tokenizer_path)

    def judge(row: Row, index: int, source: str) -> JudgedRow:
        row = without_inner_nulls(row, source)
        try:
            refuse_media(row)
            if is_preference_run(run) or is_reward_model_run(run):
                chats = _compared(row, run)
                return JudgedRow(_blanks_of_answers(chats), _roles_in(chats))
            if not reads_chats(run):
                return JudgedRow()
            chat = chat_in(row, run)
            if chat is None:
                if row.get("input_ids") is not None and files is not None and files.vocabulary is not None:
                    row_of_token_ids(row, run, files.vocabulary)
                return JudgedRow(blanks_of_text(row))
            blanks = blanks_of(chat, message_weights(chat, all_messages=learns_all(run)))
            return JudgedRow(blanks, _roles_in([chat]))
        except DataError as error:
            raise DataError(f"{source}, row {index}: {error}") from error

    return judge


def _roles_in(chats: Iterable[Sequence[Message]]) -> frozenset[str]:
    return frozenset(str(message.get("role")) for chat in chats for message in chat)


def _compared(row: Row, run: PreferenceConfig | RewardModelConfig) -> Sequence[Sequence[Message]]:
    """The whole chats of the answers of a row. Raises `DataError` for a bad row."""
    if is_preference_run(run) and run.unpaired:
        label_of(row.get(run.label_key), run.label_key)
        return [preference_chat(row, run.completion_key, run.prompt_key)]
    if is_preference_run(run):
        return answers_of(row, run)
    chosen, rejected = (preference_chat(row, key, run.prompt_key) for key in run.answer_keys)
    if chosen == rejected:
        raise DataError(f"{' and '.join(run.answer_keys)} are the same")
    margin_of(row.get(run.margin_key), run.margin_key)
    return [chosen, rejected]


def _blanks_of_answers(chats: Sequence[Sequence[Message]]) -> Blanks:
    """Blanks of chats with the same prompt, each of which ends with an answer."""
    blanks = Blanks()
    for chat in chats:
        answers = [index for index, message in enumerate(chat) if message.get("role") == "assistant"][-1:]
        blanks += blanks_of(chat, answers) if answers else Blanks()
    return Blanks(min(blanks.prompts, 1), blanks.answers)


def blank_parts(counted: CountedRows, field: str, source: str) -> Iterator[Problem]:
    """Warnings of empty prompts and answers, which may be meant."""
    for sentence in counted.blanks.sentences(f"the rows of {source}") if counted.blanks else ():
        yield Problem(path=field, message=sentence, severity="warning")


def unknown_roles(
    counted: CountedRows, path: str, source: str, files: ModelFiles | None, template: ChatTemplateConfig
) -> Iterator[Problem]:
    """Warnings of roles that neither chats usually have nor the chat template names: it may write them as they are, or
    drop their messages. None without a template.
    """
    unusual = {role: row for role, row in counted.roles.items() if role not in ROLES}
    try:
        text = configured_template(template) or (files.chat_template if files else None) if unusual else None
    except ConfigError:  # another check reports it
        return
    for role, row in unusual.items():
        if text is None or f"'{role}'" in text or f'"{role}"' in text:
            continue
        meant = nearest(role, ROLES)
        yield Problem(
            path=path,
            message=f"{source}, row {row} has a message of the role {role!r:.60}, unknown to the chat template",
            hint=f"did you mean {meant}?" if meant else f"usual roles are {', '.join(ROLES)}",
            severity="warning",
        )


def bad_rows(counted: CountedRows, field: str, skip: str, *, skips: bool) -> Iterator[Problem]:
    """The problem of a file's bad rows. `skip` is the setting that leaves such rows out, as `path = value`; with
    `skips` it is on, and rows that are left out are a warning unless none remains.
    """
    if not counted.bad:
        return
    others = len(counted.bad) - _SHOWN
    more = f"; {others} more {'is' if others == 1 else 'are'} bad" if others > 0 else ""
    yield Problem(
        path=field,
        message="; ".join(counted.bad[:_SHOWN]) + more,
        hint=f"they are left out ({skip})" if skips else f"mend the row, or leave such rows out with {skip}",
        severity="warning" if skips and counted.good else "error",
    )


def too_few_rows(
    counts: Sequence[CountedRows | None], path: str, batch: int, noun: str, *, skips: bool, otherwise: str = ""
) -> Iterator[Problem]:
    """The problem of data that does not fill one batch, if all its rows are counted. `otherwise` is another remedy."""
    known = [count.good if skips else count.rows for count in counts if count is not None]
    if len(known) == len(counts) and sum(known) < batch:
        message = f"{batch} {noun}, but the training data has {sum(known)}"
        yield Problem(path=path, message=message, hint=f"lower it to {sum(known)} or less{otherwise}")


def steps_without_rows(
    counts: Sequence[CountedRows | None], path: str, most: int | None, batch: int, epochs: tuple[str, int], tail: Tail
) -> Iterator[Problem]:
    """The warning of data that ends before the step of the field `path`, if all its rows are counted."""
    known = [count.good for count in counts if count is not None]
    if len(known) == len(counts) and (text := ends_before(most, sum(known), batch, epochs, tail)):
        yield Problem(path=path, message=text, hint=f"raise {epochs[0]}", severity="warning")

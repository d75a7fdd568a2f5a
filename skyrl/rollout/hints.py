"""Hints for a teacher: text that it reads before an answer, and that the policy did not read.

A hint changes the prompt of a row, and nothing else of it: the teacher scores the policy's own tokens. The prompt that
the teacher reads is carried by the row (`TEACHER_PROMPT`), so that it is recorded and sent with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from skyrl.batch import TEACHER_PROMPT
from skyrl.chats.rendering import Template
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import HintConfig
from skyrl.data.sources import is_null
from skyrl.errors import DataError, RunError
from skyrl.trajectory import Prompt, RowArray, TokenRow, Trajectory, TrajectoryGroup

FIELD = "trainer.algorithm.distillation.hint"


NextBatch = Callable[[int], Awaitable[tuple[TrajectoryGroup, ...]]]


def with_hints(next_batch: NextBatch, hints: Hints | None) -> NextBatch:
    """`next_batch` of a source of batches, whose rows then carry the prompts for the teacher."""
    if hints is None:
        return next_batch

    async def next_hinted_batch(version: int) -> tuple[TrajectoryGroup, ...]:
        return hints(await next_batch(version))

    return next_hinted_batch


@frozen(kw_only=True)
class Hints:
    """Gives every row of a group the prompt that a teacher reads: its own, with the hint of its answer if it has one
    and the longer prompt leaves room for the answer.
    """

    settings: HintConfig
    tokenizer: ChatTokenizer
    template_kwargs: Mapping[str, Any] = field(factory=dict)
    positions: int | None = None
    """Number of tokens that the teacher reads at most. None: no limit."""

    @cached_property
    def _template(self) -> Template:
        return Template(tokenizer=self.tokenizer, arguments=self.template_kwargs)

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> tuple[TrajectoryGroup, ...]:
        """The groups with these prompts. Raises `DataError` for a hint that is no text, and `RunError` if the policy
        read another prompt than the row has.
        """
        return tuple(
            evolve(group, trajectories=tuple(self._hinted(group, trajectory) for trajectory in group.trajectories))
            for group in groups
        )

    def refuse_missing(self, columns: Iterable[Iterable[str]]) -> None:
        """Raises `DataError` if no row has the column of hints; `columns` are those of the rows of each task."""
        column, available = self.settings.column.partition(".")[0], sorted({name for item in columns for name in item})
        if self.settings.source == "column" and column not in available:
            raise DataError(
                f"the training data has no column {column!r}, which {FIELD}.column names; its columns for environments "
                f"are {', '.join(available)}"
            )

    def _hinted(self, group: TrajectoryGroup, trajectory: Trajectory) -> Trajectory:
        hint = self._hint(group, trajectory)
        plain_ids = self._tokens(group.prompt, None)
        hinted_ids = plain_ids if hint is None else self._tokens(group.prompt, hint)
        rows = [self._row(row, plain_ids, hinted_ids, group.prompt) for row in trajectory.token_rows]
        return evolve(trajectory, earlier=tuple(rows[:-1]), extras=rows[-1].extras)

    def _row(self, row: TokenRow, plain_ids: tuple[int, ...], hinted_ids: tuple[int, ...], prompt: Prompt) -> TokenRow:
        if row.prompt_ids[: len(plain_ids)] != plain_ids:
            raise RunError(
                f"a hint cannot be put before the answers to prompt {prompt.id}: the policy read other tokens than its "
                f"row has, as an environment that changes prompts or shows tools makes it. Set {FIELD}.source = none"
            )
        read = (*hinted_ids, *row.prompt_ids[len(plain_ids) :])
        if self.positions is not None and len(read) + len(row.response_ids) > self.positions:
            read = row.prompt_ids
        return evolve(row, extras={**row.extras, TEACHER_PROMPT: RowArray.of(np.array(read, dtype=np.int64))})

    def _tokens(self, prompt: Prompt, hint: str | None) -> tuple[int, ...]:
        template = evolve(self._template, tools=prompt.tools) if prompt.tools else self._template
        messages = prompt.messages if hint is None else self._insert_hint(prompt, hint)
        return template.start(messages, allow_dropped=True)

    def _insert_hint(self, prompt: Prompt, hint: str) -> list[Mapping[str, Any]]:
        indices = [index for index, message in enumerate(prompt.messages) if message.get("role") == "user"]
        if not indices or not isinstance(prompt.messages[indices[-1]].get("content"), str):
            raise DataError(f"prompt {prompt.id} has no text of the user, into which a hint could be put")
        messages, last = list(prompt.messages), indices[-1]
        before, _, rest = self.settings.template.partition("{prompt}")
        text = str(messages[last]["content"])
        content = before.replace("{hint}", hint) + text + rest.replace("{hint}", hint)
        messages[last] = {**messages[last], "content": content}
        return messages

    def _hint(self, group: TrajectoryGroup, trajectory: Trajectory) -> str | None:
        match self.settings.source:
            case "column":
                column = self.settings.column
                value: object = group.prompt.extras
                for name in column.split("."):
                    value = value.get(name) if isinstance(value, Mapping) else None
                if is_null(value):
                    return None
                if not isinstance(value, str):
                    place = f"prompt {group.prompt.id}: column {column} ({FIELD}.column)"
                    raise DataError(f"{place} is no text, but {value!r:.80}")
                return value or None
            case "success":
                return self._success_hint(group, trajectory)
            case "feedback":
                return trajectory.feedback
        return None

    def _success_hint(self, group: TrajectoryGroup, trajectory: Trajectory) -> str | None:
        """The text of the first other answer with the highest reward, if rewards differ."""
        best = max(group.rewards)
        others = (item for item in group.trajectories if item.reward == best and item is not trajectory)
        success = next((other for other in others if not other.missing and not other.filled), None)
        if success is None or min(group.rewards) == best:
            return None
        sampled = [token for token, own in zip(success.response_ids, success.loss_mask, strict=True) if own]
        return str(self.tokenizer.decode(sampled, skip_special_tokens=True))

"""The decoding batch: jobs, the rows of their samples, and the rows as tensors.

The list of rows on the host is authoritative; the tensors are built from it whenever rows join or move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from attrs import asdict, define, evolve, field, frozen
from torch import Tensor

from skyrl.config import SamplingParams
from skyrl.inference.engine import Completion, NewTokens, PromptScores, SampleKey
from skyrl.inference.sampling import RowSettings
from skyrl.inference.stop_strings import tail_length
from skyrl.models.low_rank import Updates


@define(eq=False, kw_only=True)
class Job:
    """Samples of one prompt that join a batch together and are returned together."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    keys: tuple[SampleKey, ...]
    limit: int
    """Longest completion in tokens, at least 1: the smaller of what was requested and what the model can hold."""

    first_index: int = 0
    """Index of the job's first sample in its request."""

    adapter: Updates | None = None
    end_ids: tuple[int, ...] | None = None
    """Tokens that end a sample in place of the model's end tokens; None: these."""

    top_logprobs: int = 0
    """Number of likeliest tokens to report in place of each drawn one."""

    scores_prompt: bool = False
    prompt_top_logprobs: int = 0
    prompt_scores: PromptScores | None = None
    """Scores of the prompt, once they are computed."""

    on_tokens: Callable[[NewTokens], None] | None = None
    """Callback for new tokens, see `GenerationRequest.on_tokens`."""

    completions: dict[int, Completion] = field(factory=dict)
    """Finished samples by their index in `keys`."""

    partial_completions: dict[int, Completion] = field(factory=dict)
    """Tokens that the job's interrupted samples had drawn, by their index in `keys`."""

    @property
    def done(self) -> bool:
        return len(self.completions) == len(self.keys)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the samples that are not finished."""
        return [index for index in range(len(self.keys)) if index not in self.completions]

    def starts(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """Token sequences to continue, each with its samples' indices. New samples share the prompt; each interrupted
        one continues its own tokens.
        """
        new = [index for index in self.unfinished if index not in self.partial_completions]
        later = [(self.prompt_ids + part.token_ids, [index]) for index, part in self.partial_completions.items()]
        return ([(self.prompt_ids, new)] if new else []) + later


@define(eq=False, kw_only=True)
class Row:
    """One sample in flight. Columns refer to the cache."""

    job: Job
    index: int
    """Index of the sample in its job."""

    seed: int
    start: int
    """Column of the first prompt token."""

    version: int
    """Version of the weights that computed the prompt's keys and values."""

    top: list[tuple[list[int], list[float]]] = field(factory=list)
    """The likeliest tokens in place of each drawn one, and their log-probabilities, if the job reports them."""

    tail: int = field(init=False)
    """Number of newest tokens that are searched for stop strings; 0 without stop strings."""

    def __attrs_post_init__(self) -> None:
        self.tail = tail_length(self.job.sampling.stop) if self.job.sampling.stop else 0

    @property
    def first(self) -> int:
        """Column of the first sampled token."""
        return self.start + len(self.job.prompt_ids)

    @property
    def last(self) -> int:
        """Column of the last token that the limit allows."""
        return self.first + self.job.limit - 1


@frozen(kw_only=True, eq=False)
class DecodedRows:
    """Per-row state of a decoding step, for R rows on the model's device; shapes (R,) and int64, unless a field says
    otherwise.
    """

    starts: Tensor
    firsts: Tensor
    leasts: Tensor
    """Column of each row before which the row may not end."""

    lasts: Tensor
    seeds: Tensor
    ends: Tensor
    """(R, K): the tokens that end each row; a row with fewer repeats its first one, a row without any has -1."""

    any_least: bool
    settings: RowSettings

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device, eos_ids: Sequence[int]) -> DecodedRows:
        """Builds the tensors of the given rows. `eos_ids` end every row whose job does not name others."""

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            starts=column([row.start for row in rows]),
            firsts=column([row.first for row in rows]),
            leasts=column([row.first + row.job.sampling.min_new_tokens for row in rows]),
            lasts=column([row.last for row in rows]),
            seeds=column([row.seed for row in rows]),
            ends=_ends(rows, device, eos_ids),
            any_least=any(row.job.sampling.min_new_tokens for row in rows),
            settings=RowSettings.of([row.job.sampling for row in rows], device),
        )

    def at(self, indices: Sequence[int]) -> DecodedRows:
        """The tensors of the rows at these places, in this order."""
        chosen = torch.tensor(indices, dtype=torch.int64, device=self.starts.device)
        return evolve(_index_rows(self, chosen), settings=_index_rows(self.settings, chosen))


T = TypeVar("T", DecodedRows, RowSettings)


def _index_rows(rows: T, chosen: Tensor) -> T:
    fields = asdict(rows, recurse=False).items()
    tensors: dict[str, Any] = {name: value[chosen] for name, value in fields if isinstance(value, Tensor)}
    return evolve(rows, **tensors)


def _ends(rows: Sequence[Row], device: torch.device, eos_ids: Sequence[int]) -> Tensor:
    """Tokens that end each row, (R, K), see `DecodedRows.ends`."""
    end_ids = [
        [*(eos_ids if row.job.end_ids is None else row.job.end_ids), *(row.job.sampling.stop_token_ids or ())]
        for row in rows
    ]
    width = max(map(len, end_ids), default=0)
    padded = [ends + (ends[:1] or [-1]) * (width - len(ends)) for ends in end_ids]
    return torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), width)

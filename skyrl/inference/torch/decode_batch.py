"""The rows in flight: jobs join, every step adds one token to each row, finished rows leave.

Read `advance` first. Rows join and leave at any step (continuous batching). This changes no random number, and changes
logits only by the rounding of matrix products of another size. A step does no work per row in Python, except for rows
with stop strings and rows whose tokens are reported as they are drawn. The list of rows on the host is authoritative;
the tensors are built from it whenever rows join or move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from attrs import asdict, define, evolve, field, frozen
from torch import Tensor

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import NonFiniteError
from skyrl.inference import stop_strings
from skyrl.inference.draws import sample_seed, uniforms
from skyrl.inference.engine import Completion, GenerationRequest, NewTokens, PromptScores, SampleKey, TopLogprobs
from skyrl.inference.sampling import (
    Drawable,
    RowSettings,
    choose,
    less_frequent,
    likeliest,
    mask_early_ends,
    penalised,
    tempered,
)
from skyrl.inference.torch.causal_lm import CausalLM
from skyrl.inference.torch.fused_decoder import Prefix
from skyrl.inference.torch.kv_cache import PlacedPrompt
from skyrl.models.low_rank import Mix, Updates
from skyrl.models.routers import restored_choices


@define(eq=False, kw_only=True)
class Job:
    """Samples of one prompt that join a batch together and are returned together."""

    request: GenerationRequest
    keys: tuple[SampleKey, ...]
    """Keys of the job's samples: all of the request, or some of them."""

    limit: int
    """Longest completion in tokens, at least 1: the smaller of what was requested and what the model can hold."""

    first_index: int = 0
    """Index of the job's first sample in its request."""

    adapter: Updates | None = None
    prompt_scores: PromptScores | None = None
    """Scores of the prompt, once they are computed."""

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
        prompt = self.request.prompt_ids
        later = [(prompt + part.token_ids, [index]) for index, part in self.partial_completions.items()]
        return ([(prompt, new)] if new else []) + later


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
        stops = self.job.request.sampling.stop
        self.tail = stop_strings.tail_length(stops) if stops else 0

    @property
    def first(self) -> int:
        """Column of the first sampled token."""
        return self.start + len(self.job.request.prompt_ids)

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

        requests = [row.job.request for row in rows]
        end_ids = [
            [*(eos_ids if item.end_ids is None else item.end_ids), *(item.sampling.stop_token_ids or ())]
            for item in requests
        ]
        width = max(map(len, end_ids), default=0)
        padded = [ends + (ends[:1] or [-1]) * (width - len(ends)) for ends in end_ids]
        return cls(
            starts=column([row.start for row in rows]),
            firsts=column([row.first for row in rows]),
            leasts=column([row.first + row.job.request.sampling.min_new_tokens for row in rows]),
            lasts=column([row.last for row in rows]),
            seeds=column([row.seed for row in rows]),
            ends=torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), width),
            any_least=any(item.sampling.min_new_tokens for item in requests),
            settings=RowSettings.of([item.sampling for item in requests], device),
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


class DecodeBatch:
    """All rows in flight on one model. One thread at a time may call it."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: ChatTokenizer,
        *,
        eos_ids: Sequence[int],
        weight_version: int,
        drawable: Drawable | None = None,
    ) -> None:
        """`drawable` are the tokens that may be drawn; None: all that the model has."""
        self.rows: list[Row] = []
        self._model, self._tokenizer = model, tokenizer
        self.weight_version = weight_version
        """Version of the weights. When it changes, rows continue with the keys and values that they have."""
        self._eos_ids, self._drawable = tuple(eos_ids), drawable
        self._cache = model.new_cache()
        self._mix: Mix | None = None
        self._describe_rows()

    @torch.inference_mode()
    def advance(self, leaving: Collection[Job], joining: Sequence[Job], interrupted: Callable[[], bool]) -> list[Job]:
        """Lets jobs leave and join, then decodes until one is done, or nothing is left, or `interrupted()`.

        Returns the jobs that are done; those that leave are forgotten. Raises `NonFiniteError` for logits that are not
        finite, and any error of the model; the batch must then be discarded.
        """
        if leaving:
            self._keep([index for index, row in enumerate(self.rows) if row.job not in leaving])
        if joining:
            self._admit(joining)
        finished_jobs = self._retire()
        while not finished_jobs and self.rows and not interrupted():
            self._reserve(0, before=0, ahead=0)
            logits = self._model.decode(self._cache, self._tensors.starts, ragged=self._ragged, mix=self._mix)
            self._cache.window.end += 1
            self._sample(logits, 0, self._tensors)
            self._report(0)
            finished_jobs = self._retire()
        return finished_jobs

    @torch.inference_mode()
    def interrupt(self) -> None:
        """Returns every row's tokens so far to its job, and drops the rows."""
        indices = list(range(len(self.rows)))
        for index, drawn in zip(indices, self._sampled_tokens(indices), strict=True):
            row = self.rows[index]
            row.job.partial_completions[row.index] = self._completion(index, drawn, eos=False, stopped=False)
        self._keep([])

    def _admit(self, jobs: Sequence[Job]) -> None:
        """Prefill a job once for all samples that share its prefix, and draw their next tokens."""
        starts = [(job, ids, indices) for job in jobs for ids, indices in job.starts()]
        samples, joined = sum(len(indices) for _, _, indices in starts), len(self.rows)
        longest, ahead = max(len(ids) for _, ids, _ in starts), max(job.limit for job in jobs)
        prefixes = self._prefixes([(job, ids) for job, ids, _ in starts])
        self._reserve(samples, before=longest, ahead=ahead)
        placed = [
            PlacedPrompt(
                ids=ids,
                layers=prefix.layers,
                copies=len(indices),
                total=len(job.request.prompt_ids) + job.limit,
                experts=prefix.experts,
            )
            for (job, ids, indices), prefix in zip(starts, prefixes, strict=True)
        ]
        for (job, _, indices), start in zip(starts, self._cache.place_all(placed), strict=True):
            self.rows += [
                Row(job=job, index=i, seed=sample_seed(job.keys[i]), start=start, version=self.weight_version)
                for i in indices
            ]
        self._remember_begun(joined)
        copies = torch.tensor([len(indices) for _, _, indices in starts], device=self._model.device)
        logits = torch.stack([prefix.logits for prefix in prefixes]).repeat_interleave(
            copies, dim=0, output_size=samples
        )
        self._sample(logits, joined, DecodedRows.of(self.rows[joined:], self._model.device, self._eos_ids))
        self._describe_rows()
        self._report(joined)

    def _prefixes(self, starts: Sequence[tuple[Job, Sequence[int]]]) -> list[Prefix]:
        """Prefill of the token sequences, those of each adapter together. A prompt that is to be scored is computed
        alone, and whole, once.
        """
        prefixes: dict[int, Prefix] = {}
        others: dict[Updates | None, list[int]] = {}
        for index, (job, ids) in enumerate(starts):
            if job.request.scores_prompt and job.prompt_scores is None:
                prefixes[index] = self._model.score(ids, job.adapter, top=max(job.request.prompt_top_logprobs, 1))
                job.prompt_scores = _prompt_scores(job, prefixes[index])
            else:
                others.setdefault(job.adapter, []).append(index)
        for adapter, indices in others.items():
            prefixes.update(
                zip(indices, self._model.prefill([starts[index][1] for index in indices], adapter), strict=True)
            )
        return [prefixes[index] for index in range(len(starts))]

    def _remember_begun(self, joined: int) -> None:
        """Restore log-probabilities, versions and experts of the tokens that interrupted rows had drawn. The tokens
        themselves were prefilled with the prompt.
        """
        for index, row in enumerate(self.rows[joined:], start=joined):
            partial = row.job.partial_completions.pop(row.index, None)
            if partial is not None:
                if partial.top_logprobs is not None:
                    top = partial.top_logprobs
                    row.top = list(zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True))
                columns = slice(row.first, row.first + len(partial.token_ids))
                self._cache.logprobs[index, 0, columns] = self._cache.logprobs.new_tensor(partial.logprobs)
                self._cache.versions[index, 0, columns] = self._cache.versions.new_tensor(partial.weight_versions)
                if partial.routed_experts is not None and self._cache.experts is not None:
                    earlier = slice(row.start, row.start + len(partial.routed_experts))
                    self._cache.experts[index, 0, earlier] = restored_choices(partial.routed_experts).to(
                        self._cache.experts.device
                    )

    def _report(self, joined: int) -> None:
        """Report the newest token of the rows from `joined` on to jobs with an `on_tokens` callback."""
        indices = [index for index in self._reported if index >= joined]
        if not indices:
            return
        end = self._cache.window.end
        for index, token in zip(indices, self._cache.tokens[indices, 0, end].tolist(), strict=True):
            row = self.rows[index]
            on_tokens, sample_index = row.job.request.on_tokens, row.job.first_index + row.index
            assert on_tokens is not None
            on_tokens(NewTokens(index=sample_index, start=end - row.first, token_ids=(token,)))

    def _reserve(self, count: int, *, before: int, ahead: int) -> None:
        shift = self._cache.reserve(count, before=before, ahead=max(ahead, self._last + 1 - self._cache.window.end))
        if shift:
            for row in self.rows:
                row.start += shift
            self._describe_rows()

    def _sample(self, logits: Tensor, joined: int, rows: DecodedRows) -> None:
        """Draws the tokens in column `end` of the rows from `joined` on, which `rows` describes. The likeliest ones are
        kept for jobs that report them.
        """
        cache, end = self._cache, self._cache.window.end
        if rows.any_least:
            logits = mask_early_ends(logits.float(), rows.ends, end < rows.leasts)
        if rows.settings.any_penalised:
            logits = self._penalised(logits.float(), joined, rows)
        numbers = uniforms(rows.seeds, end - rows.firsts)
        tokens, logprobs = choose(logits, rows.settings, numbers, self._drawable)
        cache.tokens[joined : len(self.rows), 0, end] = tokens
        cache.logprobs[joined : len(self.rows), 0, end] = logprobs
        cache.versions[joined : len(self.rows), 0, end] = self.weight_version
        indices = [index for index, row in enumerate(self.rows[joined:]) if row.job.request.top_logprobs]
        if not indices:
            return
        most = max(self.rows[joined + index].job.request.top_logprobs for index in indices)
        settings = rows.settings if len(indices) == len(rows.starts) else rows.at(indices).settings
        tokens, logprobs = likeliest(tempered(logits[indices], settings), most)
        for index, ids, scores in zip(indices, tokens.tolist(), logprobs.tolist(), strict=True):
            row = self.rows[joined + index]
            width = row.job.request.top_logprobs
            row.top.append((ids[:width], scores[:width]))

    def _penalised(self, logits: Tensor, joined: int, rows: DecodedRows) -> Tensor:
        """Applies the repetition penalty, which counts prompt and completion so far, and the frequency penalty, which
        counts the completion alone.
        """
        begin, end = min(row.start for row in self.rows[joined:]), self._cache.window.end
        ids = self._cache.tokens[joined : len(self.rows), 0, begin:end]
        columns = torch.arange(begin, end, device=ids.device)
        # columns before a row's start repeat its newest token
        seen = torch.where(columns >= rows.starts.unsqueeze(1), ids, ids[:, -1:])
        logits = penalised(logits, seen, rows.settings.repetition_penalty)
        return less_frequent(logits, seen, columns >= rows.firsts.unsqueeze(1), rows.settings.frequency_penalty)

    def _retire(self) -> list[Job]:
        """Turns finished rows into completions and drops them; returns the jobs that are then done."""
        end = self._cache.window.end
        newest, logprobs = (stored[: len(self.rows), 0, end] for stored in (self._cache.tokens, self._cache.logprobs))
        ended, stopped = (newest.unsqueeze(1) == self._tensors.ends).any(1), self._rows_at_stop()
        flags = torch.stack((~logprobs.isfinite(), ended, self._tensors.lasts <= end))
        if not stopped and not bool(flags.any()):
            return []
        non_finite, eos, at_limit = ({index for index, is_set in enumerate(row) if is_set} for row in flags.tolist())
        if non_finite:
            row = self.rows[min(non_finite)]
            key, drawn_tokens = row.job.keys[row.index], end - row.first
            raise NonFiniteError(
                f"prompt {key.prompt_id!r}, sample {key.sample_index}: the model's logits after {drawn_tokens} sampled "
                f"tokens are not finite (weights of version {self.weight_version})"
            )
        left = eos | stopped | at_limit
        leaving = sorted(left)
        for index, drawn in zip(leaving, self._sampled_tokens(leaving), strict=True):
            row = self.rows[index]
            if self._model.kept.most_bytes and self._model.kept.keeps_answers and row.version == self.weight_version:
                computed = self._cache.computed(index, row.start)
                adapter = 0 if row.job.adapter is None else row.job.adapter.number
                self._model.kept.keep(*computed, adapter=adapter, copied=self._cache.copies_computed)
            completion = self._completion(index, drawn, eos=index in eos, stopped=index in stopped)
            row.job.completions[row.index] = completion
        jobs = {self.rows[index].job: None for index in leaving}
        self._keep([index for index in range(len(self.rows)) if index not in left])
        return [job for job in jobs if job.done]

    def _rows_at_stop(self) -> set[int]:
        """Places of the rows whose newest token completed a stop string."""
        if not self._watched:
            return set()
        end, depth = self._cache.window.end + 1, max(self.rows[index].tail for index in self._watched)
        recent = self._cache.tokens[self._watched, 0, max(end - depth, 0) : end].tolist()
        stopped = set()
        for index, ids in zip(self._watched, recent, strict=True):
            row = self.rows[index]
            newest, sampling = ids[-min(row.tail, end - row.first) :], row.job.request.sampling
            stops, least = sampling.stop or (), sampling.min_new_tokens
            if end - row.first > least and stop_strings.completed(
                self._tokenizer, newest, stops, others_stand=least > 0
            ):
                stopped.add(index)
        return stopped

    def _sampled_tokens(self, indices: list[int]) -> list[tuple[list[int], list[float], list[int]]]:
        """Tokens, log-probabilities and versions of weights that the rows at these places have drawn."""
        rows, cache, end = [self.rows[index] for index in indices], self._cache, self._cache.window.end + 1
        begin = min((row.first for row in rows), default=end)
        tokens, logprobs, versions = (
            stored[indices, 0, begin:end].tolist() for stored in (cache.tokens, cache.logprobs, cache.versions)
        )
        firsts = [row.first - begin for row in rows]
        return [
            (ids[first:], scores[first:], numbers[first:])
            for first, ids, scores, numbers in zip(firsts, tokens, logprobs, versions, strict=True)
        ]

    def _completion(
        self, index: int, drawn: tuple[list[int], list[float], list[int]], *, eos: bool, stopped: bool
    ) -> Completion:
        row, (ids, logprobs, versions) = self.rows[index], drawn
        sampling, width = row.job.request.sampling, row.job.request.top_logprobs
        cache, choices, experts = self._cache, self._model.choices, None
        if choices is not None and cache.experts is not None:  # those of all tokens but the newest are known
            experts = choices.packed(cache.experts[index, 0, row.start : cache.window.end])
        return Completion(
            token_ids=tuple(ids),
            text=stop_strings.text_of(
                self._tokenizer, ids, (sampling.stop or ()) if stopped else (), least=sampling.min_new_tokens
            ),
            logprobs=tuple(logprobs),
            weight_versions=tuple(versions),
            stop_reason="stop" if eos or stopped else "length",
            routed_experts=experts,
            prompt_scores=row.job.prompt_scores,
            top_logprobs=TopLogprobs.of(row.top, width) if width else None,
        )

    def _keep(self, indices: list[int]) -> None:
        order = self._cache.keep(indices)
        self.rows = [self.rows[index] for index in order]
        if not self.rows:
            self._cache = self._model.new_cache()
        self._describe_rows(self._tensors.at(order))

    def _describe_rows(self, tensors: DecodedRows | None = None) -> None:
        """Recompute everything that is derived from the list of rows; called whenever the list or a row's column
        changes. `tensors` are the tensors of the rows, if they are known.
        """
        starts = {row.start for row in self.rows}
        self._tensors = tensors or DecodedRows.of(self.rows, self._model.device, self._eos_ids)
        self._ragged = len(starts) > 1
        self._last = max((row.last for row in self.rows), default=0)
        self._watched = [index for index, row in enumerate(self.rows) if row.tail]
        self._reported = [index for index, row in enumerate(self.rows) if row.job.request.on_tokens is not None]
        self._cache.window.start = min(starts, default=0)
        self._mix = self._model.mix([row.job.adapter for row in self.rows], self._mix)


def _prompt_scores(job: Job, prefix: Prefix) -> PromptScores:
    """Scores of a job's prompt. Raises `NonFiniteError` if one is not finite."""
    logprobs, tokens, top_logprobs = (part.tolist() for part in prefix.scores or ())
    if not all(map(math.isfinite, logprobs)):
        raise NonFiniteError(f"prompt {job.keys[0].prompt_id!r}: the model's logits in it are not finite")
    top = job.request.prompt_top_logprobs
    return PromptScores(
        logprobs=tuple(logprobs),
        likeliest=tuple(token[0] for token in tokens),
        likeliest_logprobs=tuple(scores[0] for scores in top_logprobs),
        top=TopLogprobs.of(list(zip(tokens, top_logprobs, strict=True)), top) if top else None,
    )

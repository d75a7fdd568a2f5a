"""Checks the answers of inference servers field by field: a server that others operate may send anything.

The answer of every protocol is converted to `DrawnSample`. `completion` compares it with the request; a mismatch raises
`BadAnswer`, and none of its tokens are used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.inference import stop_strings
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, SampleKey, asked_logprobs
from skyrl.processes.answers import BadAnswer, display_value, read

LEAST_LOGPROB = -9000.0
"""Smallest valid log-probability: vLLM writes -9999 for NaN and minus infinity, which JSON cannot represent."""

_DIGITS = 18
"""Largest number of digits of a weight version."""

_ROUNDING = 1e-3
"""Largest valid log-probability, above 0 because a softmax in bfloat16 rounds."""


@frozen
class ListedModel:
    """A model in the answer to `/v1/models`."""

    id: str
    root: str | None = None
    max_model_len: object = None


@frozen
class ListedModels:
    """The answer to `/v1/models`."""

    data: tuple[ListedModel, ...] | None = None


class NotFinite(BadAnswer):
    """An answer with a log-probability that is not finite."""


class OtherWeights(BadAnswer):
    """An answer of weights that this run did not give the server: asking again does not help."""


@frozen(kw_only=True)
class DrawnSample:
    """One sample, as a server reports it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    """`stop` or `length`; any other value means that the sample was not finished."""

    stopped_by: int | str | None
    """Stop string or token id that ended the sample, if the server reports it."""

    versions: tuple[str, ...] | None
    """Version of the weights that drew each token, as the server names it; None if it does not report any."""


@frozen(kw_only=True)
class RequestedSample:
    """A requested sample, with which the answer is compared."""

    request: GenerationRequest
    index: int
    """Index of the sample in the request's keys."""

    limit: int
    """Longest possible completion in tokens."""

    vocabulary: int
    """Number of token ids of the model."""

    ends: frozenset[int]
    """Token ids that end a sample."""

    versions: Collection[int]
    """Versions of the weights that the server held while it worked on the sample; empty if it keeps its own weights,
    which count as version 0."""

    @property
    def key(self) -> SampleKey:
        """The sample's key."""
        return self.request.keys[self.index]


def completion(drawn: DrawnSample, requested: RequestedSample, tokenizer: ChatTokenizer) -> Completion:
    """Converts a server's sample, after comparing it with the request.

    Raises `BadAnswer` for a mismatch, `NotFinite` for non-finite log-probabilities, and `OtherWeights` for tokens drawn
    by weights that the server was not given.
    """
    sampling, key, count = requested.request.sampling, requested.key, len(drawn.token_ids)
    if drawn.finish not in ("stop", "length"):
        raise BadAnswer(f"with an incomplete sample that ended by {drawn.finish!r}")
    if not 0 < count <= requested.limit:
        raise BadAnswer(f"with {count} tokens, where 1 to {requested.limit} were asked for")
    if drawn.finish == "length" and count != requested.limit:
        raise BadAnswer(f"with {count} tokens of {requested.limit}, although it reports that the limit was reached")
    if len(drawn.logprobs) != count:
        raise BadAnswer(f"with {count} tokens and {len(drawn.logprobs)} log-probabilities")
    refuse_unknown_tokens(drawn.token_ids, requested.vocabulary)
    for index, value in enumerate(drawn.logprobs):
        if not math.isfinite(value) or value < LEAST_LOGPROB:
            raise NotFinite(
                f"with {value:g} for a log-probability: the model's logits after {index} sampled tokens of prompt "
                f"{key.prompt_id!r}, sample {key.sample_index}, are not finite"
            )
        if value > _ROUNDING:
            raise BadAnswer(f"with {value:g} for a log-probability, which cannot be above 0")
    stopped = isinstance(drawn.stopped_by, str)
    text = stop_strings.text_of(
        tokenizer, drawn.token_ids, (sampling.stop or ()) if stopped else (), least=sampling.min_new_tokens
    )
    if drawn.finish == "stop" and not stopped and drawn.token_ids[-1] not in requested.ends:
        raise BadAnswer(f"with a sample that stops at token {drawn.token_ids[-1]}, which is not an end token")
    return Completion(
        token_ids=drawn.token_ids,
        text=text,
        logprobs=asked_logprobs(sampling, drawn.logprobs),
        weight_versions=_versions(drawn, requested),
        stop_reason="stop" if drawn.finish == "stop" else "length",
    )


def refuse_unknown_tokens(token_ids: Sequence[int], vocabulary: int) -> None:
    """Raises `BadAnswer` for a token that the model does not have."""
    strange = [token for token in token_ids if not 0 <= token < vocabulary]
    if strange:
        raise BadAnswer(f"with token {strange[0]}, outside the vocabulary of {vocabulary} tokens")


def _versions(drawn: DrawnSample, requested: RequestedSample) -> tuple[int, ...]:
    count = len(drawn.token_ids)
    if not requested.versions:
        return (0,) * count
    if drawn.versions is None:
        if len(requested.versions) != 1:
            raise OtherWeights("with a sample during which its weights changed, and does not say at which token")
        return tuple(requested.versions) * count
    if len(drawn.versions) != count:
        raise BadAnswer(f"with {count} tokens, but weight versions for {len(drawn.versions)}")
    versions = tuple(map(version_number, drawn.versions))
    strange = [version for version in versions if version not in requested.versions]
    if strange:
        expected = " or ".join(map(str, sorted(requested.versions)))
        raise OtherWeights(f"with a token drawn by weights of version {strange[0]}, where it was given {expected}")
    return versions


def mapping(value: object, description: str) -> Mapping[str, Any]:
    """The value, if it is a JSON object. Raises `BadAnswer`."""
    if not isinstance(value, dict):
        raise BadAnswer(f"with {display_value(value)} for {description}")
    return value


def ids(value: object) -> tuple[int, ...]:
    """The value, if it is a list of integers. Raises `BadAnswer`."""
    return read(value, tuple[int, ...], "token ids")


def numbers(values: Iterable[object]) -> tuple[float, ...]:
    """The values, if they are numbers; NaN for null. Raises `BadAnswer`."""
    return tuple(map(_number, values))


def _number(value: object) -> float:
    if value is None or (type(value) is float and not math.isfinite(value)):
        return math.nan if value is None else value
    return read(value, float, "a log-probability")


@frozen
class VersionSpan:
    """Tokens `start` to `end` (excluded) of a sample, which were drawn by one version of the weights."""

    start: int
    end: int
    version: str | int


def versions_of_spans(spans: Sequence[VersionSpan] | None, count: int) -> tuple[str, ...] | None:
    """The version of each of `count` tokens. Raises `BadAnswer` for spans that are not contiguous."""
    if spans is None:
        return None
    versions: list[str] = []
    for span in spans:
        if span.start != len(versions) or not span.start <= span.end <= count:
            raise BadAnswer(f"with weights of the tokens {span.start} to {span.end} of {count}")
        versions += [str(span.version)] * (span.end - span.start)
    return tuple(versions)


def load_of_metrics(text: object, *, waiting: str, cache_use: str) -> EngineLoad | None:
    """The load in a server's metrics, in Prometheus' text format under the given names, one line for each copy of its
    weights; None if they are absent. Raises `BadAnswer` for a value that is not a finite number.
    """
    queues, uses = (_samples_of(text, name) for name in (waiting, cache_use))
    waits = int(min(sum(queues), 2.0**31))  # a sum of finite numbers may be infinite
    return EngineLoad(waiting=waits, cache_use=max(uses, default=None)) if queues else None


def _samples_of(text: object, name: str) -> list[float]:
    lines = text.splitlines() if isinstance(text, str) else ()
    values = [line.rpartition(" ")[2] for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line)]
    try:
        samples = [float(value) for value in values]
    except ValueError as error:
        raise BadAnswer(f"with a metric that is not a number: {display_value(str(error))}") from error
    if not all(map(math.isfinite, samples)):
        raise BadAnswer("with a metric that is not finite")
    return samples


def version_number(value: object) -> int:
    """The version of weights, which servers keep as text. Raises `OtherWeights` for text that no run has set."""
    text = str(value) if isinstance(value, str | int) else ""
    if not text.isdecimal() or len(text) > _DIGITS:
        raise OtherWeights(f"with weight version {display_value(value)}, which is not a version that this run has set")
    return int(text)


def refuse_other_prompt(came: Sequence[int] | None, sent: Sequence[int]) -> None:
    """Raises `BadAnswer` if a server reports a prompt other than the one it was sent."""
    if came is not None and tuple(came) != tuple(sent):
        raise BadAnswer("with another prompt than it was sent")

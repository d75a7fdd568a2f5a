"""Sampling settings of a request, which override the endpoint's.

In a trajectory that is trained on, the run's settings determine the distribution, because the learner scores every
token under it. There a request may only shorten its answer (`max_tokens`, `stop`); its other settings are ignored and
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, frozen

from skyrl.config import SamplingParams
from skyrl.endpoint.fields import Fields

MOST_TOKENS = 2**31 - 1


@frozen
class RequestSampling:
    """Sampling settings of one request."""

    sampling: SamplingParams
    model: str
    """Name of the model that the request asks for."""

    seed: int | None
    overruled: tuple[str, ...]
    """Names of the request's settings that differ from the run's and were ignored."""

    min_tokens: int = 0
    """Smallest number of tokens that the request asks for."""

    top_logprobs: int = 0
    """Number of likeliest tokens to report in place of each sampled one."""


_READERS: Mapping[str, Callable[[Fields], Any]] = {
    "temperature": lambda body: body.number("temperature", None, least=0, most=2),
    "top_p": lambda body: body.number("top_p", None, least=1e-9, most=1),
    "min_p": lambda body: body.number("min_p", None, least=0, most=1),
    "top_k": lambda body: body.integer("top_k", None, least=-1, most=MOST_TOKENS),
    "repetition_penalty": lambda body: body.number("repetition_penalty", None, least=1e-3, most=1e3),
    "frequency_penalty": lambda body: body.number("frequency_penalty", None, least=-2, most=2),
    "min_new_tokens": lambda body: body.integer("min_tokens", None, least=0, most=MOST_TOKENS),
}
"""Fields of `SamplingParams` that change the distribution, with the function that reads each from a request body."""


def read_sampling(
    body: Fields,
    ours: SamplingParams,
    model: str,
    *,
    fixed: bool,
    lengths: tuple[str, ...],
    stops: str = "stop",
    shortest: int = 1,
) -> RequestSampling:
    """Settings of a request to `model`, which override `ours`. `lengths` are the fields with the largest answer length
    in a wire format, at least `shortest`, `stops` is the field with the stop texts. With `fixed`, only length and stops
    are taken from the request. Raises `RequestError`.
    """
    requested = {name: value for name, read in _READERS.items() if (value := read(body)) is not None}
    body.refuse("presence_penalty", "the engines have frequency_penalty and repetition_penalty", harmless=(0, 0.0))
    body.refuse("logit_bias", "the engines do not support it", harmless=({},))
    seed = body.integer("seed", None, least=-(2**63), most=2**63 - 1)
    tokens = [body.integer(name, None, least=shortest, most=MOST_TOKENS) for name in lengths]
    stop, stop_ids = body.texts(stops), body.ids("stop_token_ids")
    longest = next((count for count in tokens if count is not None), ours.max_generate_length)
    differing = {name: value for name, value in requested.items() if value != getattr(ours, name)}
    changes: dict[str, Any] = {"stop": stop or ours.stop, "stop_token_ids": stop_ids or ours.stop_token_ids}
    changes["logprobs"] = 0  # any request may ask for log-probabilities
    if fixed:
        longest = min(longest, ours.max_generate_length)
    else:
        changes |= requested | {"greedy": ours.greedy and "temperature" not in requested}
    changes["max_generate_length"] = max(longest, 1)  # the engines draw at least one token
    overruled = tuple(sorted(differing)) if fixed else ()
    least = 0 if fixed else requested.get("min_new_tokens", 0)
    return RequestSampling(evolve(ours, **changes), model, None if fixed else seed, overruled, least)

"""Log-probabilities of given tokens from a server of another model: a teacher behind vLLM, SGLang or `skyrl serve`.

Each row is one request for a single new token, whose answer has the log-probabilities of the prompt: `prompt_logprobs`
of `/v1/completions` as vLLM has it, which `skyrl serve` answers, too, or SGLang's `/generate`. A failed request is
repeated until its time limit, so that a server may start again meanwhile. SGLang's form follows its documentation and
is not tested with its server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from skyrl.errors import ProcessError, RunError, ServerRefusal, UserError
from skyrl.inference.servers.answers import ListedModels
from skyrl.inference.servers.http_connection import ATTEMPTS, MOST_ATTEMPTS, Connection

TOKEN_VARIABLE = "SKYRL_TEACHER_TOKEN"
"""Environment variable with the token that a served teacher requires, if any."""

_FIRST_ANSWER_SECONDS = 60.0


@frozen
class _Choice:
    prompt_logprobs: tuple[object, ...]
    """For each token a table {"<id>": {"logprob": ...}}; None for the first."""


@frozen
class _Completed:
    choices: tuple[_Choice, ...]


@frozen
class _Info:
    model_path: str | None = None
    context_length: object = None


@frozen
class _Meta:
    input_token_logprobs: tuple[tuple[object, ...], ...]
    input_top_logprobs: tuple[tuple[tuple[object, ...], ...] | None, ...] | None = None


@frozen
class _Generated:
    meta_info: _Meta


@frozen(kw_only=True, eq=False)
class TokenScores:
    """Scores of P given tokens by a model: P - 1 values in nats, for the tokens after the first."""

    logprobs: NDArray[np.float32]
    """(P - 1,)."""

    ids: NDArray[np.int64]
    """(P - 1, k): the likeliest tokens at each place, the likeliest first."""

    top: NDArray[np.float32]
    """(P - 1, k): their log-probabilities."""


@frozen
class ServedModel:
    """Name, path and limit of the model that a server has."""

    name: str
    path: str
    max_model_len: int | None
    """None if the server does not say it."""


class ScoringServer:
    """A server that scores tokens. Used on one event loop."""

    def __init__(
        self, url: str, *, protocol: Literal["vllm", "sglang"], token: str | None, timeout: float, most: int
    ) -> None:
        """`timeout` limits a request with its repetitions, in seconds; at most `most` requests are open at once. Raises
        `UserError` for an address that no request can be sent to.
        """
        self.url, self._protocol, self._timeout = url, protocol, timeout
        self._connection = Connection(url, token=token, most=most, starting=True)
        self._model = ServedModel("", "", None)

    async def connect(self, *, longest: int, top: int, address: str, length: str) -> ServedModel:
        """Ask the server for its model and try a request. Raises `UserError` if it does not take `longest` tokens with
        a new one, or does not report the `top` likeliest tokens; `ProcessError` if it does not answer. Messages name
        the fields of its `address` and of the largest `length`.
        """
        try:
            if self._protocol == "sglang":
                info = await self._connection.wait_for_first(_Info, "/get_model_info", seconds=_FIRST_ANSWER_SECONDS)
                path = str(info.model_path)
                self._model = ServedModel(path, path, _whole(info.context_length))
            else:
                models = await self._connection.wait_for_first(
                    ListedModels, "/v1/models", seconds=_FIRST_ANSWER_SECONDS
                )
                if not models.data:
                    raise UserError(f"the teacher at {self.url} serves no model (/v1/models)")
                model = models.data[0]
                self._model = ServedModel(model.id, model.root or model.id, _whole(model.max_model_len))
        except ProcessError as error:
            raise ProcessError(f"{error}: start the teacher, or correct {address}") from error
        limit = self._model.max_model_len
        if limit is not None and limit < longest + 1:
            raise UserError(
                f"the teacher at {self.url} takes {limit} tokens, and the longest prompt and answer with one new token "
                f"have {longest + 1}: start it with a larger --max-model-len, or lower {length}"
            )
        try:
            await self.score((0, 1, 2), top, attempts=ATTEMPTS)
        except (ServerRefusal, RunError) as error:
            option = f" with --max-logprobs {top} or more" if top and self._protocol == "vllm" else ""
            raise UserError(f"the teacher does not score tokens: {error}. Start it{option}") from error
        return self._model

    async def score(self, tokens: Sequence[int], top: int, *, attempts: int = MOST_ATTEMPTS) -> TokenScores:
        """Scores of the tokens after the first. Raises `ProcessError` if the server does not answer in time, or in as
        many `attempts`, and `RunError` for an answer that lacks a token or has a number that is not finite.
        """
        request_scores = self._request_sglang_scores if self._protocol == "sglang" else self._request_vllm_scores
        try:
            scores = await request_scores(tokens, top, attempts)
        except ServerRefusal:
            raise
        except ProcessError as error:
            raise ProcessError(
                f"the teacher at {self.url} does not answer: {error}. Start it again, and then the run, which resumes"
            ) from error
        if len(scores) != len(tokens) - 1:
            raise RunError(f"the teacher at {self.url} scored {len(scores)} of {len(tokens) - 1} tokens")
        logprobs = np.array([own for own, _ in scores], np.float32)
        best = [sorted(table.items(), key=lambda item: (-item[1], item[0]))[:top] for _, table in scores]
        if any(len(entry) != top for entry in best):
            raise RunError(f"the teacher at {self.url} reports fewer than {top} likely tokens at a place")
        ids = np.array([[token for token, _ in element] for element in best], np.int64).reshape(len(best), top)
        values = np.array([[value for _, value in entry] for entry in best], np.float32).reshape(len(best), top)
        if not (np.isfinite(logprobs).all() and np.isfinite(values).all()):
            raise RunError(f"the teacher at {self.url} reports log-probabilities that are not finite")
        return TokenScores(logprobs=logprobs, ids=ids, top=values)

    async def close(self) -> None:
        """Close every connection."""
        await self._connection.close()

    async def _request_vllm_scores(
        self, tokens: Sequence[int], top: int, attempts: int
    ) -> list[tuple[float, dict[int, float]]]:
        body = {
            "model": self._model.name,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top,
        }
        answer = await self._connection.read(
            _Completed, "/v1/completions", body, seconds=self._timeout, attempts=attempts
        )
        if len(answer.choices) != 1:
            raise RunError(f"the teacher at {self.url} gives {len(answer.choices)} answers to one row")
        scores = []
        for token, logprobs in zip(tokens[1:], answer.choices[0].prompt_logprobs[1:], strict=False):
            entries = logprobs.items() if isinstance(logprobs, Mapping) else ()
            table = {
                int(name): _number(item.get("logprob"))
                for name, item in entries
                if name.isdigit() and isinstance(item, Mapping)
            }
            if token not in table:
                raise RunError(f"the teacher at {self.url} reports no log-probability of token {token}")
            scores.append((table[token], table))
        return scores

    async def _request_sglang_scores(
        self, tokens: Sequence[int], top: int, attempts: int
    ) -> list[tuple[float, dict[int, float]]]:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }
        answer = await self._connection.read(_Generated, "/generate", body, seconds=self._timeout, attempts=attempts)
        meta = answer.meta_info
        top_logprobs = meta.input_top_logprobs or (None,) * len(tokens)
        pairs = zip(meta.input_token_logprobs[1:], top_logprobs[1:], strict=False)
        return [(_number(own[0]), {int(_number(e[1])): _number(e[0]) for e in tops or ()}) for own, tops in pairs]


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan

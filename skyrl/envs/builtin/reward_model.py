"""Answers scored by a reward model: one turn; the model runs in this process or behind `skyrl serve-reward`.

The model scores the prompt followed by the answer, rendered with the reward model's own chat template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from attrs import frozen

from skyrl.config.settings.environment import RewardModelEnvConfig
from skyrl.envs.env import Env, EnvStep, Message
from skyrl.envs.http_json import PATIENCE, post
from skyrl.errors import TaskError
from skyrl.processes.answers import BadAnswer, read

if TYPE_CHECKING:
    from skyrl.models.saving.reward_model import RewardModel

TOKEN_VARIABLE = "SKYRL_REWARD_TOKEN"
"""Environment variable with the token of a reward service, for its server and its clients."""


@frozen
class _Scores:
    scores: tuple[float, ...]


class RewardModelEnv(Env):
    """The reward is the model's score, unscaled."""

    def __init__(
        self,
        extras: Mapping[str, Any],
        settings: RewardModelEnvConfig,
        token: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """`token` is the token that the service requires, if any; `patience` is in seconds. Raises `TaskError` if no
        model is configured.
        """
        super().__init__(extras)
        if not settings.path and not settings.url:
            raise TaskError("environment.skyrl_gym.reward_model has neither a path nor a url")
        self._settings, self._token, self._patience = settings, token, patience
        self._chat: tuple[Mapping[str, Any], ...] = ()
        self._retries = 0

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self._chat = tuple(prompt)
        return super().init(prompt)

    def step(self, action: str) -> EnvStep:
        chat = [*map(dict, self._chat), {"role": "assistant", "content": action}]
        if url := self._settings.url:
            answer = post(
                url,
                {"chats": [chat]},
                _single_score,
                setting="environment.skyrl_gym.reward_model.url",
                seconds=self._settings.timeout,
                patience=self._patience,
                token=self._token,
            )
            self._retries += answer.retries
            score = answer.value
        else:
            score = _model(str(self._settings.path)).scores([chat])[0]
        if not math.isfinite(score):
            raise ValueError(f"the reward model says {score}")
        return EnvStep(reward=score, done=True)

    def get_metrics(self) -> dict[str, float]:
        return {"reward_model_retries": float(self._retries)}


def _single_score(answer: object) -> float:
    scores = read(answer, _Scores).scores
    if len(scores) != 1:
        raise BadAnswer(f"with {len(scores)} scores for one chat")
    return scores[0]


_LOADING = Lock()


def _model(path: str) -> RewardModel:
    """The reward model of a path, loaded once per process. One load at a time: transformers patches its own functions
    while loading, and two loads at once would leave the wrong ones in place.
    """
    with _LOADING:
        return _loaded(path)


@cache
def _loaded(path: str) -> RewardModel:
    from skyrl.models.saving.reward_model import RewardModel

    return RewardModel(path)

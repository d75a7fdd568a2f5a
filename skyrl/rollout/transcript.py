"""The tokens of one episode as it is played: sampled tokens, and those of the environment and the template."""

from __future__ import annotations

import math
from typing import Any

from skyrl.errors import RunError
from skyrl.inference.engine import Completion
from skyrl.trajectory import RoutedExperts, TokenRow, TurnReward


class Transcript:
    """Tokens of an episode, turn by turn. Sampled tokens stay as the engine gave them and are never tokenized again."""

    def __init__(self, prompt_ids: tuple[int, ...], *, with_logprobs: bool = True) -> None:
        """`with_logprobs`: whether the row contains the log-probabilities that the engine reported."""
        self.prompt_ids, self._with_logprobs = prompt_ids, with_logprobs
        self.response_ids: list[int] = []
        self.sampled: list[int] = []
        """1 for each token of the response that the policy sampled, 0 for the others."""
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.engines: list[int] = []
        self.rewards: list[TurnReward] = []
        self.routed_experts: RoutedExperts | None = None

    def copy(self) -> Transcript:
        """The transcript as it is now, which later turns of this one do not change."""
        duplicate = self.restarted(self.prompt_ids)
        for column, own in zip(duplicate._columns, self._columns, strict=True):
            column += own
        duplicate.rewards, duplicate.routed_experts = [*self.rewards], self.routed_experts
        return duplicate

    def restarted(self, prompt_ids: tuple[int, ...]) -> Transcript:
        """An empty transcript for another prompt, with log-probabilities if this one has them."""
        return Transcript(prompt_ids, with_logprobs=self._with_logprobs)

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        """Lists with an entry for each token of the response; log-probabilities may be left out."""
        return self.response_ids, self.sampled, self.logprobs, self.versions, self.engines

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Tokens that the next turn starts from."""
        return (*self.prompt_ids, *self.response_ids)

    def sample(self, completion: Completion) -> None:
        """Append a turn of the policy. Raises `RunError` if the engine's answer is incomplete."""
        count, logprobs = len(completion.token_ids), completion.logprobs
        if count != len(completion.weight_versions) or (self._with_logprobs and count != len(logprobs)):
            raise RunError(
                f"the engine gave {count} tokens with {len(logprobs)} log-probabilities and "
                f"{len(completion.weight_versions)} weight versions: they have to be as many"
            )
        if max(logprobs, default=0.0) > 1e-3 or not math.isfinite(sum(logprobs)):  # in C, both
            raise RunError("the engine returned an invalid log-probability: NaN, infinity, or above 0")
        self._route(completion)
        self.response_ids += completion.token_ids
        self.sampled += [1] * count
        self.logprobs += logprobs if self._with_logprobs else ()
        self.versions += completion.weight_versions
        self.engines += [completion.engine] * count

    def place(self, token_ids: tuple[int, ...]) -> None:
        """Append tokens of the environment or the template; their version is that of the turn before them."""
        self.response_ids += token_ids
        self.sampled += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids) if self._with_logprobs else []
        self.versions += [self.versions[-1] if self.versions else 0] * len(token_ids)
        self.engines += [0] * len(token_ids)

    def withdraw(self, count: int) -> None:
        """Remove the newest tokens, without which the conversation continues. A reward on them moves to the token that
        is then the last.
        """
        for column in self._columns:
            del column[len(column) - count :]
        last = len(self.response_ids) - 1
        self.rewards = [TurnReward(token=min(turn.token, last), reward=turn.reward) for turn in self.rewards]
        if self.routed_experts is not None:
            self.routed_experts = self.routed_experts.first(len(self.input_ids))

    def step(self) -> TokenRow:
        """The transcript as a training row."""
        return TokenRow(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.response_ids),
            loss_mask=tuple(self.sampled),
            rollout_logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.versions),
            rewards=tuple(self.rewards),
            routed_experts=self.routed_experts,
            engines=tuple(self.engines),
        )

    def _route(self, completion: Completion) -> None:
        """Experts of the tokens that no earlier turn computed. Raises `RunError` if they are of other tokens."""
        routed = completion.routed_experts
        if routed is None:
            return
        if len(routed) != len(self.input_ids) + len(completion.token_ids) - 1:
            raise RunError(
                f"the engine named the experts of {len(routed)} tokens, and computed {len(self.input_ids)} of the "
                f"prompt and drew {len(completion.token_ids)}"
            )
        self.routed_experts = routed if self.routed_experts is None else self.routed_experts.continued(routed)

    def credit(self, reward: float) -> None:
        """Give the reward of a turn to its last token, which is the newest one."""
        self.rewards.append(TurnReward(token=len(self.response_ids) - 1, reward=reward))

"""Finds an engine that accepts new weights and keeps computing with old ones, by its log-probabilities alone.

An engine that runs none of this library's code only promises that it has loaded what it was sent. Each version, it
continues the same prompts from the same seeds, and the learner scores what it drew. As far as an answer repeats that of
an earlier version, the yardstick, each token says how far both have moved since then:

    e, l               log-probability of the token, by the engine and by the learner
    d = |e - l|        their distance: rounding, or rounding and lost updates
    |de - dl| > |de|   the engine looks as if it had stayed: its own move is nearer to 0 than to the learner's

Rounding alone fulfills the second condition for up to all tokens, as long as updates move the learner by less than it
rounds: of right engines in bfloat16 after one update with a learning rate of 1e-6, for three quarters of them. But it
does not make distances grow. An engine stays only if both hold: distances have grown, and its moves are nearer to none
than to the learner's. Only signs are counted, because rounding is a hundred times larger at some tokens than at most.

Without a verdict the yardstick stays where it is, and the updates since then add up: lost ones are found together, at
the first version at which they differ from rounding. Until then they have changed samples by less than rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from attrs import field, frozen
from torch import Tensor

from skyrl.inference.engine import Completion

Tokens = tuple[int, ...]

Scores = Mapping[tuple[Tokens, Tokens], Tensor]
"""A learner's log-probabilities of answers, (N,) float64 each, by prompt and answer."""

CERTAINTY = 5.0
"""Number of standard errors beyond which a mean is not chance. The rows of a comparison are its independent draws, a
few dozen: Student's t with 31 degrees of freedom exceeds 5 with probability 1e-5."""


class Verdict(Enum):
    """Outcome of a comparison with a yardstick."""

    FOLLOWS = "the engine has moved with the learner"
    STAYS = "the learner has moved, and the engine has not"
    UNKNOWN = "too little has changed to tell"


@frozen(kw_only=True)
class ScoredSample:
    """An engine's continuation of one prompt, with the learner's scores."""

    prompt: Tokens
    completion: Completion

    learner: Tensor = field(eq=False)
    """(N,) float64: the learner's log-probabilities of the completion's tokens, in nats."""

    @property
    def engine(self) -> Tensor:
        """(N,) float64: the engine's."""
        return torch.tensor(self.completion.logprobs, dtype=torch.float64)

    @property
    def distance(self) -> Tensor:
        """(N,) float64: absolute difference at each token, in nats."""
        return (self.engine - self.learner).float().abs().double()


@frozen(kw_only=True)
class Yardstick:
    """An engine's answers at the last version at which it was known to compute with the learner's weights."""

    version: int
    answers: tuple[ScoredSample, ...]

    def verdict(self, now: Sequence[ScoredSample]) -> Verdict:
        """Compare with the answers to the same prompts at a later version."""
        before = {answer.prompt: answer for answer in self.answers}
        rows = [_signs(before[answer.prompt], answer) for answer in now if answer.prompt in before]
        grown, grown_error = _mean_of_rows([grown for grown, _ in rows])
        stayed, stayed_error = _mean_of_rows([stayed for _, stayed in rows])
        if stayed < -CERTAINTY * stayed_error:
            return Verdict.FOLLOWS
        is_behind = grown > CERTAINTY * grown_error and stayed > CERTAINTY * stayed_error
        return Verdict.STAYS if is_behind else Verdict.UNKNOWN


def mean(rows: Sequence[Tensor]) -> float:
    """Mean over all tokens of rows (N_i,); 0 if there are none."""
    combined = torch.cat(list(rows)) if rows else torch.zeros(0)
    return combined.mean().item() if combined.numel() else 0.0


def _signs(before: ScoredSample, now: ScoredSample) -> tuple[Tensor, Tensor]:
    """Two rows (P,) of 1, 0 or -1 for the P tokens up to the first that differs: whether the distance of engine and
    learner has grown, and whether the engine's move is nearer to none than to the learner's.
    """
    pairs = 0
    for old, new in zip(before.completion.token_ids, now.completion.token_ids, strict=False):
        if old != new:
            break
        pairs += 1
    engine, learner = now.engine[:pairs] - before.engine[:pairs], now.learner[:pairs] - before.learner[:pairs]
    grown = torch.sign(now.distance[:pairs] - before.distance[:pairs])
    return grown, torch.sign((engine - learner).abs() - engine.abs())


def _mean_of_rows(rows: Sequence[Tensor]) -> tuple[float, float]:
    """Mean over all tokens of rows (N_i,) of numbers from -1 to 1, and its standard error, where the tokens of one row
    may depend on each other. It is at least one row in all of them: equal rows are no proof of certainty.
    """
    some = [row for row in rows if row.numel()]
    if not some:
        return 0.0, math.inf
    sizes = torch.tensor([float(row.numel()) for row in some], dtype=torch.float64)
    sums, count = torch.stack([row.sum() for row in some]), sizes.sum().item()
    average = sums.sum().item() / count
    spread = (sums - average * sizes).square().sum().item()
    return average, max(math.sqrt(spread) / count, 1 / len(some))

"""Online DPO: the answers to one prompt, ranked by reward, become pairs of a better and a worse one.

The loss of a pair depends on the log-probabilities of two whole answers, which need not be in one micro-batch. So its
derivative at each answer is computed first, from scored log-probabilities; minus this derivative is the "advantage" A
of the answer's tokens, and the gradient of sum -A log pi is then that of the loss, exactly.
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.preferences import PAIR_LOSSES, Pairs, PairSettings

Choice = Literal["best_worst", "all", "random"]
"""Which pairs of a group are compared."""


@attrs.frozen(kw_only=True)
class OnlineDPOLoss:
    """`policy_loss_type = "online_dpo"`: -A log pi, where A comes from `derivative`. arXiv:2402.04792, with the
    losses of `kind = "preference"`.
    """

    loss_type: str
    beta: float
    pairs: Choice

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the part of each token, whose sum has the gradient of the loss."""
        return -inputs.advantages * inputs.logprobs

    def derivative(self, answers: Answers, pairs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(N,): derivative of the mean loss of `pairs` (P, 2), rows of chosen and rejected answer, by the
        log-probability of each answer; and numbers (P,) of each pair by name.
        """
        with torch.enable_grad():
            leaf = answers.logprobs.detach().requires_grad_()
            compared = attrs.evolve(answers, logprobs=leaf).paired(pairs)
            losses = PAIR_LOSSES[self.loss_type](compared, PairSettings(beta=self.beta))
            [derivative] = torch.autograd.grad(losses.mean(), leaf)
        chosen, rejected = (self.beta * ratio.detach() for ratio in (compared.a, compared.b))
        return derivative, {
            "loss": losses.detach(),
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logprob": compared.chosen.detach(),
            "rejected_logprob": compared.rejected.detach(),
        }


@attrs.frozen(kw_only=True, eq=False)
class Answers:
    """N answers. Every field is (N,)."""

    logprobs: Tensor
    """log pi, sum over the trained tokens, in nats."""

    ref_logprobs: Tensor
    tokens: Tensor
    """Number of trained tokens."""

    def paired(self, pairs: Tensor) -> Pairs:
        """The answers at `pairs` (P, 2) int64, chosen before rejected."""
        chosen, rejected = pairs.unbind(1)
        return Pairs(
            chosen=self.logprobs[chosen],
            rejected=self.logprobs[rejected],
            ref_chosen=self.ref_logprobs[chosen],
            ref_rejected=self.ref_logprobs[rejected],
            chosen_tokens=self.tokens[chosen],
            rejected_tokens=self.tokens[rejected],
        )


def ranked_pairs(rewards: Tensor, groups: Tensor, able: Tensor, *, choose: Choice, keys: Tensor, seed: int) -> Tensor:
    """(P, 2) int64: indices of the better and of the worse answer of each pair, group by group. Answers of equal reward
    make no pair.

    `rewards` (N,), `groups` (N,) int64, `able` (N,) bool: answers that may be in a pair. `random` draws one pair of a
    group from `seed` and the `keys` (N,) int64 of its answers, so that it does not depend on other groups.
    """
    selected_pairs = [torch.empty(0, 2, dtype=torch.long)]
    for group in groups.unique().tolist():
        members = (able & (groups == group)).nonzero().squeeze(1)
        better, worse = (rewards[members].unsqueeze(1) > rewards[members]).nonzero(as_tuple=True)
        pairs = torch.stack([members[better], members[worse]], dim=1)
        if not len(pairs) or choose == "all":
            selected_pairs.append(pairs)
        elif choose == "random":
            drawn = torch.Generator().manual_seed((seed + int(keys[members].sum())) % 2**63)
            selected_pairs.append(pairs[torch.randint(len(pairs), (1,), generator=drawn)])
        else:
            selected_pairs.append(
                members[[int(rewards[members].argmax()), int(rewards[members].argmin())]].unsqueeze(0)
            )
    return torch.cat(selected_pairs)


def ties(rewards: Tensor, groups: Tensor, able: Tensor) -> int:
    """Number of pairs of answers to one prompt whose rewards are equal. Shapes as in `ranked_pairs`."""
    _, counts = torch.stack([groups.double(), rewards.double()])[:, able].unique(dim=1, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())

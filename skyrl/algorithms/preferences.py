"""Losses of pairs of a better and a worse answer: DPO and variants. One function per loss, one number per pair. Losses
of whole rankings and of single answers are below.

Each compares log pi of the two answers, usually with log pi_ref: a = log pi(chosen) - log pi_ref(chosen), b the same of
the rejected one, both sums over the tokens of the answer. D = f(a) - f(b) is their difference under an f-divergence,
s the sigmoid. The formulas are those of TRL 1.16 where a paper leaves a choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import attrs
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

LARGEST_EXPONENT = 80.0
"""Bound on the exponent of the alpha divergence, below which exp is finite in float32."""

ABSENT = 1e9
"""A reward this far below 0 adds nothing to a sum of exponentials."""


@attrs.frozen(kw_only=True)
class PairSettings:
    """Settings of losses of pairs, under the names of the fields of `PreferenceConfig`."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5


@attrs.frozen(kw_only=True, eq=False)
class Pairs:
    """N pairs. Every field is (N,); log-probabilities are sums over the tokens of an answer, in nats."""

    chosen: Tensor
    """log pi of the better answers."""

    rejected: Tensor
    ref_chosen: Tensor
    """log pi_ref of the better answers; 0 without a reference."""

    ref_rejected: Tensor
    chosen_tokens: Tensor
    """Number of tokens of the better answers."""

    rejected_tokens: Tensor
    aot: Tensor | None = None
    """Reference log-ratio that each pair is compared with in `aot`: see `matched`."""

    aot_chosen: Tensor | None = None
    """Log-ratio of the rejected answer that each chosen one is compared with in `aot_unpaired`."""

    aot_rejected: Tensor | None = None
    """The same of the chosen answer, for each rejected one."""

    @property
    def a(self) -> Tensor:
        """Log-ratio of the better answers."""
        return self.chosen - self.ref_chosen

    @property
    def b(self) -> Tensor:
        """Log-ratio of the worse answers."""
        return self.rejected - self.ref_rejected

    @property
    def mean_chosen(self) -> Tensor:
        """Mean log-probability of a token of the better answers."""
        return self.chosen / self.chosen_tokens.clamp(min=1)

    @property
    def mean_rejected(self) -> Tensor:
        """Mean log-probability of a token of the worse answers."""
        return self.rejected / self.rejected_tokens.clamp(min=1)


PairLoss = Callable[[Pairs, PairSettings], Tensor]
"""A loss in nats, (N,), one number for each pair."""


def matched(values: Tensor, targets: Tensor) -> Tensor:
    """For each of `values` (N,), the one of `targets` (N,) of the same rank: what optimal transport on a line pairs."""
    ranks = values.argsort(stable=True).argsort()
    return targets.sort().values[ranks]


def divergence_score(ratios: Tensor, settings: PairSettings) -> Tensor:
    """f'(pi / pi_ref) of log-ratios x, up to a constant: x for the reverse KL, 1 - e^-x for the forward KL, log 2 +
    log s(x) for Jensen-Shannon, (e^((alpha - 1) x) - 1) / (alpha - 1) for alpha.

    arXiv:2309.16240, table 1.
    """
    match settings.f_divergence_type:
        case "forward_kl":
            return 1 - torch.exp(-ratios)
        case "js_divergence":
            return math.log(2) + logsigmoid(ratios)
        case "alpha_divergence" if abs(exponent := settings.f_alpha_divergence_coef - 1) >= 1e-6:  # else its limit
            return (torch.exp((exponent * ratios).clamp(max=LARGEST_EXPONENT)) - 1) / exponent
        case _:
            return ratios


def sigmoid(pairs: Pairs, settings: PairSettings) -> Tensor:
    """-(1 - eps) log s(beta D) - eps log s(-beta D). DPO, arXiv:2305.18290, eq. 7; eps is the label smoothing of
    conservative DPO.
    """
    return _smoothed(settings.beta * _difference(pairs, settings), settings)


def hinge(pairs: Pairs, settings: PairSettings) -> Tensor:
    """max(0, 1 - beta D). SLiC-HF, arXiv:2305.10425, with the rewards of DPO, as RSO (arXiv:2309.06657, eq. 11)."""
    return relu(1 - settings.beta * _difference(pairs, settings))


def ipo(pairs: Pairs, settings: PairSettings) -> Tensor:
    """(D - 1 / (2 beta))^2 with each side of D divided by the tokens of its answer. IPO, arXiv:2310.12036, eq. 17."""
    return (_mean_difference(pairs, settings) - 1 / (2 * settings.beta)).square()


def robust(pairs: Pairs, settings: PairSettings) -> Tensor:
    """(-(1 - eps) log s(beta D) + eps log s(-beta D)) / (1 - 2 eps): unbiased if a share eps of labels is flipped.

    Robust DPO, arXiv:2403.00409, eq. 12.
    """
    x, eps = settings.beta * _difference(pairs, settings), settings.label_smoothing
    return (-(1 - eps) * logsigmoid(x) + eps * logsigmoid(-x)) / (1 - 2 * eps)


def exo_pair(pairs: Pairs, settings: PairSettings) -> Tensor:
    """q (log q - log(1 - eps)) + (1 - q) (log(1 - q) - log eps) with q = s(beta D). EXO, arXiv:2402.00856, eq. 16."""
    x, eps = settings.beta * _difference(pairs, settings), settings.label_smoothing
    better, worse = logsigmoid(x), logsigmoid(-x)
    return better.exp() * (better - math.log1p(-eps)) + worse.exp() * (worse - math.log(eps))


def nca_pair(pairs: Pairs, settings: PairSettings) -> Tensor:
    """-log s(beta a) - log s(-beta a) / 2 - log s(-beta b) / 2. NCA, arXiv:2402.05369."""
    a, b = settings.beta * pairs.a, settings.beta * pairs.b
    return -logsigmoid(a) - logsigmoid(-a) / 2 - logsigmoid(-b) / 2


def bco_pair(pairs: Pairs, settings: PairSettings) -> Tensor:
    """-log s(beta a) - log s(-beta b). BCO, arXiv:2404.04656, without its shift of rewards."""
    return -logsigmoid(settings.beta * pairs.a) - logsigmoid(-settings.beta * pairs.b)


def sppo_hard(pairs: Pairs, settings: PairSettings) -> Tensor:
    """(a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2. SPPO, arXiv:2405.00675, eq. 4.7 with probabilities 1 and 0."""
    half = 0.5 / settings.beta
    return (pairs.a - half).square() + (pairs.b + half).square()


def aot(pairs: Pairs, settings: PairSettings) -> Tensor:
    """The smoothed logistic loss of beta (x - y) for x, the policy's log-ratios of the chosen to the rejected answers,
    and y, the reference's, both sorted over the batch. AOT, arXiv:2406.05882.
    """
    assert pairs.aot is not None
    return _smoothed(settings.beta * (pairs.chosen - pairs.rejected - pairs.aot), settings)


def aot_unpaired(pairs: Pairs, settings: PairSettings) -> Tensor:
    """The smoothed logistic loss of beta (a - b), both sorted over the batch. AOT, arXiv:2406.05882.

    The partner of an answer may be in another micro-batch, so each side has its gradient from a term of its own, in
    which the partner is a constant; the second term does not count in the value.
    """
    assert pairs.aot_chosen is not None and pairs.aot_rejected is not None
    better = _smoothed(settings.beta * (pairs.a - pairs.aot_chosen), settings)
    worse = _smoothed(settings.beta * (pairs.aot_rejected - pairs.b), settings)
    return better + worse - worse.detach()


def apo_zero(pairs: Pairs, settings: PairSettings) -> Tensor:
    """1 - s(beta a) + s(beta b): for answers better than the model's own. APO, arXiv:2408.06266, eq. 7."""
    return 1 - torch.sigmoid(settings.beta * pairs.a) + torch.sigmoid(settings.beta * pairs.b)


def apo_down(pairs: Pairs, settings: PairSettings) -> Tensor:
    """s(beta a) + 1 - s(beta (a - b)): for answers worse than the model's own. APO, arXiv:2408.06266, eq. 8."""
    return torch.sigmoid(settings.beta * pairs.a) + 1 - torch.sigmoid(settings.beta * (pairs.a - pairs.b))


def discopop(pairs: Pairs, settings: PairSettings) -> Tensor:
    """-(1 - m) log s(x) + m e^-x with x = beta D and m = s(x / tau). DiscoPOP, arXiv:2406.08414, eq. 5."""
    x = settings.beta * _difference(pairs, settings)
    mix = torch.sigmoid(x / settings.discopop_tau)
    return -logsigmoid(x) * (1 - mix) + torch.exp(-x) * mix


def sigmoid_norm(pairs: Pairs, settings: PairSettings) -> Tensor:
    """-log s(beta D), where each side of D is divided by the tokens of its answer. Tulu 3, arXiv:2411.15124, eq. 6."""
    return -logsigmoid(settings.beta * _mean_difference(pairs, settings))


def simpo(pairs: Pairs, settings: PairSettings) -> Tensor:
    """The smoothed logistic loss of beta (mean log pi(chosen) - mean log pi(rejected)) - gamma. SimPO,
    arXiv:2405.14734, eq. 6.
    """
    return _smoothed(settings.beta * (pairs.mean_chosen - pairs.mean_rejected) - settings.simpo_gamma, settings)


def orpo(pairs: Pairs, settings: PairSettings) -> Tensor:
    """-beta log s(log odds(chosen) - log odds(rejected)) with odds = p / (1 - p) and p the geometric mean of the
    probabilities of an answer's tokens: the odds-ratio term of ORPO, arXiv:2403.07691, eq. 7, whose lambda is beta.
    """
    better, worse = _log_odds(pairs.mean_chosen), _log_odds(pairs.mean_rejected)
    return -settings.beta * logsigmoid(better - worse)


PAIR_LOSSES: Mapping[str, PairLoss] = {
    loss.__name__: loss
    for loss in (sigmoid, hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired)
} | {loss.__name__: loss for loss in (apo_zero, apo_down, discopop, sigmoid_norm, simpo, orpo)}
"""Name -> loss. `sft` is no loss of pairs: it is a mean over the tokens of the chosen answers."""


def plackett_luce(rewards: Tensor, exists: Tensor) -> Tensor:
    """sum_k (log sum_{j >= k} e^r_j - r_k): -log of the probability of the ranking, in which each answer is the best of
    those that are left. DPO, arXiv:2305.18290, appendix A.3, eq. 20 with r = beta (log pi - log pi_ref).

    `rewards` (N, K) from the best answer to the worst, `exists` (N, K) false for what only fills a shorter list.
    Returns (N,). With two answers it is the loss of DPO.
    """
    left = torch.where(exists, rewards, -ABSENT).flip(1).logcumsumexp(1).flip(1)
    return torch.where(exists, left - rewards, 0.0).sum(1)


def policy_weights(means: Tensor) -> Tensor:
    """Product of the weights of both answers of a pair, (N, 2) -> (N,): how likely the policy itself is to give them.
    WPO, arXiv:2406.11827, eq. 2 with the weights aligned by the sampled distribution, section 3.2.

    `means` are those over an answer's tokens of log p(token) - log sum_v p(v)^2, in nats.
    """
    return means.sum(1).exp()


def kto(
    ratios: Tensor,
    labels: Tensor,
    baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """w (1 - s(beta (r - z))) for good answers and w (1 - s(beta (z - r))) for bad ones, with r = log pi - log pi_ref.
    KTO, arXiv:2402.01306, eq. 8; with z = 0 the unpaired form of APO-zero, arXiv:2408.06266.

    All inputs and the result are (N,): `labels` 1 for good answers and 0 for bad ones, `baseline` z, the KL divergence
    of the policy from the reference in nats, without gradient.
    """
    signs = 2 * labels - 1
    weights = torch.where(labels > 0, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(beta * signs * (ratios - baseline)))


def _difference(pairs: Pairs, settings: PairSettings) -> Tensor:
    return divergence_score(pairs.a, settings) - divergence_score(pairs.b, settings)


def _mean_difference(pairs: Pairs, settings: PairSettings) -> Tensor:
    better = divergence_score(pairs.a, settings) / pairs.chosen_tokens.clamp(min=1)
    return better - divergence_score(pairs.b, settings) / pairs.rejected_tokens.clamp(min=1)


def _smoothed(x: Tensor, settings: PairSettings) -> Tensor:
    eps = settings.label_smoothing
    return -(1 - eps) * logsigmoid(x) - eps * logsigmoid(-x)


def _log_odds(mean: Tensor) -> Tensor:
    """log p - log(1 - p) for log p below 0; at log p = 0, where odds are infinite, of the next smaller number."""
    below = mean.clamp(max=-torch.finfo(mean.dtype).eps)
    return below - torch.log(-torch.expm1(below))

"""A loss of pairs of one's own. Nothing of skyrl has to be subclassed."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from skyrl.algorithms.preferences import Pairs, PairSettings

LARGEST = 2.0


def positive(pairs: Pairs, settings: PairSettings) -> Tensor:
    """DPO with a penalty for each nat by which the better answer becomes less likely than under the reference, up to
    `LARGEST`: DPO-Positive, arXiv:2402.13228, eq. 3, bounded.
    """
    fallen = (-pairs.a).clamp(0, LARGEST)
    return -logsigmoid(settings.beta * (pairs.a - pairs.b - fallen))

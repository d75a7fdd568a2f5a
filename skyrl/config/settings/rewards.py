"""Adjustments of rewards and advantages before they are used. Formulas and papers are with the functions."""

from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import field, frozen
from skyrl.tree.validators import non_negative, positive


@frozen
class NormConfig(BaseConfig):
    """Shift and scale numbers by their own mean and deviation. The defaults change nothing."""

    mean_level: Literal["batch", "group"] | None = None
    """Subtract the mean of the batch, or of each prompt's group. None: no shift."""

    std_level: Literal["batch", "group"] | None = None
    """Divide by the deviation over the batch, or over each group. None: no division."""

    mean_leave1out: bool = False
    """The mean is that of the other numbers, without the one it is taken from (RLOO, arXiv:2402.14740)."""

    std_unbiased: bool = True
    """The deviation divides by one less than the count."""

    eps: float = field(default=1e-5, validator=positive)
    """Added to the deviation, so that equal numbers do not divide by zero."""


@frozen
class OverlongConfig(BaseConfig):
    """A penalty for long answers (DAPO, arXiv:2503.14476, eq. 13), in tokens of the answer."""

    buffer_len: int | None = field(default=None, validator=positive)
    """Tokens before the limit over which the penalty grows. None: no penalty."""

    penalty_factor: float = field(default=1.0, validator=non_negative)
    """Penalty at the limit."""

    max_len: int | None = field(default=None, validator=positive)
    """The limit. None: `generator.sampling_params.max_generate_length`, which is right for a single turn."""

    floor: bool = True
    """The penalty is never more than `penalty_factor`, as in DAPO. False: it keeps growing beyond the limit, as in
    AReaL."""


@frozen
class RewardShapingConfig(BaseConfig):
    """Shaping of the environment's reward: overlong penalty, then (r + bias) scale, then clip, then norm.

    Filters look at rewards before any of this.
    """

    overlong: OverlongConfig = OverlongConfig()
    """A penalty for long answers."""

    bias: float = 0.0
    """Added to every reward."""

    scale: float = 1.0
    """Factor of every reward, after the bias."""

    clip: float | None = field(default=None, validator=positive)
    """Rewards are clipped to within this distance of 0. None: no clipping."""

    norm: NormConfig = NormConfig()
    """Rewards shifted and scaled by their own mean and deviation."""

"""Expected throughput of a run with occasional failures, and the checkpoint interval that loses the least time.

Failures occur at random with a mean time between them; a run then restarts from its last checkpoint (Daly 2006, "A
higher order estimate of the optimum checkpoint interval for restart dumps", doi:10.1016/j.future.2004.11.016, eq. 20).
"""

from __future__ import annotations

from math import exp, expm1, sqrt

from attrs import frozen

GPU_HOURS_BETWEEN_FAILURES = 50_700.0
"""GPU hours between unexpected interruptions in the training of Llama 3: 419 in 54 days on 16,384 H100
(arXiv:2407.21783, section 3.3.4).
"""


@frozen(kw_only=True)
class Interruptions:
    """A run's failures, and what each costs. All durations in seconds."""

    between: float
    """Mean time between failures of the whole run."""

    restart: float
    """Time from a failure until the run trains again from its checkpoint."""

    checkpoint: float
    """Time for which training pauses for a checkpoint."""

    def share_trained(self, interval: float) -> float:
        """Share of the time, from 0 to 1, spent on training steps that are not lost, with a checkpoint after each
        `interval` of training.
        """
        lost = (interval + self.checkpoint) / self.between
        if self.restart / self.between + lost > MOST:
            return 0.0
        return interval / (self.between * exp(self.restart / self.between) * expm1(lost))

    def best_interval(self, step: float) -> int:
        """Number of steps, each of `step` seconds, between checkpoints that maximizes `share_trained`."""
        near = max(1, round(sqrt(2 * self.checkpoint * self.between) / step))  # Young 1974, doi:10.1145/361147.361115
        steps = max(1, near // 2)
        while self.share_trained((steps + 1) * step) > self.share_trained(steps * step):
            steps += 1
        while steps > 1 and self.share_trained((steps - 1) * step) >= self.share_trained(steps * step):
            steps -= 1
        return steps


MOST = 500.0
"""Number of mean times between failures beyond which no training progress is expected."""

"""What becomes of samples whose environment failed: drawn again, or their group dropped, and at some point enough."""

from __future__ import annotations

from skyrl.errors import RewardError
from skyrl.trajectory import Failure

SHOWN = 3
"""First reasons that a run tells when it stops."""


class FailureTally:
    """Counts the failures of one batch, and ends it when they are too many."""

    def __init__(self, samples: int, max_share: float) -> None:
        """`samples` are wanted; more failures than `max_share` of them are too many."""
        self._samples, self._max_share = samples, max_share
        self._reasons: list[str] = []

    def count(self, failure: Failure) -> None:
        """Raises `RewardError` with the first reasons once there are too many."""
        self._reasons.append(failure.reason)
        if len(self._reasons) > self._max_share * self._samples:
            first = "\n".join(f"  {reason}" for reason in dict.fromkeys(self._reasons[:SHOWN]))
            raise RewardError(
                f"environments failed {len(self._reasons)} times in a batch of {self._samples} samples, more often "
                f"than max_failed_share = {self._max_share:g} of environment.skyrl_gym allows:\n{first}"
            )

    def begin_anew(self) -> None:
        """What is counted from now on belongs to the next batch."""
        self._reasons.clear()

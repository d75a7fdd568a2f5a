"""Bookkeeping of failed samples: they are drawn again, or their group is dropped, up to a limit."""

from __future__ import annotations

from skyrl.errors import RewardError
from skyrl.trajectory import Failure

SHOWN = 3
"""Number of reasons that a run reports when it stops."""


class FailureTally:
    """Counts the failures while one batch is sampled, and raises when there are too many."""

    def __init__(self, samples: int, max_share: float, *, attempts: int = 1) -> None:
        """`samples` is the size of a batch. The limit is the share `max_share` of the batch, or of all samples drawn
        meanwhile if those are more. Up to `attempts` failures, the most that one sample can have, are allowed in any
        case unless `max_share` is 0, so that a small batch survives what a large one does.
        """
        self._batch, self._max_share = samples, max_share
        self._least = attempts if max_share > 0 else 0
        self._running = self._drawn = 0
        self._reasons: list[str] = []

    def begins(self, samples: int) -> None:
        """Count samples that are being drawn."""
        self._running += samples
        self._drawn += samples

    def ends(self, samples: int) -> None:
        """Count samples that are finished, with any outcome."""
        self._running -= samples

    def count(self, failure: Failure) -> None:
        """Count one failure. Raises `RewardError` with the first reasons once there are too many."""
        self._reasons.append(failure.reason)
        samples = max(self._batch, self._drawn)
        if len(self._reasons) > max(self._least, self._max_share * samples):
            first = "\n".join(f"  {reason}" for reason in dict.fromkeys(self._reasons[:SHOWN]))
            raise RewardError(
                f"environments failed {len(self._reasons)} times among {samples} samples, more often "
                f"than max_failed_share = {self._max_share:g} of environment.skyrl_gym allows:\n{first}"
            )

    def reset(self) -> None:
        """Start counting for the next batch, of which some samples are being drawn already."""
        self._reasons.clear()
        self._drawn = self._running

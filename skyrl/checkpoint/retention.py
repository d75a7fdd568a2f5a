"""Retention of checkpoints: the newest, those at a fixed interval, and the best. A step is kept if any rule says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen


@frozen(kw_only=True)
class Retention:
    """Retention settings. -1 for `last` keeps everything; -1 for the others adds nothing."""

    last: int = -1
    """Number of the newest checkpoints to keep, at least 1."""

    every: int = -1
    """Interval, in steps, of checkpoints that are kept permanently."""

    best: int = -1
    """Number of checkpoints with the best `metric` to keep; a tie is won by the newer one."""

    metric: str | None = None
    """Name of the metric that ranks checkpoints. A step without this metric is never among the best."""

    larger_is_better: bool = True

    def steps_to_keep(self, steps: Sequence[int], values: Mapping[int, float] = {}) -> set[int]:
        """The subset of `steps` to keep, which always contains the newest; `values` are values of `metric` by step."""
        ascending = sorted(steps)
        if self.last == -1:
            return set(ascending)
        kept = set(ascending[-max(self.last, 1) :])
        if self.every > 0:
            kept |= {step for step in ascending if step % self.every == 0}
        if self.best > 0:
            sign = 1 if self.larger_is_better else -1
            kept |= set(
                sorted(values.keys() & set(ascending), key=lambda step: (sign * values[step], step))[-self.best :]
            )
        return kept

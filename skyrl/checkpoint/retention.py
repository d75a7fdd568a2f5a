"""Retention of checkpoints: the newest, some at even distances, the best ones. A step that any rule keeps is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen


@frozen(kw_only=True)
class Retention:
    """Retention settings. -1 for `last` keeps everything; -1 for the others adds nothing."""

    last: int = -1
    """How many of the newest."""

    every: int = -1
    """Interval of the steps that are kept for good."""

    best: int = -1
    """How many with the best `metric`; of equal ones the newer."""

    metric: str | None = None
    """Name among the metrics of a step. A step that has none is among no best."""

    larger_is_better: bool = True

    def kept(self, steps: Sequence[int], values: Mapping[int, float] = {}) -> set[int]:
        """Steps of `steps` that are kept, the newest always among them; `values` are the metric's, by step."""
        ascending = sorted(steps)
        if self.last == -1:
            return set(ascending)
        kept = set(ascending[-self.last :])
        if self.every > 0:
            kept |= {step for step in ascending if step % self.every == 0}
        if self.best > 0:
            sign = 1 if self.larger_is_better else -1
            kept |= set(
                sorted(values.keys() & set(ascending), key=lambda step: (sign * values[step], step))[-self.best :]
            )
        return kept

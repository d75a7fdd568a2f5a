"""Watches metrics for signs of failing training: every configured alarm sees every record of the run.

    alarms = Alarms(alarms_of(trainer.alarms, defaults=True))
    for raised in alarms.look(step, metrics): ...

An alarm keeps a bounded number of values. Checkpoints store them, so a resumed run raises the same alarms as an
uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from statistics import fmean
from typing import Any, Literal

import attrs

from skyrl.config.settings.alarms import DEFAULT_ALARMS, AlarmConfig


@attrs.frozen(kw_only=True)
class RaisedAlarm:
    """An alarm whose condition became true."""

    step: int
    name: str
    metric: str
    action: Literal["warn", "save", "stop", "off"]
    reason: str
    """Sentence with the numbers."""


@attrs.define
class _Peak:
    """The best value so far, its standard error, and the mean of the other metric at that time."""

    value: float
    error: float
    against: float | None


@attrs.define
class _AlarmState:
    """Values that an alarm remembers."""

    count: int = 0
    first: list[float] = attrs.Factory(list)
    last: list[float] = attrs.Factory(list)
    best_before: float | None = None
    """The best value before the most recent ones."""

    against: list[float] = attrs.Factory(list)
    peak: _Peak | None = None
    is_raised: bool = False


class Alarm:
    """One alarm and what it has seen."""

    def __init__(self, config: AlarmConfig) -> None:
        self.config = config
        self._seen = _AlarmState()

    def look(self, metrics: Mapping[str, float]) -> str | None:
        """A sentence if this record makes the condition true; None if it is false, or was already true."""
        other = metrics.get(self.config.against)
        if other is not None and isfinite(other):
            self._seen.against = [*self._seen.against, other][-self.config.window :]
            if self._seen.peak is not None and self._seen.peak.against is None:  # peak from before the first step
                self._seen.peak.against = other
        value = metrics.get(self.config.metric)
        if value is None or not isfinite(value):
            return None
        self._note(value)
        reason = self._reason(value, metrics)
        was_raised, self._seen.is_raised = self._seen.is_raised, reason is not None
        return None if was_raised else reason

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, together with the alarm's condition."""
        return {"condition": self._condition(), "seen": attrs.asdict(self._seen)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; the state of a different condition is ignored."""
        if state.get("condition") == self._condition():
            seen = dict(state["seen"])
            peak = seen.pop("peak")
            self._seen = _AlarmState(**seen, peak=None if peak is None else _Peak(**peak))

    def _condition(self) -> dict[str, Any]:
        return attrs.asdict(self.config, filter=lambda attribute, _: attribute.name not in ("name", "action"))

    def _note(self, value: float) -> None:
        """Remember a value of the metric."""
        seen, window = self._seen, self.config.window
        seen.count += 1
        if len(seen.first) < window:
            seen.first.append(value)
        seen.last.append(value)
        if len(seen.last) > window:
            oldest = seen.last.pop(0)
            seen.best_before = oldest if seen.best_before is None else self._better(oldest, seen.best_before)

    def _reason(self, value: float, metrics: Mapping[str, float]) -> str | None:
        seen, config = self._seen, self.config
        if config.when == "drops":
            return self._dropped(value, metrics.get(f"{config.metric}_stderr"))
        compares = config.when in ("rises", "falls")
        if seen.count < config.window * (2 if compares else 1):  # the first and the last windows must not overlap
            return None
        mean, since = fmean(seen.last), f"over the last {config.window} values"
        first = fmean(seen.first) if compares else 1.0
        bound = config.threshold * first
        compared = f" ({config.threshold:g} times the {first:.4g} of the first)" if compares else ""
        match config.when:
            case "above" | "rises" if mean > bound:
                return f"{config.metric} is {mean:.4g} {since}, above {bound:.4g}{compared}"
            case "below" | "falls" if mean < bound:
                return f"{config.metric} is {mean:.4g} {since}, below {bound:.4g}{compared}"
            case "stalls" if seen.best_before is not None and not self._improved(seen.best_before):
                return f"{config.metric} has not been better than {seen.best_before:.4g} {since}"
        return None

    def _dropped(self, value: float, error: float | None) -> str | None:
        """The reason if the value is far below the best, while the other metric, if one is configured, has risen."""
        seen, config = self._seen, self.config
        against = fmean(seen.against) if seen.against else None
        if seen.peak is None or self._better(value, seen.peak.value) != seen.peak.value:
            seen.peak = _Peak(value, 0.0 if error is None else error, against)
            return None
        unit = 1.0 if error is None else sqrt(seen.peak.error**2 + error**2)
        if abs(value - seen.peak.value) <= config.threshold * unit:
            return None
        dropped, before = f"{config.metric} is {value:.4g} after {seen.peak.value:.4g}", seen.peak.against
        if not config.against:
            return dropped
        if before is None or against is None or against <= before:
            return None
        return f"{dropped}, while {config.against} rose from {before:.4g} to {against:.4g}"

    def _improved(self, before: float) -> bool:
        best = max(self._seen.last) if self.config.better == "max" else min(self._seen.last)
        gain = best - before if self.config.better == "max" else before - best
        return gain > self.config.threshold

    def _better(self, one: float, other: float) -> float:
        return max(one, other) if self.config.better == "max" else min(one, other)


class Alarms:
    """All alarms of a run."""

    def __init__(self, configs: Sequence[AlarmConfig]) -> None:
        self._alarms = {config.name: Alarm(config) for config in configs}
        self._stopped_by = ""

    @property
    def stopped_by(self) -> str:
        """Name of the alarm that ended the run; empty if none has."""
        return self._stopped_by

    def look(self, step: int, metrics: Mapping[str, float]) -> list[RaisedAlarm]:
        """The alarms that this record raises, in the order of the configuration."""
        result = []
        for name, alarm in self._alarms.items():
            reason = alarm.look(metrics)
            if reason is None:
                continue
            known = DEFAULT_ALARMS.get(name)
            explained = f"{reason}. {known.meaning}" if known else reason
            action = alarm.config.action
            result.append(
                RaisedAlarm(step=step, name=name, metric=alarm.config.metric, action=action, reason=explained)
            )
            if action == "stop":
                self._stopped_by = self._stopped_by or name
        return result

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "stopped_by": self._stopped_by,
            "alarms": {name: alarm.state() for name, alarm in self._alarms.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. `stopped_by` is cleared if that alarm was removed or no longer stops the
        run.
        """
        stored = state.get("alarms", {})
        for name, alarm in self._alarms.items():
            if name in stored:
                alarm.load_state(stored[name])
        name = str(state.get("stopped_by", ""))
        by = self._alarms.get(name)
        is_the_same = by is not None and by.state()["condition"] == stored.get(name, {}).get("condition")
        self._stopped_by = name if by is not None and by.config.action == "stop" and is_the_same else ""

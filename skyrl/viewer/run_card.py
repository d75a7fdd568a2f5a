"""The head of a report and of the page of a run: what was trained, its scores, its cost and its troubles; and events
besides steps: starts, checkpoints, alarms, skipped steps, failures, lost engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import hypot, sqrt
from pathlib import Path
from statistics import fmean, median

from attrs import frozen

from skyrl.errors import UserError
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.run_progress import BESIDE_STEPS, GONE, SESSIONS, Now, now_in
from skyrl.tree.files import stored_text
from skyrl.viewer.run_metrics import RunMetrics, Series

MOST_EVENTS = 500
"""Largest number of events in a report."""

_NEAR = 5
"""Number of steps at each end of a run whose rewards are averaged: one step's reward is noisy."""

_MANY = 0.5
"""Share of answers that were cut off, and of groups with equal rewards, from which it is worth a look."""

_LOSSES = {"regular": "PPO's clipped loss"}
"""Name of a policy loss in the configuration -> its name in the field, where they differ."""

_SUPERVISED = {"sft": "supervised fine-tuning", "reward_model": "reward model", "preference": "preferences"}


@frozen(kw_only=True)
class Score:
    """A number that the run is about: at its start, at its end, and at its best."""

    name: str
    first: float
    first_at: str
    last: float
    last_at: str
    best: float | None = None
    best_at: str = ""
    low_is_good: bool = False
    error: float = 0.0
    """Standard error of the difference between the last number and the first, so far as it is known."""

    @property
    def change(self) -> str:
        """`better` or `worse`; `same` where the difference is within two standard errors, or small."""
        gain = (self.first - self.last) if self.low_is_good else (self.last - self.first)
        unclear = max(2 * self.error, 0.005 * max(1.0, abs(self.first)))
        return "same" if abs(gain) <= unclear else "better" if gain > 0 else "worse"


@frozen(kw_only=True)
class RunCard:
    """Summary of a run: how it ended, its scores, its cost and its troubles."""

    name: str
    state: str
    """How the run ended, or that it continues."""

    tone: str
    """Class of the state in the style sheet: `good`, `bad`, `live` or `plain`."""

    trained: tuple[tuple[str, str], ...]
    """Labels and values: algorithm, model, data and the like."""

    scores: tuple[Score, ...]
    cost: tuple[tuple[str, str], ...]
    troubles: tuple[str, ...]
    notes: tuple[str, ...]
    """Observations that are no trouble, but worth a look."""


def run_card(folder: Path, name: str, metrics: RunMetrics, *, gpus: int | None = None) -> RunCard:
    """The card of the run in `folder`. `gpus` is the number of its GPUs, None if it is not known."""
    now = now_in(folder)
    state, tone = state_of(now, metrics.last_step)
    starts = [event.step for event in _starts(folder)] or ([_whole(now.first_step)] if now else [])
    steps = [str(step) for step in starts if step]
    resumed = [f"resumed from step{'s' if len(steps) > 1 else ''} {', '.join(steps)}"] if steps else []
    events = troubles(folder, metrics.series)
    # The newest warning of a run may be one of its alarms, which are among the troubles.
    alarm_messages = {event.words.partition(": ")[2] for event in events if event.kind == "alarm"} - {""}
    warned = (
        [f"warning: {now.warning}"] if now and now.warning and not now.warning.endswith(tuple(alarm_messages)) else []
    )
    stored = stored_configuration(folder)
    return RunCard(
        name=name,
        state=state,
        tone=tone,
        trained=tuple(_trained(stored)),
        scores=tuple(scores(metrics)),
        cost=tuple(cost(metrics, gpus, "cpu" if _text(stored, "trainer.device", "device") == "cpu" else "")),
        troubles=(*resumed, *_counted(events), *warned),
        notes=tuple(_notes(metrics)),
    )


def stored_configuration(folder: Path) -> Mapping[str, object]:
    """The resolved configuration of a run, as plain data; empty if it cannot be read."""
    try:
        stored = json.loads(stored_text(folder / "config.json"))["config"]
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def state_of(now: Now | None, step: int) -> tuple[str, str]:
    """How a run ended that has reached `step`, or that it continues, in words; and the tone of this news."""
    total = _whole(now.total_steps) if now else 0
    at = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    match now.state if now else None:
        case None:
            return f"at {at}; how it ended is not recorded", "plain"
        case "running":
            return f"running, {at}", "live"
        case "finished":
            return f"finished, {at}", "good"
        case state if state == GONE:
            return f"ended without a word at {at}: its process or its machine was killed", "bad"
        case "failed":
            return f"failed at {at}: its log says why", "bad"
        case other:
            return f"{other} at {at}", "plain"


def _whole(value: object) -> int:
    """The number, or 0 for what a damaged file has in its place."""
    return value if type(value) is int and value > 0 else 0


def _trained(stored: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    kind = _text(stored, "kind") or "rl"
    estimator = _text(stored, "trainer.algorithm.advantage_estimator")
    loss = _text(stored, "trainer.algorithm.policy_loss_type")
    method = f"{estimator} advantages, {_LOSSES.get(loss, f'{loss} loss')}"
    yield "method", _SUPERVISED.get(kind, method if loss else "reinforcement learning")
    for label, *paths in (
        ("model", "trainer.policy.model.path", "model.path"),
        ("agent", "environment.agent.function", "environment.agent.command"),
        ("task", "environment.env_class"),
        ("data", "data.train_data", "train_datasets"),
        ("learning rate", "trainer.policy.optimizer_config.lr", "optimizer_config.lr"),
    ):
        if text := _text(stored, *paths):
            yield label, text
    prompts = _text(stored, "trainer.train_batch_size", "batch_size")
    samples = _text(stored, "generator.n_samples_per_prompt")
    if prompts:
        yield "each step", f"{prompts} prompts x {samples} samples" if samples else f"{prompts} rows"


def _text(stored: Mapping[str, object], *paths: str) -> str:
    """The value at the first of these dotted paths that has one, as text."""
    for path in paths:
        value: object = stored
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, list):
            value = ", ".join(str(item.get("path", item) if isinstance(item, Mapping) else item) for item in value)
        if value not in (None, ""):
            return f"{value:g}" if isinstance(value, float) else str(value)
    return ""


def scores(metrics: RunMetrics) -> Iterator[Score]:
    """The scores of a run: of its evaluations and of its training."""
    for name, title in (("eval/all/avg_score", "evaluation score"), ("eval/all/loss", "evaluation loss")):
        if name in metrics.series:
            error = metrics.series.get(f"{name}_stderr")
            yield _score(title, metrics.series[name], error, low_is_good=title.endswith("loss"))
    for name, title in (("reward/avg_raw_reward", "training reward"), ("train/loss", "training loss")):
        if name in metrics.series:
            yield _averaged(title, metrics.series[name], low_is_good=title.endswith("loss"))


def _score(title: str, series: Series, error: Series | None, *, low_is_good: bool) -> Score:
    """The scores of evaluations, with their own standard errors where each has one."""
    best = (min if low_is_good else max)(range(len(series)), key=series.values.__getitem__)
    return Score(
        name=title,
        first=series.values[0],
        first_at=f"step {series.steps[0]}",
        last=series.values[-1],
        last_at=f"step {series.steps[-1]}",
        best=series.values[best],
        best_at=f"step {series.steps[best]}",
        error=hypot(error.values[0], error.values[-1]) if error and len(error) == len(series) else _spread(series),
        low_is_good=low_is_good,
    )


def _averaged(title: str, series: Series, *, low_is_good: bool) -> Score:
    near = max(1, min(_NEAR, len(series) // 2))
    return Score(
        name=title,
        first=fmean(series.values[:near]),
        first_at=f"first {near} steps" if near > 1 else f"step {series.steps[0]}",
        last=fmean(series.values[-near:]),
        last_at=f"last {near} steps" if near > 1 else f"step {series.steps[-1]}",
        low_is_good=low_is_good,
        error=_spread(series) * sqrt(2 / near),
    )


def _spread(series: Series) -> float:
    """Standard deviation of the noise of one step, from the median difference of neighbouring steps, which a trend
    hardly moves; 0 for a single step. The median of |x - y| of two normal numbers is 0.954 standard deviations.
    """
    return median(abs(later - value) for value, later in pairwise(series.values)) / 0.954 if len(series) > 1 else 0.0


def cost(metrics: RunMetrics, gpus: int | None, device: str) -> Iterator[tuple[str, str]]:
    """Cost of a run, with labels. `gpus` is the number of its GPUs, None if it is not known."""
    seconds = (metrics.last("timing/all_steps") or metrics.total("timing/step")) + sum(map(metrics.total, BESIDE_STEPS))
    yield "time", f"{_duration(seconds)}, without start-up"
    if device == "cpu" or gpus == 0:
        yield "GPUs", "none"
    elif gpus:
        yield "GPU hours", f"{gpus * seconds / 3600:.2f} ({gpus} GPU{'s' if gpus > 1 else ''})"
    for name, label in (("trainer/samples_seen", "samples"), ("trainer/tokens_seen", "tokens")):
        if (count := metrics.last(name)) is not None:
            yield label, f"{count:,.0f}"
    if "memory/process_bytes" in metrics.series:
        yield "peak memory", f"{max(metrics.series['memory/process_bytes'].highs) / 2**30:.1f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _counted(events: list[RunEvent]) -> Iterator[str]:
    """A sentence for each kind of event, and for each alarm: how often, and in which steps first and last."""
    kinds: dict[str, list[RunEvent]] = {}
    for event in events:
        kinds.setdefault(f"alarm {event.words}" if event.kind == "alarm" else event.kind, []).append(event)
    for kind, own in kinds.items():
        where = f"step {own[0].step}" if len(own) == 1 else f"{len(own)} times, steps {own[0].step} to {own[-1].step}"
        yield f"{kind} ({where})"


def _notes(metrics: RunMetrics) -> Iterator[str]:
    reward = metrics.last("reward/avg_raw_reward")
    mean = "" if reward is None else f" (the mean reward of the step is {reward:.2g})"
    for name, words in (
        ("generate/truncated_ratio", "of the last step's answers were cut off at the length limit"),
        (
            "reward/zero_variance_groups",
            f"of the last step's groups have rewards that are all equal: no learning signal{mean}",
        ),
    ):
        share = metrics.last(name)
        if share is not None and share >= _MANY:
            yield f"{share:.0%} {words}"


@frozen(kw_only=True, order=True)
class RunEvent:
    """Something that happened in a step."""

    step: int
    kind: str
    words: str


def events(run: Path, series: Mapping[str, Series]) -> list[RunEvent]:
    """Events of a run in the order of its steps, the first `MOST_EVENTS` of them."""
    return sorted([*_checkpoints(run), *_starts(run), *troubles(run, series)])[:MOST_EVENTS]


def troubles(run: Path, series: Mapping[str, Series]) -> list[RunEvent]:
    """The events that may be a reason to look: all but checkpoints and starts."""
    alarms = [
        RunEvent(step=int(line["step"]), kind="alarm", words=f"{line.get('name')}: {line.get('reason')}")
        for line in JsonLines(run / "alarms.jsonl").read()
    ]
    return sorted([*_metric_events(series), *_engines(series), *alarms])


_ENDED = {"stopped": "was stopped", GONE: "ended without a word", "failed": "failed", "finished": "finished"}


def _starts(run: Path) -> Iterator[RunEvent]:
    """Each start of a run, with the end of the session before it, and the settings that changed."""
    for line in JsonLines(run / SESSIONS).read():
        parts, before, changes = [f"at {line.get('time')}"], line.get("before"), line.get("changes")
        if isinstance(before, Mapping):
            parts.append(f"the session before {_ENDED.get(str(before.get('state')))} at step {before.get('step')}")
        for path, values in changes.items() if isinstance(changes, Mapping) else ():
            was, now = values if isinstance(values, list) and len(values) == 2 else ("?", "?")
            parts.append(f"{path}: {was} before, {now} now")
        yield RunEvent(step=int(line["step"]), kind="start", words="; ".join(parts))


_COUNTED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("trainer/skipped_steps", "skipped step", lambda _: "left out because a number was not finite"),
    ("policy/skipped_updates", "skipped update", lambda share: f"{share:g} of the optimizer steps of the policy"),
    ("critic/skipped_updates", "skipped update", lambda share: f"{share:g} of the optimizer steps of the critic"),
    ("rollout/failures", "failures", lambda count: f"{count:g} attempts failed in the environment"),
    ("rollout/dropped_groups", "dropped groups", lambda count: f"{count:g} groups left out after failures"),
    ("eval/failures", "failures", lambda count: f"{count:g} attempts failed in evaluation"),
)


def _metric_events(series: Mapping[str, Series]) -> Iterator[RunEvent]:
    for name, kind, words in _COUNTED:
        if name in series:
            for step, value in zip(series[name].steps, series[name].highs, strict=True):
                if value > 0:
                    yield RunEvent(step=step, kind=kind, words=words(value))


def _engines(series: Mapping[str, Series]) -> Iterator[RunEvent]:
    before, lost = 0.0, series.get("inference/engines_lost", Series())
    for step, count in zip(lost.steps, lost.highs, strict=True):
        if count != before:
            yield RunEvent(step=step, kind="engines", words=f"{count:g} out of service, {before:g} before")
        before = count


def _checkpoints(run: Path) -> Iterator[RunEvent]:
    """Checkpoints that exist now; older ones may have been deleted."""
    from skyrl.checkpoint.names import step_of  # here: a page of `skyrl view` does not wait for the configuration
    from skyrl.errors import SkyRLError
    from skyrl.runs.stored_runs import checkpoints_of

    try:
        folder = checkpoints_of(str(run))
    except SkyRLError:
        return
    for path in Path(folder).glob("*") if "://" not in folder else ():
        step = step_of(path.name)
        if step is not None:
            yield RunEvent(step=step, kind="checkpoint", words=path.name)

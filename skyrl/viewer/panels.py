"""Which curves of runs are drawn, in which order and with which titles: one metric in a panel, a line for each run.

Only metrics that belong together, such as the shortest, mean and longest answer, share a panel. Metrics whose curves
are equal share one line, and those that never change are listed, not drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from skyrl.viewer.run_metrics import Series

Runs = Mapping[str, Mapping[str, Series]]
"""Series by name, for each run by its name."""

PHASES = re.compile(r"timing/(?!step$|all_steps$).+")
"""Metrics that are parts of the time of a step."""


@frozen
class Kind:
    """Metrics that are drawn alike. In `title`, `{}` is what the group of `pattern` matched."""

    section: str
    title: str
    unit: str
    pattern: str
    together: bool = False
    """Whether the metrics of a single run share one panel, and each line is labelled by what the group matched."""


BYTES = "bytes"
"""Unit of metrics that are shown in MiB."""

KINDS: tuple[Kind, ...] = (
    Kind("Outcome", "Reward", "mean of the step's samples", r"reward/avg_raw_reward()"),
    Kind("Outcome", "Evaluation: {}", "mean score", r"eval/(.+)/avg_score"),
    Kind("Outcome", "Evaluation loss: {}", "nats per token", r"eval/(.+)/loss"),
    Kind("Outcome", "Evaluation: pass@{}", "share of prompts", r"eval/all/pass_at_([2-9]|\d\d+)"),
    Kind("Outcome", "Part of the reward: {}", "mean", r"reward/component/(.+)"),
    Kind("Outcome", "Training {}", "", r"train/(accuracy|margin)"),
    Kind("Optimization", "Loss of {}", "", r"(policy)/(?:final_loss|policy_loss)|(critic)/critic_loss"),
    Kind("Optimization", "Training loss", "nats per token", r"train/loss()"),
    Kind("Optimization", "KL to the reference", "nats", r"(?:policy/policy_kl|loss/avg_kl)()"),
    Kind("Optimization", "Entropy of the policy", "nats per token", r"policy/policy_entropy()"),
    Kind("Optimization", "Clipped: {}", "share of tokens", r"policy/(clip_ratio|.+_clip_high_ratio|.+_masked_ratio)"),
    Kind("Optimization", "Gradient norm of {}", "before clipping", r"(policy|critic)/grad_norm|(train)/grad_norm"),
    Kind("Optimization", "Learning rate of {}", "", r"(policy|critic)/.+_lr|(train)/lr"),
    Kind("Sampling", "Length of answers: {}", "tokens", r"generate/(avg|max|min)_num_tokens", together=True),
    Kind("Sampling", "Answers that were {}", "share", r"generate/(truncated|repeated)_ratio"),
    Kind(
        "Sampling", "Groups whose rewards are all equal", "share: no learning signal", r"reward/zero_variance_groups()"
    ),
    Kind("Sampling", "Staleness: {}", "versions of the weights", r"async/staleness_(mean|max|ratio)"),
    Kind("Sampling", "Turns", "mean of a sample", r"generate/avg_num_turns()"),
    Kind("System", "Tokens per second", "", r"trainer/tokens_per_second()"),
    Kind("System", "Memory: {}", BYTES, r"memory/(.+?)(?:_bytes)?"),
    Kind("System", "Engine against learner", "nats per token, mean", r"policy/rollout_train_logprobs_abs_diff_mean()"),
    Kind("System", "Weights after transfer", "nats per token, mean", r"weight_sync/parity_mean()"),
    Kind("System", "Engines: {}", "number", r"inference/engines_(in_service|lost)"),
)


@frozen(kw_only=True)
class Line:
    """One curve of a panel."""

    run: str
    label: str
    """Name among the lines of its run; empty if it is the only one."""

    series: Series


@frozen(kw_only=True)
class Panel:
    """One chart."""

    section: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    """Names of the metrics; several on one line have equal values."""

    lines: tuple[Line, ...]


def panels(runs: Runs) -> list[Panel]:
    """The panels of these runs. Those whose lines are all the same constant are left out: see `constants`."""
    return [panel for panel in _all_panels(runs) if panel.section == "Outcome" or not _is_flat(panel)]


def constants(runs: Runs) -> list[tuple[str, float]]:
    """Metrics of `KINDS` that have the same value in all steps of all runs."""
    flat = (panel for panel in _all_panels(runs) if panel.section != "Outcome" and _is_flat(panel))
    return [(name, panel.lines[0].series.values[0]) for panel in flat for name in panel.metrics]


def phases(series: Mapping[str, Series]) -> dict[str, Series]:
    """Seconds of each phase of a run, without metrics that say how long a whole step took."""
    return {name.removeprefix("timing/"): item for name, item in series.items() if PHASES.fullmatch(name)}


def _all_panels(runs: Runs) -> Iterator[Panel]:
    for kind in KINDS:
        pattern = re.compile(kind.pattern)
        names = {name: match for series in runs.values() for name in series if (match := pattern.fullmatch(name))}
        labels = {name: next((part for part in match.groups() if part), "") for name, match in names.items()}
        if kind.together and names and len(runs) == 1:
            yield _panel(kind, kind.title.removesuffix(": {}"), list(names), runs, labels)
            continue
        for same in _equal(list(names), runs):
            title = kind.title.format(" = ".join(dict.fromkeys(labels[name].replace("_", " ") for name in same)))
            yield _panel(kind, title, same, runs, {})


def _panel(kind: Kind, title: str, names: Sequence[str], runs: Runs, labels: Mapping[str, str]) -> Panel:
    visible = list(labels) if labels else names[:1]
    lines = [
        Line(run=run, label=labels.get(name, ""), series=series[name])
        for run, series in runs.items()
        for name in visible
        if name in series
    ]
    return Panel(section=kind.section, title=title, unit=kind.unit, metrics=tuple(names), lines=tuple(lines))


def _equal(names: Sequence[str], runs: Runs) -> list[list[str]]:
    """The names, those together whose series are equal in every run."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        curves = (series.get(name) for series in runs.values())
        key = tuple(result and (result.steps.tobytes(), result.values.tobytes()) for result in curves)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _is_flat(panel: Panel) -> bool:
    values = {line.series.values[0] for line in panel.lines}
    return len(values) == 1 and all(line.series.is_constant for line in panel.lines)

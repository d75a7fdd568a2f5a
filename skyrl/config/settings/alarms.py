"""Alarms: conditions on metrics, each with an action when it is met. `DEFAULT_ALARMS` are on by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import field, frozen
from skyrl.tree.classes import fields_of
from skyrl.tree.validators import positive


@frozen
class AlarmConfig(BaseConfig):
    """A condition on one metric. An alarm is raised when its condition becomes true, and again after it was false."""

    name: str = ""
    """Name in messages and metrics (`alarm/<name>`). The name of a default alarm changes that alarm, which keeps its
    values for fields that are left out. Empty: `metric`."""

    metric: str = ""
    """Name of the metric, as in `metrics.jsonl`. Steps without it are skipped."""

    when: Literal["above", "below", "rises", "falls", "stalls", "drops"] = "above"
    """Condition, on the mean of the last `window` values. above, below: it is above or below `threshold`; rises, falls:
    it is above or below `threshold` times the mean of the first `window` values; stalls: none of the last `window`
    values is better than the best before them by more than `threshold`; drops: the last value is worse than the best by
    more than `threshold` standard errors (of `<metric>_stderr`; 1 without), while `against` has risen since then."""

    threshold: float = 0.0
    """Number that the condition compares with; see `when`."""

    window: int = field(default=5, validator=positive)
    """Number of values of the metric that are considered together; with `stalls`, the patience of early stopping, in
    evaluations."""

    better: Literal["max", "min"] = "max"
    """Whether larger or smaller values of the metric are better, for `stalls` and `drops`."""

    against: str = ""
    """Metric that must have risen for `drops`, by its mean over `window` steps. Empty: no such condition."""

    action: Literal["warn", "save", "stop", "off"] = "warn"
    """Action besides a line on the console, in `alarms.jsonl` and in the metrics. save: write a checkpoint; stop: write
    one, and finish the run as if this step were its last; off: the alarm is never raised."""


@attrs.frozen
class DefaultAlarm:
    """An alarm that every run has."""

    config: AlarmConfig
    meaning: str
    """Likely cause, and what to do."""


DEFAULT_ALARMS: Mapping[str, DefaultAlarm] = {
    alarm.config.name: alarm
    for alarm in (
        DefaultAlarm(
            AlarmConfig(name="entropy_collapse", metric="policy/policy_entropy", when="falls", threshold=0.1),
            "The policy has stopped exploring: lower the learning rate, raise clip_high, or add an entropy bonus.",
        ),
        DefaultAlarm(
            AlarmConfig(name="entropy_explosion", metric="policy/policy_entropy", when="rises", threshold=4.0),
            "The policy drifts into noise: the entropy bonus or the learning rate is too large.",
        ),
        DefaultAlarm(
            AlarmConfig(name="kl_blow_up", metric="policy/policy_kl", when="above", threshold=1.0),
            "The policy is far from its reference: lower the learning rate, or raise kl_loss_coef.",
        ),
        DefaultAlarm(
            AlarmConfig(name="kl_penalty_blow_up", metric="loss/avg_kl", when="above", threshold=1.0),
            "The policy is far from its reference: lower the learning rate, or raise kl_loss_coef.",
        ),
        DefaultAlarm(
            AlarmConfig(name="reward_collapse", metric="reward/avg_raw_reward", when="falls", threshold=0.2),
            "The policy has lost what it could do: lower the learning rate.",
        ),
        DefaultAlarm(
            AlarmConfig(
                name="evaluation_falls",
                metric="eval/all/avg_score",
                when="drops",
                threshold=3.0,
                against="reward/avg_raw_reward",
            ),
            "Reward rises while evaluation falls: the reward can be had without solving the task, or data leak.",
        ),
        DefaultAlarm(
            AlarmConfig(name="length_explosion", metric="generate/avg_assistant_tokens", when="rises", threshold=3.0),
            "Answers become ever longer: the reward may pay for length.",
        ),
        DefaultAlarm(
            AlarmConfig(name="truncated_answers", metric="generate/truncated_ratio", when="above", threshold=0.5),
            "Most answers reach max_generate_length, and are judged before they end.",
        ),
        DefaultAlarm(
            AlarmConfig(name="repeated_text", metric="generate/repeated_ratio", when="above", threshold=0.5),
            "Answers repeat themselves.",
        ),
        DefaultAlarm(
            AlarmConfig(
                name="no_signal", metric="reward/zero_variance_groups", when="above", threshold=0.95, window=10
            ),
            "Nearly all groups have equal rewards, from which nothing is learned: prompts are too easy or too hard.",
        ),
        DefaultAlarm(
            AlarmConfig(
                name="train_rollout_difference",
                metric="policy/rollout_train_logprobs_abs_diff_mean",
                when="above",
                threshold=0.1,
            ),
            "Learner and engine disagree on log-probabilities: see off_policy_correction, dtypes and kernels.",
        ),
        DefaultAlarm(
            AlarmConfig(
                name="throughput_halved", metric="trainer/tokens_per_second", when="falls", threshold=0.5, window=25
            ),
            "Steps are half as fast as they were: an engine may be lost, or the machine is shared.",
        ),
    )
}


def alarms_of(written: Sequence[AlarmConfig], *, defaults: bool) -> tuple[AlarmConfig, ...]:
    """All alarms of a run: the default ones if `defaults` is true, changed by written ones of the same name, then the
    other written ones. Alarms that are off are left out.
    """
    alarms = {name: alarm.config for name, alarm in DEFAULT_ALARMS.items()} if defaults else {}
    for alarm in written:
        name = alarm.name or alarm.metric
        if name in DEFAULT_ALARMS:  # keeps its values for fields that are left out
            plain = {key: attribute.default for key, attribute in fields_of(AlarmConfig).items()}
            changes = {key: getattr(alarm, key) for key in plain if getattr(alarm, key) != plain[key]}
            alarms[name] = attrs.evolve(DEFAULT_ALARMS[name].config, **changes)
        else:
            alarms[name] = attrs.evolve(alarm, name=name)
    return tuple(alarm for alarm in alarms.values() if alarm.action != "off")

"""Alarms on recorded metrics: each default one on the course that it is for, and the conditions by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import pytest

from skyrl.config import compose
from skyrl.config.settings.alarms import DEFAULT_ALARMS, AlarmConfig, alarms_of
from skyrl.errors import ConfigError
from skyrl.tracking.metric_table import unknown
from skyrl.training.alarms import Alarm, Alarms

Records = Iterable[Mapping[str, float]]


def course(metric: str, values: Sequence[float], **others: float) -> list[dict[str, float]]:
    return [{metric: value, **others} for value in values]


def raised(records: Records, *written: AlarmConfig, defaults: bool = True) -> list[tuple[int, str]]:
    """Step and name of every alarm that the records raise."""
    alarms = Alarms(alarms_of(written, defaults=defaults))
    return [(event.step, event.name) for step, record in enumerate(records, 1) for event in alarms.look(step, record)]


ILL: dict[str, tuple[list[dict[str, float]], int]] = {
    "entropy_collapse": (course("policy/policy_entropy", [1.0] * 5 + [0.05] * 5), 10),
    "entropy_explosion": (course("policy/policy_entropy", [0.5] * 5 + [2.1] * 5), 10),
    "kl_blow_up": (course("policy/policy_kl", [0.1, 0.2, 0.5, 1.0, 2.0, 4.0]), 6),
    "reward_collapse": (course("reward/avg_raw_reward", [0.33, 0.09, 0.11, 0.02] + [0.0] * 6), 10),
    "kl_penalty_blow_up": (course("loss/avg_kl", [0.1, 0.2, 0.5, 1.0, 2.0, 4.0]), 6),
    "length_explosion": (course("generate/avg_assistant_tokens", [100.0] * 5 + [301.0] * 5), 10),
    "truncated_answers": (course("generate/truncated_ratio", [0.6] * 5), 5),
    "repeated_text": (course("generate/repeated_ratio", [0.7] * 5), 5),
    "no_signal": (course("reward/zero_variance_groups", [1.0] * 10), 10),
    "train_rollout_difference": (course("policy/rollout_train_logprobs_abs_diff_mean", [0.2] * 5), 5),
    "throughput_halved": (course("trainer/tokens_per_second", [100.0] * 25 + [49.0] * 25), 50),
    "evaluation_falls": (
        [
            {"reward/avg_raw_reward": 0.2, "eval/all/avg_score": 0.5, "eval/all/avg_score_stderr": 0.03},
            {"reward/avg_raw_reward": 0.4},
            {"reward/avg_raw_reward": 0.6, "eval/all/avg_score": 0.4, "eval/all/avg_score_stderr": 0.03},
            {"reward/avg_raw_reward": 0.8, "eval/all/avg_score": 0.3, "eval/all/avg_score_stderr": 0.03},
        ],
        4,  # 0.2 below is more than 3 sqrt(2) 0.03 = 0.127; 0.1 was not
    ),
}


@pytest.mark.parametrize("name", DEFAULT_ALARMS)
def test_each_default_alarm_is_raised_once_on_the_course_that_it_is_for(name: str) -> None:
    records, step = ILL[name]
    assert raised(records) == [(step, name)]


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("generate/avg_assistant_tokens", [100.0] * 5 + [299.0] * 5),  # bound: 3 times the first
        ("generate/truncated_ratio", [0.49] * 5),
        ("generate/repeated_ratio", [0.49] * 5),
        ("trainer/tokens_per_second", [100.0] * 25 + [51.0] * 25),  # bound: half of the first
    ],
)
def test_no_default_alarm_is_raised_within_its_bound(metric: str, values: list[float]) -> None:
    assert raised(course(metric, values)) == []


def test_default_alarms_watch_metrics_that_are_logged() -> None:
    watched = {
        name for alarm in DEFAULT_ALARMS.values() for name in (alarm.config.metric, alarm.config.against) if name
    }
    assert unknown(watched) == []


def test_an_evaluation_before_training_is_compared_with_the_reward_of_the_first_step() -> None:
    first = {"eval/all/avg_score": 0.5, "eval/all/avg_score_stderr": 0.03}
    later = {"eval/all/avg_score": 0.3, "eval/all/avg_score_stderr": 0.03}
    rising = [first, *course("reward/avg_raw_reward", [0.1, 0.2, 0.3]), later]
    assert raised(rising) == [(5, "evaluation_falls")]


def test_an_evaluation_that_falls_with_the_reward_is_another_matter() -> None:
    falls = [
        {**record, "reward/avg_raw_reward": 1 - step / 10} for step, record in enumerate(ILL["evaluation_falls"][0])
    ]
    assert raised(falls) == []


def test_the_first_values_are_compared_with_others() -> None:
    doubles = AlarmConfig(metric="a", when="rises", threshold=1.5, window=2)
    assert raised(course("a", [1.0, 1.0, 9.0, 9.0]), doubles, defaults=False) == [(4, "a")]


def test_an_alarm_is_raised_again_only_after_its_condition_was_false() -> None:
    alarm = AlarmConfig(metric="a", when="above", threshold=1.0, window=2)
    records = course("a", [2.0, 2.0, 2.0, 0.0, 0.0, 2.0, 2.0])  # means from the second on: 2, 2, 1, 0, 1, 2
    assert raised(records, alarm, defaults=False) == [(2, "a"), (7, "a")]


def above(metric: str, action: Literal["warn", "stop"] = "warn") -> AlarmConfig:
    return AlarmConfig(metric=metric, action=action, when="above", threshold=1.0, window=1)


def test_the_first_alarm_that_stops_is_what_ended_the_run_and_others_end_nothing() -> None:
    alarms = Alarms(alarms_of([above("a"), above("b", "stop"), above("c", "stop")], defaults=False))
    alarms.look(1, {"a": 2.0})
    assert alarms.stopped_by == ""
    alarms.look(2, {"b": 2.0})
    alarms.look(3, {"c": 2.0})
    assert alarms.stopped_by == "b"


BELOW = AlarmConfig(metric="a", when="below", threshold=1.0, window=1)
DROPS = AlarmConfig(metric="a", when="drops", threshold=0.25, window=1)


@pytest.mark.parametrize(
    ("alarm", "values"),
    [(above("a"), [1.0, 1.0, 1.5]), (BELOW, [1.0, 1.0, 0.5]), (DROPS, [1.0, 0.75, 0.5])],
    ids=["above", "below", "drops"],
)
def test_a_value_at_the_bound_is_not_beyond_it(alarm: AlarmConfig, values: list[float]) -> None:
    assert raised(course("a", values), alarm, defaults=False) == [(3, "a")]


def test_a_reason_says_what_a_value_is_compared_with_where_that_is_no_bound_of_its_own() -> None:
    rises = AlarmConfig(metric="a", when="rises", threshold=2.0, window=1)
    for alarm, suffix in ((above("a"), "above 1"), (rises, "above 2 (2 times the 1 of the first)")):
        alarms = Alarms(alarms_of([alarm], defaults=False))
        reasons = [event.reason for step, value in enumerate([1.0, 4.0]) for event in alarms.look(step, {"a": value})]
        assert [reason.endswith(suffix) for reason in reasons] == [True]


@pytest.mark.parametrize(("better", "values"), [("max", [0.0, 1.0, 3.0, 1.0]), ("min", [3.0, 2.0, 0.0, 2.0])])
def test_the_best_of_the_last_values_is_what_improves(better: Literal["max", "min"], values: list[float]) -> None:
    alarm = AlarmConfig(metric="e", when="stalls", window=2, better=better)
    assert raised(course("e", values), alarm, defaults=False) == []


def test_patience_counts_evaluations_and_small_gains_are_none() -> None:
    alarm = AlarmConfig(metric="e", when="stalls", threshold=0.05, window=2)
    gaps = [{"e": value} if value else {} for value in (0.1, 0, 0.3, 0, 0.33, 0.0, 0.34, 0.2)]
    assert raised(gaps, alarm, defaults=False) == [(7, "e")]
    loss = AlarmConfig(metric="e", when="stalls", window=2, better="min")
    assert raised(course("e", [3.0, 2.0, 1.0, 1.5, 1.0]), loss, defaults=False) == [(5, "e")]


def test_values_that_are_not_finite_and_steps_without_the_metric_are_passed_over() -> None:
    alarm = AlarmConfig(metric="a", when="below", threshold=0.0, window=2)
    records = [{"a": -1.0}, {"a": float("nan")}, {}, {"a": -1.0}]
    assert raised(records, alarm, defaults=False) == [(4, "a")]


def test_a_default_alarm_is_changed_by_its_name_and_left_out_where_it_is_off() -> None:
    stops = alarms_of([AlarmConfig(name="kl_blow_up", action="stop")], defaults=True)
    (changed,) = [alarm for alarm in stops if alarm.name == "kl_blow_up"]
    assert (changed.metric, changed.threshold, changed.action) == ("policy/policy_kl", 1.0, "stop")
    off = alarms_of([AlarmConfig(name="kl_blow_up", action="off")], defaults=True)
    assert {alarm.name for alarm in off} == DEFAULT_ALARMS.keys() - {"kl_blow_up"}
    assert alarms_of([], defaults=False) == ()


@pytest.mark.parametrize("name", DEFAULT_ALARMS)
def test_state_taken_anywhere_and_given_to_a_new_alarm_changes_nothing(name: str) -> None:
    records, _ = ILL[name]
    records = [*records, *records]
    expected = raised(records)
    for cut in range(len(records)):
        before, after = Alarms(alarms_of((), defaults=True)), Alarms(alarms_of((), defaults=True))
        events = [
            (event.step, event.name) for n, record in enumerate(records[:cut], 1) for event in before.look(n, record)
        ]
        after.load_state(json.loads(json.dumps(before.state())))
        events += [
            (event.step, event.name)
            for n, record in enumerate(records[cut:], cut + 1)
            for event in after.look(n, record)
        ]
        assert events == expected


def test_the_state_of_another_condition_is_left_aside() -> None:
    one, other = (Alarm(AlarmConfig(name="a", metric="a", threshold=bound, window=2)) for bound in (1.0, 2.0))
    one.look({"a": 9.0})
    other.load_state(one.state())
    assert other.look({"a": 9.0}) is None, "it has seen one value alone"


def test_an_alarm_without_a_metric_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="alarm 0 names neither a metric nor a default alarm"):
        compose([], {"trainer.alarms": [{"when": "above"}]})
    with pytest.raises(ConfigError, match="two alarms are called a"):
        compose([], {"trainer.alarms": [{"metric": "a"}, {"metric": "b", "name": "a"}]})
    with pytest.raises(ConfigError, match=r"item 0: metrik: no such field"):
        compose([], {"trainer.alarms": [{"metrik": "a"}]})

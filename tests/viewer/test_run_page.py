"""The head and the curves of a run: what was trained, its scores, its cost, its troubles, and what is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from skyrl.viewer.panels import constants, panels
from skyrl.viewer.rendering import meter
from skyrl.viewer.run_card import run_card
from skyrl.viewer.run_metrics import MOST_LINES, MOST_POINTS, RunMetrics, Series
from skyrl.viewer.small_charts import short, small_charts

CONFIG = {
    "trainer": {
        "device": "cpu",
        "train_batch_size": 16,
        "algorithm": {"advantage_estimator": "grpo", "policy_loss_type": "regular"},
        "policy": {"model": {"path": "tiny"}, "optimizer_config": {"lr": 2e-4}},
    },
    "generator": {"n_samples_per_prompt": 8},
    "data": {"train_data": ["train.jsonl"]},
    "environment": {"env_class": "reward.py:right"},
}


def seen(folder: Path, lines: Sequence[Mapping[str, object]], **progress: object) -> RunMetrics:
    """The metrics of a run that has written these lines, and this `progress.json` if there is any."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"config": CONFIG}), encoding="utf-8")
    if progress:
        (folder / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    metrics = RunMetrics(folder)
    metrics.look()
    return metrics


def rewards(*values: float) -> list[dict[str, object]]:
    return [{"step": step, "reward/avg_raw_reward": value} for step, value in enumerate(values, 1)]


def test_a_card_says_what_was_trained_and_what_it_cost(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval/all/avg_score": 0.25, "timing/eval": 4.0},
        {"step": 1, "timing/all_steps": 8.0, "trainer/tokens_seen": 50, "timing/save_checkpoints": 1.0},
        {"step": 2, "timing/all_steps": 116.0, "trainer/tokens_seen": 1234, "memory/process_bytes": 2**30},
    ]
    metrics = seen(tmp_path, lines, state="finished", total_steps=2)
    card = run_card(tmp_path, "mine", metrics, gpus=0)
    assert (card.state, card.tone) == ("finished, step 2 of 2", "good")
    assert dict(card.trained) == {
        "method": "grpo advantages, PPO's clipped loss",
        "model": "tiny",
        "task": "reward.py:right",
        "data": "train.jsonl",
        "learning rate": "0.0002",
        "each step": "16 prompts x 8 samples",
    }
    assert dict(card.cost) == {
        "time": "2 min, without start-up",
        "GPUs": "none",
        "tokens": "1,234",
        "peak memory": "1.0 GiB",
    }
    assert (card.troubles, card.notes) == ((), ())


@pytest.mark.parametrize(
    ("values", "first", "last", "change"),
    [
        ([0.0, 0.0, 1.0, 1.0], 0.0, 1.0, "better"),
        ([1.0, 1.0, 0.0, 0.0], 1.0, 0.0, "worse"),
        ([0.5, 0.5, 0.501, 0.501], 0.5, 0.501, "same"),
        ([0.1, 0.2, 0.0, 0.2, 0.1, 0.3], 0.1, 0.2, "same"),
        ([0.1, 0.2, 0.1, 0.9, 0.8, 0.9], 0.4 / 3, 2.6 / 3, "better"),
        ([0.5], 0.5, 0.5, "same"),
        ([0.0] * 5 + [9.0] * 20 + [0.5] * 5, 0.0, 0.5, "better"),
    ],
)
def test_a_training_reward_is_averaged_over_the_steps_at_each_end(
    tmp_path: Path, values: list[float], first: float, last: float, change: str
) -> None:
    [score] = run_card(tmp_path, "mine", seen(tmp_path, rewards(*values))).scores
    assert [score.first, score.last] == pytest.approx([first, last])
    assert score.change == change


@pytest.mark.parametrize(
    ("first", "last", "error", "change"),
    [(0.25, 0.31, 0.02, "better"), (0.25, 0.30, 0.02, "same"), (0.31, 0.25, 0.02, "worse"), (0.25, 0.31, 0.03, "same")],
)
def test_a_score_within_two_standard_errors_is_no_change(
    tmp_path: Path, first: float, last: float, error: float, change: str
) -> None:
    """The error of a difference of two is 1.41 times that of one: 0.057 for twice 0.02."""
    name = "eval/all/avg_score"
    lines = [{"step": step, name: value, f"{name}_stderr": error} for step, value in ((0, first), (9, last))]
    [score] = run_card(tmp_path, "mine", seen(tmp_path, lines)).scores
    assert score.change == change


def test_a_loss_that_falls_is_better_and_the_best_is_the_least(tmp_path: Path) -> None:
    lines = [{"step": step, "eval/all/loss": value} for step, value in ((0, 9.0), (5, 0.5), (7, 0.75), (9, 1.0))]
    [score] = run_card(tmp_path, "mine", seen(tmp_path, lines)).scores
    assert (score.first, score.last, score.best, score.best_at, score.change) == (9.0, 1.0, 0.5, "step 5", "better")


def test_a_card_says_what_went_wrong(tmp_path: Path) -> None:
    lines = [
        {"step": 4, "trainer/skipped_steps": 1, "generate/truncated_ratio": 0.1},
        {"step": 5, "rollout/failures": 3, "generate/truncated_ratio": 0.75},
        {"step": 7, "rollout/failures": 1, "generate/truncated_ratio": 0.75, "reward/zero_variance_groups": 0.4},
    ]
    alarm = {"step": 6, "name": "entropy", "reason": "it fell"}
    (tmp_path / "alarms.jsonl").write_text(json.dumps(alarm) + "\n", encoding="utf-8")
    metrics = seen(tmp_path, lines, state="failed", total_steps=9, first_step=3, warning="slow disk")
    card = run_card(tmp_path, "mine", metrics)
    assert (card.state, card.tone) == ("failed at step 7 of 9: its log says why", "bad")
    assert card.troubles == (
        "resumed from step 3",
        "skipped step (step 4)",
        "failures (2 times, steps 5 to 7)",
        "alarm entropy: it fell (step 6)",
        "warning: slow disk",
    )
    assert card.notes == ("75% of the last step's answers were cut off at the length limit",)


def test_an_alarm_that_is_the_newest_warning_is_told_once(tmp_path: Path) -> None:
    alarm = {"step": 6, "name": "entropy", "reason": "it fell"}
    (tmp_path / "alarms.jsonl").write_text(json.dumps(alarm) + "\n", encoding="utf-8")
    metrics = seen(tmp_path, rewards(1.0), warning="step 6, alarm entropy: it fell")
    assert run_card(tmp_path, "mine", metrics).troubles == ("alarm entropy: it fell (step 6)",)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_are_told_with_what_they_are(tmp_path: Path, reward: float) -> None:
    lines = [{"step": 1, "reward/avg_raw_reward": reward, "reward/zero_variance_groups": 1.0}]
    [note] = run_card(tmp_path, "mine", seen(tmp_path, lines)).notes
    assert note.endswith(f"all equal: no learning signal (the mean reward of the step is {reward:g})")


def test_an_agent_is_named(tmp_path: Path) -> None:
    metrics = seen(tmp_path, rewards(1.0))
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    stored["config"]["environment"]["agent"] = {"function": "agent.py:solve", "command": []}
    file.write_text(json.dumps(stored), encoding="utf-8")
    assert dict(run_card(tmp_path, "mine", metrics).trained)["agent"] == "agent.py:solve"


@pytest.mark.parametrize(
    ("progress", "state", "tone"),
    [
        ({}, "at step 1; how it ended is not recorded", "plain"),
        ({"state": "running", "total_steps": 1000}, "running, step 1 of 1,000", "live"),
        ({"state": "stopped", "total_steps": 5}, "stopped at step 1 of 5", "plain"),
        (
            {"state": "finished", "total_steps": "many", "first_step": [1]},
            "at step 1; how it ended is not recorded",
            "plain",
        ),
        ({"waits": 5}, "at step 1; how it ended is not recorded", "plain"),
    ],
)
def test_the_end_of_a_run_is_told_even_where_its_record_is_damaged(
    tmp_path: Path, progress: dict[str, object], state: str, tone: str
) -> None:
    card = run_card(tmp_path, "mine", seen(tmp_path, rewards(1.0), **progress))
    assert (card.state, card.tone) == (state, tone)


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"config": 3}', '{"config": {"trainer": [], "data": {"train_data": 1}}}']
)
def test_a_damaged_configuration_leaves_only_its_rows_out(tmp_path: Path, damage: str) -> None:
    metrics = seen(tmp_path, rewards(0.0, 1.0))
    (tmp_path / "config.json").write_text(damage, encoding="utf-8")
    card = run_card(tmp_path, "mine", metrics, gpus=2)
    assert dict(card.trained)["method"] == "reinforcement learning" and len(card.scores) == 1
    assert dict(card.cost)["GPU hours"] == "0.00 (2 GPUs)"


def test_equal_metrics_share_a_panel_and_unchanging_ones_are_only_listed(tmp_path: Path) -> None:
    lines = [
        {"step": step, "eval/sort/avg_score": step, "eval/all/avg_score": step, "policy/policy_entropy": 0.5}
        for step in (0, 10)
    ]
    runs = {"mine": seen(tmp_path, lines).series}
    [panel] = panels(runs)
    assert (panel.title, panel.metrics) == ("Evaluation: sort = all", ("eval/sort/avg_score", "eval/all/avg_score"))
    assert constants(runs) == [("policy/policy_entropy", 0.5)]


def test_metrics_that_are_equal_in_one_run_alone_have_panels_of_their_own(tmp_path: Path) -> None:
    same, other = ({"step": 0, "eval/a/avg_score": 1.0, "eval/b/avg_score": value} for value in (1.0, 2.0))
    runs = {name: seen(tmp_path, [line]).series for name, line in (("one", same), ("two", other))}
    drawn = panels(runs)
    assert [(panel.title, [line.run for line in panel.lines]) for panel in drawn] == [
        ("Evaluation: a", ["one", "two"]),
        ("Evaluation: b", ["one", "two"]),
    ]


def test_the_lengths_of_one_run_share_a_panel_and_those_of_several_do_not(tmp_path: Path) -> None:
    lines = [{"step": step, "generate/avg_num_tokens": step, "generate/max_num_tokens": 2 * step} for step in (1, 2)]
    own = seen(tmp_path, lines).series
    assert [(panel.title, len(panel.lines)) for panel in panels({"one": own})] == [("Length of answers", 2)]
    assert [(panel.title, len(panel.lines)) for panel in panels({"one": own, "two": own})] == [
        ("Length of answers: avg", 2),
        ("Length of answers: max", 2),
    ]


def test_a_small_chart_spans_its_values_and_all_steps(tmp_path: Path) -> None:
    turns_of: list[dict[str, object]] = [{"step": step, "generate/avg_num_turns": step} for step in (5, 9)]
    lines = [*rewards(1.0, 3.0, 2.0), *turns_of]
    chart, turns = small_charts(panels({"mine": seen(tmp_path, lines).series}))
    [path] = re.findall(r'class="line l0" d="(.*?)"', chart.svg)
    assert path == "M2.0 104.0L41.5 6.0L81.0 55.0"
    assert (chart.least, chart.most, chart.ends) == ("1.00", "3.00", ((0, "mine", "2.00"),))
    assert (chart.first, chart.last) == (turns.first, turns.last) == (1, 9)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.4123, "0.412"),
        (12345.6, "12,346"),
        (2e-6, "2e-06"),
        (-1.5, "-1.50"),
        (7e11, "7e+11"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_lines_that_are_damaged_or_no_numbers_are_left_out_of_series(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 1.5, "b": "nan", "c": true}\nnonsense\n[1]\n{"step": "x", "a": 1}\n'
        f'{{"step": 2, "a": 1{"0" * 400}, "d": NaN}}\n{{"step": 3, "a": 2}}\n{{"step": 4, "a"',
        encoding="utf-8",
    )
    metrics = RunMetrics(tmp_path)
    metrics.look()
    assert {name: (list(own.steps), list(own.values)) for name, own in metrics.series.items()} == {
        "a": ([1, 3], [1.5, 2.0]),
        "c": ([1], [1.0]),
    }


MIXED = (
    '{"step": 0, "a": 1, "b": true, "text": "2026-11-28", "list": [1]}\n'
    '{"step": 1, "b": false, "a": 0.1, "late": -0.0}\n'
    '{"step": 3, "a": null, "late": 9007199254740993}\n'
)
READ = {"a": ([0, 1], [1.0, 0.1]), "b": ([0, 1], [1.0, 0.0]), "late": ([1, 3], [-0.0, 9007199254740992.0])}


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "nonsense\n",
        "\n",
        "[1]\n",
        '{"step": 2}{"step": 2}\n',
        '{"step": -1, "a": 5}\n',
        '{"step": 9007199254740992, "a": 5}\n',
        '{"step": 2.5, "a": 5}\n',
        '{"a": 5}\n',
        '{"step": 2, "a": NaN}\n',
        '{"step": 2, "a": "x"}\n',
        '{"step": 2, "text": "\\ud800"}\n',
    ],
)
def test_lines_are_read_alike_beside_a_line_that_arrow_does_not_parse(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(MIXED + damaged, encoding="utf-8")
    metrics = RunMetrics(tmp_path)
    metrics.look()
    assert {name: (list(own.steps), list(own.values)) for name, own in metrics.series.items()} == READ


def test_a_look_reads_so_many_lines_and_the_next_one_the_others(tmp_path: Path) -> None:
    metrics = seen(tmp_path, rewards(*range(MOST_LINES + 3)))
    assert (metrics.lines, metrics.look(), metrics.look()) == (MOST_LINES, 3, 0)
    assert list(metrics.series["reward/avg_raw_reward"].values) == [*range(MOST_LINES + 3)]


def test_series_go_on_with_a_run_and_begin_anew_where_it_went_back(tmp_path: Path) -> None:
    file, metrics = tmp_path / "metrics.jsonl", RunMetrics(tmp_path)
    metrics.look()
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n', encoding="utf-8")
    metrics.look()
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"step": 3, "a": 3}\n')
    metrics.look()
    assert (list(metrics.series["a"].steps), metrics.lines, metrics.last_step) == ([1, 2, 3], 3, 3)
    fresh = tmp_path / "fresh"
    fresh.write_text('{"step": 1, "a": 5}\n', encoding="utf-8")
    fresh.replace(file)
    metrics.look()
    assert (list(metrics.series["a"].values), metrics.lines) == ([5.0], 1)


def test_a_long_series_is_thinned_and_keeps_its_ends_its_extremes_and_its_sum() -> None:
    series, count = Series(), 15 * MOST_POINTS
    values = np.where(np.arange(count) == 7_001, 500.0, np.arange(count) % 2)
    for start in range(0, count, 500):
        series.add(np.arange(start, start + 500), values[start : start + 500])
    assert len(series) <= MOST_POINTS and (series.steps[0], series.steps[-1]) == (0, count - 1)
    assert (series.values[-1], min(series.lows), max(series.highs)) == (1.0, 0.0, 500.0)
    assert (series.total, series.count) == (values.sum(), count)
    thinned = series.thinned(100)
    assert len(thinned.steps) == len(thinned.means) <= 102
    assert (thinned.steps[0], thinned.steps[-1], thinned.means[-1]) == (0, count - 1, 1.0)
    assert (min(thinned.lows), max(thinned.highs)) == (0.0, 500.0)
    assert thinned.means[10] == pytest.approx(0.5, abs=0.1)


def test_a_short_series_is_drawn_as_it_is() -> None:
    series = Series()
    series.add(np.array([1, 5, 6]), np.array([0.5, 1.5, 2.5]))
    thinned = series.thinned(3)
    assert (thinned.steps, thinned.means, thinned.lows, thinned.highs) == ([1, 5, 6], *[[0.5, 1.5, 2.5]] * 3)


@pytest.mark.parametrize(
    ("value", "least", "most", "shade"),
    [(0, 0, 1, "r0"), (1, 0, 1, "r10"), (0.34, 0, 1, "r3"), (-1, -1, 1, "r0"), (5, 0, 1, "r10"), ("nan", 0, 1, ""),
     (None, 0, 1, ""), (float("nan"), 0, 1, ""), (1, 1, 1, "")],
)  # fmt: skip
def test_a_reward_has_a_shade(value: object, least: float, most: float, shade: str) -> None:
    assert meter(value, least, most) == shade

"""The simulator: arithmetic that can be redone by hand, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from attrs import evolve

from skyrl.cli.main import main
from skyrl.rollout.stream import StreamLimits
from skyrl.tools.simulation import Seconds, World, measured, simulate, splits

TOML = "examples/quickstart/grpo.toml"


def always(seconds: float) -> Seconds:
    return Seconds(mean=seconds, p90=seconds, longest=seconds)


def world(
    *,
    staleness: int,
    slots: int = 8,
    workers: int = 8,
    steps: int = 10,
    interrupt: bool = True,
    sync: float = 0.0,
    shared: float = 0.0,
) -> World:
    ahead = (staleness + 1) * 4
    limits = StreamLimits(
        batch=4, staleness=staleness, concurrency=100, queue=ahead, total=steps * 4, stall_seconds=1e6
    )
    return World(
        limits=limits,
        samples_per_prompt=2,
        slots=slots,
        answer=always(3.0),
        environment=always(1.0),
        environment_workers=workers,
        train_seconds=2.0,
        sync_seconds=sync,
        interrupt=interrupt,
        shared=shared,
    )


def test_in_turns_a_step_takes_what_its_parts_take_together() -> None:
    """3 s for an answer, 1 s for its reward, 2 s of training: 6 s, of which learners wait 4 and engines draw 3."""
    outcome = simulate(world(staleness=0), 10)
    assert outcome.seconds == pytest.approx(60.0)
    assert (outcome.learners_idle, outcome.engines_idle) == pytest.approx((4 / 6, 0.5))
    assert outcome.groups_by_age == {0: 40}
    assert outcome.trajectories_per_second == pytest.approx(80 / 60)


def test_one_step_off_learners_and_engines_work_at_the_same_time() -> None:
    """Engines have room for 4 groups in 3 s, so that a step takes 3 s; the first batch takes 4, the last training 2."""
    outcome = simulate(world(staleness=1), 10)
    assert outcome.seconds == pytest.approx(4 + 9 * 3 + 2)
    assert set(outcome.groups_by_age) <= {0, 1}


def test_on_shared_devices_a_step_takes_what_drawing_and_training_take_together() -> None:
    """Engines draw for 3 s and learners train for 2 s in each step, each at half its speed while the other computes:
    5 s a step. Within turns nothing is shared.
    """
    outcome = simulate(world(staleness=1, shared=0.5), 10)
    assert outcome.seconds == pytest.approx(4 + 9 * 5 + 2, abs=1)
    assert outcome.seconds > simulate(world(staleness=1, shared=0.2), 10).seconds
    assert simulate(world(staleness=0, shared=0.5), 10).seconds == pytest.approx(60.0)


def test_environments_wait_for_a_worker() -> None:
    """8 rewards of 1 s by 2 workers take 4 s: in turns 3 + 4 + 2 s a step, and ahead of the learner 4 s alone."""
    assert simulate(world(staleness=0, workers=2), 10).seconds == pytest.approx(10 * (3 + 4 + 2))
    assert simulate(world(staleness=8, workers=2), 10).seconds == pytest.approx(3 + 10 * 4 + 2, abs=1)


def test_weights_that_wait_for_answers_cost_more_than_those_that_interrupt_them() -> None:
    """Answers of 1 to 9 s: engines that wait for the longest one stand still meanwhile."""
    unequal = Seconds(mean=3.0, p90=6.0, longest=9.0)
    waiting, interrupting = (
        simulate(evolve(world(staleness=2, interrupt=interrupt, sync=0.5, steps=20), answer=unequal), 20)
        for interrupt in (False, True)
    )
    assert interrupting.seconds < 0.9 * waiting.seconds


def test_nothing_is_drawn_while_weights_arrive() -> None:
    """Engines that are always at work draw for 3 s and take weights for 0.5 s in each step."""
    outcome = simulate(world(staleness=2, interrupt=True, sync=0.5, steps=20), 20)
    assert outcome.seconds == pytest.approx(20 * 3.5, abs=3)
    assert outcome.engines_idle > 0.5 / 3.5


@pytest.mark.parametrize("longest", [30.0, 60.0, 1e9])
def test_durations_have_the_mean_and_the_percentile_that_they_were_given(longest: float) -> None:
    random = Random(0)
    drawn = sorted(Seconds(mean=10.0, p90=20.0, longest=longest).draw(random) for _ in range(20_000))
    assert fmean(drawn) == pytest.approx(10.0, rel=0.05)
    assert drawn[18_000] == pytest.approx(20.0, rel=0.05)
    assert drawn[-1] <= longest


def test_other_splits_of_the_gpus_trade_engines_for_learners() -> None:
    alternatives = splits(world(staleness=1), 4, 4, 2)
    assert [(share, other.slots, other.train_seconds) for share, other in alternatives] == [
        (2, 4, pytest.approx(4 / 3)),
        (4, 8, 2.0),
        (6, 12, 4.0),
    ]


def test_a_run_is_measured_by_what_its_steps_took_typically() -> None:
    step = {
        "timing/step": 10.0,
        "timing/generate": 4.0,
        "timing/sync_weights": 1.0,
        **{f"generate/trajectory_time_llm_{name}": value for name, value in (("mean", 2), ("p90", 3), ("max", 5))},
        **{f"generate/trajectory_time_env_run_{name}": 0.5 for name in ("mean", "p90", "max")},
    }
    slow = {name: value * 10 for name, value in step.items()}
    measurements = measured([{}, slow, step, step, step])
    assert measurements["answer"] == Seconds(mean=2, p90=3, longest=5)
    assert measurements["environment"] == always(0.5)
    assert (measurements["train_seconds"], measurements["sync_seconds"]) == (5.0, 1.0)
    older = [{name.replace("env_run", "env"): value for name, value in record.items()} for record in (slow, step, step)]
    assert measured(older)["environment"] == always(0.5)


def test_the_command_says_how_fast_and_how_old(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--answer-seconds", "20,40", "--train-seconds", "5", "--steps", "5", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["simulate", TOML, *options])
    result = json.loads(capsys.readouterr().out)["result"]
    assert end.value.code == 0
    assert (result["steps"], result["trajectories"], result["groups_by_age"]) == (5, 640, {"0": 80})


def test_failures_cost_a_share_of_the_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure an hour, 15 minutes to restart: about a quarter is lost, and more with rare checkpoints."""
    options = ["--answer-seconds", "20", "--train-seconds", "10", "--steps", "5", "--json"]
    failing = ["--failures-per-hour", "1", "--restart-seconds", "900", "--checkpoint-seconds", "5"]
    with pytest.raises(SystemExit):
        main(["simulate", TOML, *options, *failing, "trainer.ckpt_interval=50"])
    result = json.loads(capsys.readouterr().out)["result"]
    best, rare = str(result["failures"]["best_ckpt_interval"]), "50"
    shares, rates = result["failures"]["share_trained"], result["failures"]["trajectories_per_second"]
    assert result["failures"]["hours_between_failures"] == 1
    assert 0.6 < shares[rare] < shares[best] < 0.8
    assert rates[best] == pytest.approx(shares[best] * result["trajectories_per_second"])


def test_the_documentation_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("docs/asynchronous.md").read_text(encoding="utf-8")
    example = page[page.index("$ skyrl simulate") : page.index("```", page.index("$ skyrl simulate"))]
    words, printed = example.replace("\\\n", "").split("\n", maxsplit=1)
    with pytest.raises(SystemExit):
        main(words.split()[2:])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--answer-seconds is missing"),
        (["--answer-seconds", "fast"], "'fast' is not a duration"),
        (["--answer-seconds", "20,40,10"], "the longest, 10, is below the mean or its 90th percentile"),
        (["--answer-seconds", "1"], "--train-seconds is missing"),
        (["--answer-seconds", "1", "--train-seconds", "1", "--restart-seconds", "9"], "--checkpoint-seconds"),
        (["--like", "nowhere"], "has fewer than two training steps"),
        (["--answer-seconds", "1", "--train-seconds", "1", "--split"], "--split needs engines on GPUs of their own"),
    ],
)
def test_what_is_missing_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["simulate", TOML, *options])
    assert end.value.code == 2
    assert message in capsys.readouterr().err

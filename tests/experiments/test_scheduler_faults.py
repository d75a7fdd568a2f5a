"""The real scheduler on a clock that jumps, while engines and environments fail: it goes on, or says who ended it."""

from __future__ import annotations

import re
from random import Random, SystemRandom

import pytest

from skyrl.errors import RunError
from skyrl.rollout.stream import StreamLimits
from skyrl.tools.virtual_time import run_in_virtual_time
from tests.experiments.faulty_engines import NEVER, SAMPLES, Faults, Schedule
from tests.experiments.faulty_world import World

STALL_SECONDS = 5_000.0

ENDS = {
    "every engine dies": r"engine-\d died",
    "every engine hangs": r"engine-\d gave no sign of life for 60 s",
    "no engine takes weights": r"engine-\d does not take the weights of version \d",
    # environments that are slow to begin split a group of three, and each part is a request of its own
    "answers are too few": "an engine gave ("
    + "|".join(rf"{fewer} completions to prompt \S+ where {fewer + 1}" for fewer in range(3))
    + ") were asked for",
    "environments fail": r"environments failed \d+ times among \d+ samples",
    "environments hang": r"\d of \d groups are ready, .*none has finished .*prompt \d+ \(begun",
}
"""What no run can go on with, and what it says then."""


def schedule(draw: Random, end: str | None) -> Schedule:
    """Any sizes, with faults that a run survives, or, soon, with one that it does not."""
    batch, steps, staleness, engines = draw.randint(1, 4), draw.randint(3, 8), draw.randint(0, 4), draw.randint(1, 4)
    limits = StreamLimits(
        batch=batch,
        staleness=staleness,
        concurrency=draw.randint(1, 12),
        queue=batch + draw.randint(0, 12),
        total=batch * steps,
        stall_seconds=STALL_SECONDS,
    )
    return Schedule(
        seed=draw.randrange(2**32),
        limits=limits,
        steps=steps,
        engines=engines,
        max_num_seqs=draw.choice([SAMPLES, 2 * SAMPLES, 100]),
        in_flight=draw.choice(["finish", "recompute", "keep"]),
        interval=1 if end == "no engine takes weights" else draw.randint(1, staleness + 1),
        train_seconds=draw.choice([0.0, 1.0, 10.0]),
        faults=survivable(draw, engines, batch) if end is None else fatal(draw, engines, end),
    )


def survivable(draw: Random, engines: int, batch: int) -> Faults:
    """The first engine stays. A failure among the few samples of a batch of one would be too large a share."""
    return Faults(
        slow=frozenset(number for number in range(engines) if draw.random() < 0.2),
        die=(NEVER, *(draw.choice([NEVER, draw.uniform(0.0, 30.0)]) for _ in range(engines - 1))),
        hang=(NEVER, *(draw.choice([NEVER, draw.uniform(0.0, 30.0)]) for _ in range(engines - 1))),
        refuse_weights=(1000, *(draw.choice([1000, draw.randint(0, 8)]) for _ in range(engines - 1))),
        env_fails=draw.choice([0.0, 0.02]) if batch > 1 else 0.0,
        env_hangs=draw.choice([0.0, 0.01]) if batch > 1 else 0.0,
    )


def fatal(draw: Random, engines: int, end: str) -> Faults:
    soon = tuple(draw.uniform(0.0, 3.0) for _ in range(engines))
    match end:
        case "every engine dies":
            return Faults(die=soon)
        case "every engine hangs":
            return Faults(hang=soon)
        case "no engine takes weights":
            return Faults(refuse_weights=tuple(draw.randint(1, 2) for _ in soon))
        case "answers are too few":
            return Faults(short_answers_from=soon[0])
        case "environments fail":
            return Faults(env_fails=0.9)
        case _:
            return Faults(env_hangs=0.9, env_deadline=None)


def run(draw: Random, end: str | None, patch: pytest.MonkeyPatch) -> str:
    """What the run said in the end: nothing, where it came to its last step. Raises for a bound that does not hold."""
    world, message = World(schedule(draw, end), patch), ""
    try:
        run_in_virtual_time(world.train())
        assert world.trained.total() == world.schedule.limits.total
    except RunError as error:
        message = str(error)
    world.assert_nothing_is_lost_or_doubled()
    return message


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_cannot_go_on_says_who_ended_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        assert re.search(ENDS[end], run(Random(f"{end}:{seed}"), end, monkeypatch)), seed


@pytest.mark.long
def test_a_hundred_runs_with_faults_stay_within_their_bounds_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ones each time: a failure names the seed of its run."""
    for _ in range(100):
        seed = SystemRandom().randrange(2**32)
        draw = Random(seed)
        end = draw.choice([None, None, None, *ENDS])
        try:
            message = run(draw, end, monkeypatch)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        assert bool(re.search(ENDS[end], message) if end else not message), (seed, end, message)

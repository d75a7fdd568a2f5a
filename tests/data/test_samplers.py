"""Samplers: what they draw, what they remember, and that equal states draw equally."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from skyrl.data.cursor import PromptCursor, permutation
from skyrl.data.order import Mixed, Order, Shuffled
from skyrl.data.samplers import (
    CustomSampler,
    Iterated,
    Mixture,
    Pool,
    Pools,
    Sampler,
    Schedule,
    Scored,
    SkipSolved,
    TargetDifficulty,
    weighted,
)
from skyrl.errors import RunError, UserError
from skyrl.trajectory import Prompt

ROWS, BATCH = 24, 4
HARD, NORMAL, EASY = Pool("hard", 0.25, 0.2), Pool("normal", 0.75, 1.0), Pool("easy", 1.0, 0.2)


def pools(*changed: Pool, unseen: float = 1.0, memory: float = 0.0) -> Pools:
    return Pools(ROWS, changed or (HARD, NORMAL, EASY), unseen, memory, seed=3)


def target(initial: float = 0.0) -> TargetDifficulty:
    return TargetDifficulty(
        np.arange(ROWS, dtype=np.float64),
        initial=initial,
        bounds=(0.0, 100.0),
        step_size=50.0,
        sensitivity=2.0,
        reward=0.5,
        batch=BATCH,
        seed=3,
    )


def in_passes() -> Sampler:
    return permutation(Shuffled(ROWS, 3), BATCH, "drop")


def mixture() -> Mixture:
    return Mixture((16, 8), [(0, (1.0, 0.0)), (10, (0.0, 1.0))], seed=3)


class Counting:
    """A sampler in the form of SkyRL's: rows in order, from where the state says."""

    def __init__(self, rows: Any, first: int = 0) -> None:
        self.size, self.first, self.yielded = len(rows), first, 0

    def __iter__(self) -> Iterator[int]:
        while self.yielded < self.size:
            self.yielded += 1
            yield (self.first + self.yielded - 1) % self.size
        self.yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.yielded = state["yielded"]


MAKERS: dict[str, Callable[[], Sampler]] = {
    "permutation": in_passes,
    "pools": pools,
    "pools with a memory": lambda: pools(memory=0.5),
    "target difficulty": target,
    "mixture": mixture,
    "schedule": lambda: Schedule([(0, in_passes()), (3, pools()), (9, target())]),
    "without solved": lambda: SkipSolved(in_passes(), ROWS, times=1, reward=1.0),
    "pools without solved": lambda: SkipSolved(pools(), ROWS, times=2, reward=1.0),
    "iterated": lambda: Iterated(Counting(range(ROWS), first=5)),
    "iterated without a state": lambda: Iterated(range(ROWS)),
}


def outcome(row: int, step: int) -> tuple[float, ...]:
    """Rewards that only a row and a step decide."""
    draw = Random(f"{row}:{step}")
    return tuple(float(draw.random() < (row + 1) / ROWS) for _ in range(4))


def steps(sampler: Sampler, first: int, last: int) -> list[list[int]]:
    """The draws of these steps, each observed before the next."""
    drawn = []
    for step in range(first, last):
        rows = list(sampler.draw(BATCH, step))
        assert len(rows) == BATCH and all(0 <= row < ROWS for row in rows)
        drawn.append(rows)
        for row in rows:
            sampler.observe(Scored(row, outcome(row, step)))
    return drawn


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_went_through_a_checkpoint_draws_what_the_sampler_itself_draws(name: str) -> None:
    expected = steps(MAKERS[name](), 0, 30)
    for stopped in (0, 1, 5, 6, 7, 20):
        before, after = MAKERS[name](), MAKERS[name]()
        steps(before, 0, stopped)
        kept = before.state_dict()
        stored = json.dumps(kept)
        steps(before, stopped, 30)
        assert json.dumps(kept) == stored, "the state is not a copy"
        after.load_state_dict(json.loads(stored))
        assert steps(after, stopped, 30) == expected[stopped:]


@pytest.mark.parametrize("tail", ["drop", "carry", "short"])
@pytest.mark.parametrize("order", [Shuffled(10, 1), Mixed((7, 3), (1.0, 2.0), 1)])
def test_a_permutation_draws_what_the_order_has(order: Order, tail: Any) -> None:
    rows = [Prompt(id=str(n), messages=(), token_ids=(n,), env_class="gsm8k") for n in range(10)]
    cursor = PromptCursor(rows, 4, 1, order=order, tail=tail)
    drawn_ids = [int(prompt.id) for _ in range(6) for prompt in cursor.take()]
    epochs = [list(map(int, order.epoch(number))) for number in range(4)]
    used = [row for epoch in epochs for row in (epoch[:8] if tail == "drop" else epoch)]
    assert drawn_ids == used[: len(drawn_ids)]


def test_a_pool_is_drawn_from_by_its_weight_and_the_last_one_has_the_rest() -> None:
    sampler = pools(HARD, Pool("middle", 0.75, 0.0), Pool("easy", 1.0, 1.0))
    for row in range(ROWS):
        sampler.observe(Scored(row, (float(row < 8) * 2,) if row < 16 else (0.5,)))  # 8 above all, 8 at 0, 8 in between
    drawn = Counter(row // 8 for step in range(400) for row in sampler.draw(2, step))
    assert drawn[2] == 0  # the weight of their pool is 0
    assert drawn[0] / drawn[1] == pytest.approx(5, rel=0.3)  # weights 1 and 0.2
    shares = sampler.metrics()
    assert shares == {"pool_unseen": 0.0, "pool_hard": 1 / 3, "pool_middle": 1 / 3, "pool_easy": 1 / 3}


def test_a_threshold_belongs_to_its_pool() -> None:
    sampler = pools()
    for row, reward in enumerate((0.25, 0.26, 0.75, 0.76)):
        sampler.observe(Scored(row, (reward,)))
    assert sampler.metrics() == {
        "pool_unseen": 20 / 24,
        "pool_hard": 1 / 24,
        "pool_normal": 2 / 24,
        "pool_easy": 1 / 24,
    }


def test_a_memory_keeps_rows_that_are_solved_at_times_from_those_that_always_are() -> None:
    sampler = pools(memory=0.5)
    for reward in (0.4, 1.0):
        sampler.observe(Scored(0, (reward,)))  # 0.4, then 0.7
        sampler.observe(Scored(1, (1.0,)))
    assert (sampler.metrics()["pool_normal"], sampler.metrics()["pool_easy"]) == (1 / 24, 1 / 24)


def test_rows_that_were_not_drawn_come_first_if_nothing_else_has_a_weight() -> None:
    sampler = pools(Pool("all", 1.0, 0.0))
    first = [row for rows in steps(sampler, 0, 6) for row in rows]
    assert sorted(first) == list(range(ROWS))
    assert len(set(sampler.draw(BATCH, 6))) == BATCH  # all weights are 0 by now: any row


def test_no_row_comes_twice_in_a_batch_while_there_are_others() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0, 1e-9])
    draw = np.random.default_rng(0)
    assert sorted(weighted(weights, 3, draw)) == [1, 3, 4]
    assert set(weighted(weights, 30, draw)) == {1, 3, 4} or set(weighted(weights, 30, draw)) == {1, 3}


def test_the_target_moves_as_adarft_says_and_the_nearest_rows_are_drawn() -> None:
    sampler = target()
    assert sorted(sampler.draw(BATCH, 0)) == [0, 1, 2, 3]
    for reward in (1.0, 1.0, 0.5, 0.5):
        sampler.observe(Scored(0, (reward,)))
    assert sampler.metrics()["target_difficulty"] == pytest.approx(50 * np.tanh(2 * 0.25))  # 23.1
    assert sorted(sampler.draw(BATCH, 1)) == [20, 21, 22, 23]
    for _ in range(BATCH):
        sampler.observe(Scored(0, (0.0,)))
    assert sampler.metrics()["target_difficulty"] == 0.0  # 50 tanh(-1) below 0


def test_the_weights_of_a_mixture_change_evenly_and_a_source_is_read_in_passes() -> None:
    sampler = mixture()
    drawn = [list(sampler.draw(8, step)) for step in range(14)]
    assert [sum(row >= 16 for row in rows) for rows in (drawn[0], drawn[10], drawn[13])] == [0, 8, 8]
    assert 0 < sum(row >= 16 for rows in drawn[4:7] for row in rows) < 24
    assert sampler.metrics() == {"share_of_source_0": 0.0, "share_of_source_1": 1.0}
    of_second = [row for rows in drawn for row in rows if row >= 16]
    for start in range(0, len(of_second) - 7, 8):
        assert sorted(of_second[start : start + 8]) == list(range(16, 24))


def test_a_schedule_changes_its_sampler_and_all_of_them_observe() -> None:
    late = pools()
    sampler = Schedule([(0, in_passes()), (2, late)])
    assert steps(sampler, 0, 2) == steps(in_passes(), 0, 2)
    assert (sampler.observes, sampler.metrics()["stage"], late.metrics()["pool_unseen"]) == (True, 0, 1 - 8 / ROWS)
    steps(sampler, 2, 3)
    assert sampler.metrics()["stage"] == 1


def test_what_was_solved_often_enough_is_left_out_until_everything_is() -> None:
    sampler = SkipSolved(in_passes(), ROWS, times=2, reward=1.0)
    drawn = Counter[int]()
    for step in range(40):
        for row in sampler.draw(BATCH, step):
            drawn[row] += 1
            sampler.observe(Scored(row, (1.0, 1.0) if row < 12 else (1.0, 0.0)))
    assert {drawn[row] for row in range(12)} == {2}
    assert sampler.metrics() == {"rows_solved": 0.5}
    for row in range(12, ROWS):
        sampler.observe(Scored(row, (1.0,)))
        sampler.observe(Scored(row, (2.0,)))
    assert sampler.metrics() == {"rows_solved": 1.0}
    assert len(sampler.draw(BATCH, 40)) == BATCH


def test_a_row_that_is_not_solved_any_more_counts_from_the_beginning() -> None:
    sampler = SkipSolved(in_passes(), ROWS, times=2, reward=1.0)
    for rewards in ((1.0,), (0.0,), (1.0,)):
        sampler.observe(Scored(3, rewards))
    assert sampler.metrics() == {"rows_solved": 0.0}


OWN = """
from skyrl.data.samplers import Sampler

class Last(Sampler):
    def __init__(self, rows, window=2):
        self.rows, self.window = rows, window
    def draw(self, count, step):
        return [len(self.rows) - 1 - place % self.window for place in range(count)]

class Short(Last):
    def draw(self, count, step):
        return [0]

class Outside(Last):
    def draw(self, count, step):
        return [len(self.rows)] * count

class Broken(Last):
    def draw(self, count, step):
        raise KeyError("difficulty")

def nothing(rows):
    return 3

def empty(rows):
    return []
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "mine.py")


def test_a_sampler_of_the_user_gets_the_rows_and_its_arguments(own: str) -> None:
    assert CustomSampler(f"{own}:Last", range(9), {"window": 3}).draw(4, 0) == [8, 7, 6, 8]


def test_a_class_in_the_form_of_skyrl_is_iterated_over() -> None:
    sampler = CustomSampler("tests.data.test_samplers:Counting", range(5), {"first": 3})
    assert [sampler.draw(3, step) for step in range(2)] == [[3, 4, 0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Short", "drew 1 rows for step 0; a batch needs 4 numbers from 0 to 8"),
        ("Outside", "drew the row 9 for step 0"),
        ("Broken", "draw of the sampler .*mine.py:Broken raised KeyError: 'difficulty'"),
        ("empty", "it yields no row"),
    ],
)
def test_a_sampler_of_the_user_that_fails_is_named(own: str, name: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        CustomSampler(f"{own}:{name}", range(9), {}).draw(4, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nothing", {}, "is a int, which is neither"),
        ("Last", {"windows": 3}, "called with the rows and sampler_kwargs, raised TypeError"),
        ("Lost", {}, "has no 'Lost'; did you mean Last"),
    ],
)
def test_what_is_no_sampler_is_refused_at_the_start(
    own: str, name: str, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        CustomSampler(f"{own}:{name}", range(9), arguments)

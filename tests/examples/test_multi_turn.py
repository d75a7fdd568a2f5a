from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.config import compose
from skyrl.envs import find_env

MULTI_TURN = Path(__file__).parents[2] / "examples" / "multi_turn"


def played(*actions: str) -> list[Any]:
    env = find_env(f"{MULTI_TURN}/guess_env.py:GuessEnv")({"reward_spec": {"ground_truth": "2"}})
    return [env.step(action) for action in actions]


def test_a_wrong_guess_is_given_a_hint_and_a_second_try() -> None:
    first, second = played("7", "2")
    assert (first.reward, first.done, first.observations[0]["content"]) == (0.0, False, "c")
    assert (second.reward, second.done) == (1.0, True)


@pytest.mark.parametrize(("actions", "reward"), [(["2"], 1.0), (["7", "8"], 0.0), (["x", "2"], 1.0)])
def test_the_last_try_counts(actions: list[str], reward: float) -> None:
    last = played(*actions)[-1]
    assert (last.reward, last.done) == (reward, True)


def test_the_configuration_runs_without_a_warning() -> None:
    assert not compose([str(MULTI_TURN / "grpo.toml")], [], strict=True).warnings

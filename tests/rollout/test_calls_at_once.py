"""Environments that answer within microseconds run without a thread; code of users never does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from skyrl.config import SkyRLGymConfig
from skyrl.config.settings.environment import ENVIRONMENTS
from skyrl.envs import SkipSample
from skyrl.envs.builtin.multiply import MultiplyEnv
from skyrl.envs.registry import answers_immediately, find_env, starts_immediately
from skyrl.errors import RewardError, ServiceGone
from skyrl.rollout.env_calls import EpisodeError, called_immediately
from skyrl.rollout.threads import KeptThreads
from tests.rollout.test_generator import SPEC, Scripted, generator, prompt, sample

AT_ONCE = ("gsm8k", "gsm8k_multi_turn", "aime", "multiply")
MINE = "def reward(completion, **_):\n    return 1.0\n"


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr(KeptThreads, "run", refuse)


@pytest.mark.parametrize("name", AT_ONCE)
async def test_a_built_in_environment_that_only_compares_text_needs_no_thread(name: str, no_threads: None) -> None:
    ((first, second),) = [
        group.trajectories
        for group in await sample(generator(Scripted(*["\\boxed{1} #### 1 Answer: 1"] * 2)), prompt(name, **SPEC))
    ]
    assert (first.reward, second.reward) == (1.0, 1.0)


def test_no_other_built_in_environment_does_except_one_that_waits_for_its_group() -> None:
    assert {name for name in ENVIRONMENTS if answers_immediately(find_env(name))} == {*AT_ONCE, "pairwise_judge"}


def test_comparing_as_mathematics_is_a_program_and_needs_one() -> None:
    gym = SkyRLGymConfig(math_equivalence=True)
    assert [answers_immediately(find_env(name, gym)) for name in AT_ONCE] == [False, True, False, True]


def test_a_reward_function_starts_at_once_and_is_called_in_a_thread(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    for name in (f"{tmp_path}/mine.py:reward", f"gsm8k + {tmp_path}/mine.py:reward"):
        env = find_env(name)
        assert (starts_immediately(env), answers_immediately(env)) == (True, False)


def test_an_environment_of_a_user_gets_threads_even_if_it_extends_one_that_needs_none() -> None:
    class Mine(MultiplyEnv):
        pass

    assert not starts_immediately(Mine)
    assert not starts_immediately(lambda extras: Mine(extras))


async def test_a_row_that_a_built_in_environment_cannot_read_is_a_failure_of_the_sample(no_threads: None) -> None:
    with pytest.raises(RewardError, match="gsm8k, starting on prompt p,"):
        await sample(generator(Scripted("#### 1", "#### 1")), prompt("gsm8k", other="1"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no"), "it raised ValueError: no"),
        (SkipSample("no row"), "it skips it: no row"),
    ],
)
def test_what_is_raised_at_once_is_an_outcome_of_the_sample(error: Exception, message: str) -> None:
    with pytest.raises(EpisodeError, match=message):
        called_immediately("it", _raise, error)


def test_a_service_that_is_gone_ends_more_than_a_sample() -> None:
    with pytest.raises(ServiceGone, match="^gone$"):
        called_immediately("it", _raise, ServiceGone("gone"))


def test_a_call_at_once_gives_its_result_and_the_seconds_that_it_ran() -> None:
    result, seconds = called_immediately("it", threading.get_ident)
    assert result == threading.get_ident()
    assert seconds >= 0.0


def _raise(error: Exception) -> None:
    raise error

"""Environments, tools and reward functions that are coroutines, and rewards that are given to a whole group."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from skyrl.config import SkyRLGymConfig
from skyrl.envs import Env, EnvStep, find_env, register
from skyrl.envs.reward_functions import RewardFunctionEnv
from skyrl.envs.tools import Tool, ToolEnv
from skyrl.errors import RewardError, SkipSample, TaskError
from tests.rollout.chats import Says, chat_tokenizer, generator, play, prompt

TOKENIZER = chat_tokenizer()
LOOPS: set[int] = set()
CANCELLED = Event()


class Waits(Env):
    """All its methods are coroutines; two of its kind meet in `step`."""

    def __init__(self, extras: Any) -> None:
        super().__init__(extras)
        self.closed = False

    async def init(self, prompt: Any) -> Any:  # type: ignore[override]  # a coroutine may stand in
        LOOPS.add(id(asyncio.get_running_loop()))
        self.opened = asyncio.get_running_loop().create_future()
        return prompt, {}

    async def step(self, action: str) -> EnvStep:  # type: ignore[override]  # a coroutine may stand in
        self.opened.set_result(None)  # of another loop, this would raise where it is waited for
        await self.opened
        LOOPS.add(id(asyncio.get_running_loop()))
        return EnvStep(reward=float(action), done=True)

    async def get_metrics(self) -> dict[str, float]:  # type: ignore[override]  # a coroutine may stand in
        return {"measured": 1.0}


class Hangs(Env):
    async def step(self, action: str) -> EnvStep:  # type: ignore[override]  # a coroutine may stand in
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            CANCELLED.set()
            raise
        raise AssertionError


class Raises(Env):
    async def step(self, action: str) -> EnvStep:  # type: ignore[override]  # a coroutine may stand in
        raise KeyboardInterrupt


register("tests-waits", Waits)
register("tests-hangs", Hangs)
register("tests-raises", Raises)


async def test_the_coroutines_of_all_environments_run_on_one_loop_beside_that_of_the_run() -> None:
    gym_generator = generator(Says(TOKENIZER, ["1"], ["0"]), TOKENIZER)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-waits"), samples=2)
    assert group.rewards == (1.0, 0.0)
    assert group.trajectories[0].metrics == {"measured": 1.0}
    assert len(LOOPS) == 1
    assert id(asyncio.get_running_loop()) not in LOOPS


async def test_a_coroutine_that_misses_its_deadline_is_cancelled() -> None:
    gym = SkyRLGymConfig(step_timeout_seconds=0.2, max_attempts=1, max_failed_share=1.0)
    (group,) = await play(generator(Says(TOKENIZER, ["a"]), TOKENIZER, gym), prompt(TOKENIZER, "tests-hangs"))
    assert [failure.kind for failure in group.trajectories[0].failures] == ["timeout"]
    assert await asyncio.to_thread(CANCELLED.wait, 60)


async def test_what_a_coroutine_raises_is_a_failure_and_the_next_one_runs() -> None:
    gym = SkyRLGymConfig(max_attempts=1, max_failed_share=1.0)
    gym_generator = generator(Says(TOKENIZER, ["1"]), TOKENIZER, gym)
    raised, fine = await play(gym_generator, prompt(TOKENIZER, "tests-raises"), prompt(TOKENIZER, "tests-waits"))
    assert "raised KeyboardInterrupt" in raised.trajectories[0].failures[0].reason
    assert fine.rewards == (1.0,)


async def test_the_share_that_may_fail_is_of_all_samples_of_all_prompts() -> None:
    """Two of four samples fail, and half of them may."""
    gym = SkyRLGymConfig(max_attempts=1, max_failed_share=0.5)
    gym_generator = generator(Says(TOKENIZER, ["1"], ["x"], ["0"], ["x"]), TOKENIZER, gym)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-waits"), samples=4)
    assert [row.failed for row in group.trajectories].count(True) == 2


def test_reward_functions_of_all_forms_and_tools_may_be_coroutines() -> None:
    async def ours(completion: str, **columns: Any) -> float:
        return 0.5

    async def trl(completions: Any, **columns: Any) -> list[float]:
        return [0.25]

    async def verl(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
        return {"score": 0.125}

    assert [RewardFunctionEnv({}, function).step("a").reward for function in (ours, trl, verl)] == [0.5, 0.25, 0.125]

    async def look(word: str) -> str:
        return f"{word}: found"

    schema = {"type": "object", "properties": {"word": {"type": "string"}}}

    class Looks(ToolEnv):
        tools = (Tool(name="look", description="looks", parameters=schema, run=look),)

    step = Looks({}).step('<tool_call>{"name": "look", "arguments": {"word": "x"}}</tool_call>')
    assert step.observations[0]["content"] == "x: found"


def test_none_of_a_trl_function_is_no_reward_for_the_sample() -> None:
    def only_mathematics(completions: Any, **columns: Any) -> list[float | None]:
        return [None for _ in completions]

    with pytest.raises(SkipSample, match="gives None"):
        RewardFunctionEnv({}, only_mathematics).step("a")


GROUP = """
from skyrl.envs import group_reward

@group_reward
def longest(completions, prompts, ground_truth, level, **columns):
    texts = [completion[0]["content"] for completion in completions]
    assert len(texts) == len(prompts) == len(ground_truth) == len(level)
    if "fail" in texts:
        raise OSError("the judge was away")
    return [None if text == "?" else float(len(text) == max(map(len, texts))) for text in texts]

@group_reward
async def too_few(completions, **columns):
    return [1.0]
"""


async def judged(tmp_path: Path, *answers: str, function: str = "longest", **settings: Any) -> Any:
    file = tmp_path / "group.py"
    file.write_text(GROUP, encoding="utf-8")
    name = f"{file}:{function}"
    gym = SkyRLGymConfig(**{"max_failed_share": 1.0, **settings})
    gym_generator = generator(Says(TOKENIZER, *[[answer] for answer in answers]), TOKENIZER, gym)
    gym_generator._user_env_class = name
    task_prompt = prompt(TOKENIZER, name, reward_spec={"ground_truth": "x"}, level="easy")
    (group,) = await play(gym_generator, task_prompt, samples=len(answers))
    return group


async def test_a_reward_function_of_groups_compares_all_samples_of_a_prompt_in_one_call(tmp_path: Path) -> None:
    group = await judged(tmp_path, "a<|im_end|>", "abc<|im_end|>", "ab")
    assert group.rewards == (0.0, 1.0, 0.0)
    assert [row.rewards[0].token for row in group.trajectories] == [1, 3, 1]


async def test_none_for_a_sample_of_a_group_is_no_reward_and_the_group_is_left_out(tmp_path: Path) -> None:
    group = await judged(tmp_path, "a", "?")
    assert (group.dropped, [bool(row.skipped) for row in group.trajectories]) == (True, [False, True])
    assert not any(row.trained for row in group.trajectories)
    filled = await judged(tmp_path, "a", "?", failed_samples="fill")
    assert (filled.dropped, filled.rewards) == (False, (1.0, 1.0))


async def test_a_reward_function_of_groups_that_fails_is_called_again_and_then_given_up(tmp_path: Path) -> None:
    group = await judged(tmp_path, "fail", "a", max_attempts=2)
    assert group.dropped
    assert [failure.kind for failure in group.trajectories[1].failures] == ["raised", "raised"]
    with pytest.raises(RewardError, match="gives a list of 2 numbers for 2 answers, not"):
        await judged(tmp_path, "a", "b", function="too_few", max_failed_share=0.0)


async def test_an_answer_that_was_cut_off_has_no_reward_from_its_group_where_it_may_have_none(tmp_path: Path) -> None:
    file = tmp_path / "group.py"
    file.write_text(GROUP, encoding="utf-8")
    engine = Says(TOKENIZER, ["a"], ["ab"], stop_reason="length")
    gym_generator = generator(engine, TOKENIZER, max_turns=1, zero_reward_on_non_stop=True)
    gym_generator._user_env_class = name = f"{file}:longest"
    (group,) = await play(gym_generator, prompt(TOKENIZER, name, level="easy"), samples=2)
    assert group.rewards == (0.0, 0.0)


def test_a_reward_function_of_groups_cannot_be_isolated(tmp_path: Path) -> None:
    file = tmp_path / "group.py"
    file.write_text(GROUP, encoding="utf-8")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with pytest.raises(TaskError, match="cannot be isolated: set environment.skyrl_gym.isolate_user_env = false"):
        find_env(f"{file}:longest", SkyRLGymConfig(isolate_user_env=True))

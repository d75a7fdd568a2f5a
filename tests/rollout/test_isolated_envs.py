from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

from skyrl.config import (
    ChatTemplateConfig,
    GeneratorConfig,
    InferenceEngineConfig,
    SamplingParams,
    SkyRLGymConfig,
    SkyRLLoraConfig,
)
from skyrl.envs import EnvStep
from skyrl.envs.isolated import IsolatedEnv
from skyrl.envs.registry import find_env_of_row
from skyrl.errors import SkipSample, TaskError, WorkerEnded
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.measures import measure
from skyrl.sandbox.sandbox import why_unavailable
from skyrl.sandbox.tiers import TIERS, Tier
from skyrl.trajectory import Prompt
from tests.processes.clusters import soon
from tests.processes.left_over import a_test_begins, left_over, process_beside
from tests.rollout.chats import Says, chat_tokenizer, play
from tests.rollout.chats import prompt as chat_prompt
from tests.rollout.test_generator import Scripted
from tests.rollout.test_tools import APPLE, QWEN

TASK = """
import os, sys, time
from skyrl.envs import Env, EnvStep, SkipSample

class Task(Env):
    def step(self, action):
        how = self.extras["how"]
        if how == "skips": raise SkipSample("no answer is known")
        if how == "hangs":
            open("hanging", "x").close()
            time.sleep(1000)
        if how == "hangs for good":
            import signal
            for number in range(1, 32):
                try: signal.signal(number, signal.SIG_IGN)
                except OSError: pass
            while True: pass
        if how == "raises": raise KeyError("x")
        if how == "exits": sys.exit(0)
        if how == "exits at once": os._exit(3)
        if how == "is killed": os.kill(os.getpid(), 9)
        if how == "forks" and os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        if how == "forks and hangs":
            for _ in range(5):
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(1000)
            time.sleep(1000)
        if how == "prints a gigabyte":
            line = b"x" * 1_000_000
            for _ in range(1000): os.write(1, line)
        reward = {"nan": float("nan"), "infinite": float("inf"), "text": "good", "none": None}.get(how, 1)
        if how == "wrong type": return 1.0
        if how == "a gigabyte":
            return EnvStep(reward=1, done=True, observations=({"role": "user", "content": "x" * 10**9},))
        if how == "no messages": return EnvStep(reward=1, done=True, observations=(1, 2))
        if how == "memory": bytearray(10**11)
        if how == "hostile metrics": self.metrics = {"depth": "low"}
        if how == "secrets" and "SKYRL_SECRET" in os.environ: reward = 7
        parts = {"well": {"shown": 0.25}}.get(how, {})
        return EnvStep(reward=reward, done=True, components=parts)

    def get_metrics(self): return getattr(self, "metrics", {"steps": 1})
"""

SHOP = """
from skyrl.envs import EnvStep
from skyrl.envs.tools import Tool, ToolEnv

class Shop(ToolEnv):
    def __init__(self, extras):
        super().__init__(extras)
        item = {"item": {"type": "string", "description": "what is sold"}}
        parameters = {"type": "object", "properties": item, "required": ["item"]}
        self.tools = (Tool(name="price", description="Of a piece.", parameters=parameters, run=self.price),)

    def price(self, item):
        return self.extras["prices"][item]

    def judge(self, answer):
        return EnvStep(reward=1.0, done=True)
"""

BROKEN = {
    "hangs": "timeout",
    "hangs for good": "timeout",
    "raises": "raised",
    "exits": "raised",
    "exits at once": "raised",
    "is killed": "raised",
    "forks and hangs": "timeout",
    "nan": "not_finite",
    "infinite": "not_finite",
    "text": "wrong_type",
    "none": "wrong_type",
    "wrong type": "wrong_type",
    "a gigabyte": "too_large",
    "no messages": "wrong_type",
    "memory": "raised",
    "hostile metrics": "wrong_type",
}
GOOD = ("well", "forks", "prints a gigabyte", "secrets")
NO_THOUGHTS = ChatTemplateConfig(name_or_path="qwen3_without_thinking")
HERE = [tier for tier in TIERS if not why_unavailable(tier)]


@pytest.fixture(autouse=True)
def _what_runs_already() -> None:
    a_test_begins()


def isolated(tier: Tier | Literal["auto"], **more: Any) -> SkyRLGymConfig:
    return SkyRLGymConfig(isolate_user_env=True, sandbox_tier=tier, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all environments here: a sandbox warms up for each."""
    folder = tmp_path_factory.mktemp("environments")
    folder.chmod(0o755)  # a run of root's: its programs are other users
    return folder


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def task(folder: Path) -> str:
    return f"{written(folder, 'task', TASK)}:Task"


STEP = IsolatedEnv.step


def soon_over_where_it_hangs(env: IsolatedEnv, action: str) -> EnvStep:
    """A step with a short deadline where no answer ever comes; the others have all the time that a machine needs."""
    if BROKEN.get(env.extras["how"]) == "timeout":
        env._seconds = 0.5
    return STEP(env, action)


@pytest.mark.parametrize("tier", [*(pytest.param(tier, marks=pytest.mark.long) for tier in HERE[:-1]), HERE[-1]])
async def test_broken_environments_fail_by_themselves_and_leave_nothing_behind(
    tier: Tier, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_SECRET", "1")
    monkeypatch.setattr(IsolatedEnv, "step", soon_over_where_it_hangs)
    gym = isolated(tier, max_attempts=1, max_failed_share=1.0)
    lora, engines = SkyRLLoraConfig(), [Scripted("an answer")]
    unused: Any = None  # no tokenizer: prompts of one turn come as token ids
    client = InferenceEngineClient(engines, unused, "model", lora, InferenceEngineConfig())  # type: ignore[arg-type]  # stand-ins
    generator = SkyRLGymGenerator("model", lora, GeneratorConfig(), gym, client, unused, user_env_class=task)
    prompts = [
        Prompt(
            id=kind, messages=({"role": "user", "content": "?"},), token_ids=(1,), env_class=task, extras={"how": kind}
        )
        for kind in (*BROKEN, *GOOD)
    ]
    groups = await generator.generate(prompts, sampling=SamplingParams(), samples_per_prompt=1, weight_version=0)
    failed = {group.prompt.id: group.trajectories[0].failures for group in groups if group.dropped}
    assert {kind: failure.kind for kind, (failure,) in failed.items()} == BROKEN
    assert re.search(r"task\.py:\d+, in step\)$", failed["raises"][0].reason)
    assert {group.prompt.id: group.rewards for group in groups if not group.dropped} == dict.fromkeys(GOOD, (1.0,))
    [well] = [group.trajectories[0] for group in groups if group.prompt.id == "well"]
    assert well.components == {"shown": 0.25}
    counted = measure(groups)
    assert (counted["rollout/failures"], counted["rollout/failures_timeout"]) == (len(BROKEN), 3)
    assert left_over() == []


def test_no_episode_sees_another_and_the_module_is_not_imported_here(folder: Path) -> None:
    text = "seen = []\ndef reward(completion, **others):\n    seen.append(1)\n    return len(seen)\n"
    file = written(folder, "planted", text)
    name = f"{file}:reward"
    make = find_env_of_row(name, name, isolated(HERE[-1]))
    first, second = make({}), make({})
    try:
        assert [first.step("a").reward, first.step("a").reward, second.step("a").reward] == [1.0, 2.0, 1.0]
        assert not [module for module in sys.modules if "planted" in module]
    finally:
        first.close()
        second.close()


@pytest.mark.long
def test_the_tools_of_an_isolated_environment_are_seen_and_called(folder: Path) -> None:
    name = f"{written(folder, 'shop', SHOP)}:Shop"
    env = find_env_of_row(name, name, isolated(HERE[-1]))({"prices": {"apple": 3}})
    try:
        env.init(({"role": "user", "content": "?"},))
        (schema,) = env.tool_schemas()
        assert schema["function"]["name"] == "price"
        step = env.step('<tool_call>\n{"name": "price", "arguments": {"item": "apple"}}\n</tool_call>')
        assert (step.done, step.observations[0]["role"], step.observations[0]["content"]) == (False, "tool", "3")
    finally:
        env.close()


@pytest.mark.long
def test_an_isolated_environment_that_cannot_be_found_says_what_was_looked_for(folder: Path) -> None:
    file = written(folder, "broken", "1 / 0")
    for name, message in ((f"{file}:f", "ZeroDivisionError"), (f"{folder / 'none.py'}:f", "there is no file")):
        with pytest.raises(TaskError, match=message):
            find_env_of_row(name, name, isolated(HERE[-1]))


@pytest.mark.parametrize("changes", [{}, {"step_wise_trajectories": True}, {"chat_template": NO_THOUGHTS}])
async def test_isolated_tools_are_shown_and_answer_however_the_conversation_is_rendered(
    folder: Path, changes: dict[str, Any]
) -> None:
    name, tokenizer = f"{written(folder, 'shop', SHOP)}:Shop", chat_tokenizer(QWEN)
    engine = Says(tokenizer, [f"{APPLE}<|im_end|>", "3<|im_end|>"])
    lora, settings = SkyRLLoraConfig(), GeneratorConfig(max_turns=3, **changes)
    client = InferenceEngineClient([engine], tokenizer, "model", lora, InferenceEngineConfig())  # type: ignore[list-item]  # stand-ins
    generator = SkyRLGymGenerator("model", lora, settings, isolated(HERE[-1]), client, tokenizer, user_env_class=name)
    (group,) = await play(generator, chat_prompt(tokenizer, name, prices={"apple": 3}))
    (row,) = group.trajectories
    assert (row.reward, row.failures, len(engine.requests)) == (1.0, (), 2)
    for request in engine.requests:
        assert '"name": "price"' in tokenizer.decode(request.prompt_ids)
    assert "<tool_response>\n3\n</tool_response>" in tokenizer.decode(engine.requests[1].prompt_ids)
    rows = [step.prompt_ids + step.response_ids for step in row.token_rows]
    assert all(
        any(tokens[: len(request.prompt_ids)] == request.prompt_ids for tokens in rows) for request in engine.requests
    )


def test_an_isolated_environment_may_skip_a_sample(task: str) -> None:
    env = find_env_of_row(task, task, isolated(HERE[-1]))({"how": "skips"})
    with pytest.raises(SkipSample, match="no answer is known"):
        env.step("an answer")
    env.close()


def test_closing_an_episode_ends_a_call_that_still_runs(task: str) -> None:
    env = find_env_of_row(task, task, isolated(HERE[-1]))({"how": "hangs"})
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(env.step, "an answer")
        assert soon(lambda: process_beside("hanging") is not None)
        env.close()  # and the 300 s of a step are not waited for
        with pytest.raises(WorkerEnded) as ended:
            running.result()
        assert ended.value.how != "timeout"
    assert left_over() == []


def test_a_row_that_json_cannot_say_is_refused(task: str) -> None:
    with pytest.raises(TaskError, match="as JSON"):
        find_env_of_row(task, task, isolated(HERE[-1]))({"how": {1, 2}})

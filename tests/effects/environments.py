"""Probes of `environment.skyrl_gym`: what an environment asks of services, and how programs are kept apart."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import URLError

from skyrl.config import SkyRLTrainConfig, resolve
from skyrl.data.sources import read_rows
from skyrl.envs import Env, find_env
from skyrl.envs.group_rewards import GroupReward
from skyrl.envs.mcp import environment
from skyrl.errors import SkyRLError
from tests.effects.probe import Probe, Scene, observable

GYM = "environment.skyrl_gym."
ACTION = "<think>t</think><search>two and two</search><solution>SELECT 4</solution> \\boxed{\\frac{8}{2}}"
"""An answer in which several environments find something to do."""

ANSWER = {
    "result": [[{"document": {"contents": "Four."}, "score": 1.0}]],
    "scores": [0.5],
    "choices": [{"message": {"content": "### Final Score: 1"}}],
}
"""Reply of every service."""

SEES = """```python
import os
print(os.path.exists("/proc/{process}/stat"))
```"""

TASKS = '''
calls = []

def count(completion, **others):
    """How often this process was asked."""
    calls.append(completion)
    return len(calls)

def large(completion, **others):
    """Needs two gigabytes of address space."""
    return len(bytearray(2 * 10**9))
'''


def env(**named: str) -> Mapping[str, Any]:
    """A run in which this environment is played."""
    return {"environment.env_class": named.pop("of"), **{f"{GYM}{name}": value for name, value in named.items()}}


class _Services:
    """Answers every request, and remembers address, body and deadline."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object, object]] = []

    def open(self, request: Any, timeout: float) -> BytesIO:
        body = json.loads(request.data)
        body.pop("messages", None)  # they hold a mark that is drawn for each one
        self.asked.append((request.full_url, body, timeout))
        return BytesIO(json.dumps(ANSWER).encode())


def _judged(make: Any, extras: Mapping[str, Any], action: str) -> object:
    try:
        env: Env = make(extras)
        env.init(({"role": "user", "content": "2+2?"},))
        try:
            return env.step(action)
        finally:
            env.close()
    except (SkyRLError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


@observable("the requests of the environment, its messages, and its reward")
def step(scene: Scene) -> object:
    services, printed, name = _Services(), StringIO(), scene.run.environment.task or ""
    _database(Path("databases") / "numbers.sqlite")
    truth = "SELECT 4" if name == "text2sql" else "4"
    extras = {"reward_spec": {"ground_truth": truth}, "db_id": "numbers", "max_turns": 2}
    with mock.patch("skyrl.processes.answers._OPENER", services), redirect_stderr(printed):
        end = _judged(find_env(name, scene.run.environment.skyrl_gym), extras, ACTION)
    return {"end": end, "asked": services.asked, "printed": printed.getvalue()}


class _Judge:
    """Prefers the first answer of each request, which it remembers without the marks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def open(self, request: Any, timeout: float) -> BytesIO:
        self.asked.append((request.full_url, re.sub("[0-9a-f]{32}", "", request.data.decode())))
        return BytesIO(json.dumps({"choices": [{"message": {"content": "### Better: A"}}]}).encode())


@observable("the requests of a judge that compares four answers, and their rewards")
def comparisons(scene: Scene) -> object:
    judge, reward = _Judge(), find_env("pairwise_judge", scene.run.environment.skyrl_gym)
    assert isinstance(reward, GroupReward)
    with mock.patch("skyrl.processes.answers._OPENER", judge):
        return reward.rewards([{"role": "user", "content": "2+2?"}], ["4", "four", "five", "IV"], {}), judge.asked


@observable("how long a service that is away is waited for")
def outage(scene: Scene) -> object:
    clock, gone = Clock(), mock.Mock(open=mock.Mock(side_effect=URLError("nobody listens")))
    with mock.patch("skyrl.processes.answers._OPENER", gone), mock.patch("skyrl.envs.http_json.time", clock):
        return _judged(find_env("reward_model", scene.run.environment.skyrl_gym), {}, "4"), clock.now


class Clock:
    """The time that a program has slept."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _database(file: Path) -> None:
    file.parent.mkdir()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE numbers (value INTEGER)")


@observable("whether a program of the policy sees the processes of the machine")
def program(scene: Scene) -> object:
    tests = [{"input": "", "output": "True", "testtype": "stdin"}]
    make = find_env("code", scene.run.environment.skyrl_gym)
    return _judged(make, {"reward_spec": {"ground_truth": tests}}, SEES.format(process=os.getpid()))


@observable("the rewards of two episodes of a function that counts its calls, and of one that takes memory", long=True)
def functions(scene: Scene) -> object:
    file = Path("tasks.py").absolute()
    file.write_text(TASKS, encoding="utf-8")
    file.parent.chmod(0o755)  # where the run is root's, a sandbox has a user of its own
    gym = scene.run.environment.skyrl_gym
    extras = {"reward_spec": {"ground_truth": "4"}}
    outcomes = [_judged(find_env(f"{file}:{name}", gym), extras, "four") for name in ("count", "count", "large")]
    return [outcome.replace(str(file), "tasks.py") if isinstance(outcome, str) else outcome for outcome in outcomes]


@observable("the sources of rows, their weights, and what the environment is given in its first row")
def reasoning_rows(scene: Scene) -> object:
    data = resolve(SkyRLTrainConfig(environment=scene.run.environment)).data  # the scene's names files of its own
    with mock.patch.object(sys, "path", [STAND_IN, *sys.path]):
        importlib.invalidate_caches()
        try:
            first = [read_rows(source)[0] for source in (*data.train_data, *data.val_data)]
        except SkyRLError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
                del sys.modules[name]
    return data.train_weights, first


@observable("the tools that the policy is shown, what it is told of a call, and its reward")
def mcp_step(scene: Scene) -> object:
    gym = scene.run.environment.skyrl_gym
    shutil.copy(LINES, ".")
    environment._offered.cache_clear()  # its files were in the folder of another scene
    try:
        env = find_env("mcp", gym)({"reward_spec": {"ground_truth": "4"}})
        try:
            calls = '<tool_call>{"name": "two"}</tool_call>'
            return env.tool_schemas(), env.step(calls).observations, env.step("\\boxed{4} Answer: 4").reward
        finally:
            env.close()
    except SkyRLError as error:
        return str(error)


def mcp_server(mischief: str) -> list[dict[str, Any]]:
    """A server of a few lines that does this."""
    return [{"command": ["python3", LINES.name, mischief]}]


LINES = Path(__file__).parents[1] / "envs" / "mcp_servers" / "lines.py"
STAND_IN = str(Path(__file__).parents[1] / "envs" / "stand_in")
REASONING: Mapping[str, Any] = {
    **env(of="reasoning_gym:chain_sum"),
    f"{GYM}reasoning_gym.train_rows": 9,
    f"{GYM}reasoning_gym.eval_rows": 3,
}
REWARD_MODEL, JUDGE, SEARCH = f"{GYM}reward_model.", f"{GYM}llm_as_a_judge.", f"{GYM}search."
SERVICE = "http://localhost:1/score"
MCP = f"{GYM}mcp."
MCP_RUN: Mapping[str, Any] = {
    **env(of="mcp"),
    f"{MCP}servers": mcp_server("chatter"),
    f"{MCP}reward": "gsm8k",
}


def mcp_timeout(name: str, mischief: str) -> Probe:
    """A probe of a deadline that a server misses by doing this."""
    short = {**MCP_RUN, f"{MCP}servers": mcp_server(mischief), f"{MCP}{name}": 0.1}
    return Probe(f"{MCP}{name}", 0.2, mcp_step, short)


PROBES: tuple[Probe, ...] = (
    Probe(f"{GYM}sandbox_tier", "namespace", program, env(of="code", sandbox_tier="process")),
    Probe(f"{GYM}code_url", "http://localhost:1/run", program, env(of="code", sandbox_tier="process")),
    Probe(f"{GYM}isolate_user_env", True, functions),
    Probe(f"{GYM}user_env_memory_gb", 1.0, functions, {f"{GYM}isolate_user_env": True}),
    Probe("environment.reward_weights", [1.0, 0.5], step, {"environment.env_class": ["gsm8k", "aime"]}),
    Probe(f"{GYM}math_equivalence", True, step, env(of="gsm8k")),
    Probe(f"{GYM}text2sql.db_path", "databases", step, env(of="text2sql")),
    Probe(f"{JUDGE}model", "another", step, env(of="llm_as_a_judge")),
    Probe(f"{JUDGE}base_url", "http://localhost:1/v1", step, env(of="llm_as_a_judge")),
    *(
        Probe(f"{GYM}pairwise_judge.{name}", value, comparisons, env(of="pairwise_judge"))
        for name, value in {
            "model": "another",
            "base_url": "http://localhost:1/v1",
            "criterion": "shorter",
            "opponents": 1,
        }.items()
    ),
    *(
        Probe(f"{SEARCH}{name}", value, step, env(of="search"))
        for name, value in {"search_url": SERVICE, "topk": 5, "timeout": 7, "log_requests": True}.items()
    ),
    Probe(f"{REWARD_MODEL}path", "{nano}/model", step, {**env(of="reward_model"), f"{REWARD_MODEL}path": "nowhere"}),
    Probe(f"{GYM}service_patience_seconds", 30.0, outage, {**env(of="reward_model"), f"{REWARD_MODEL}url": SERVICE}),
    Probe(f"{REWARD_MODEL}url", "http://localhost:2", step, {**env(of="reward_model"), f"{REWARD_MODEL}url": SERVICE}),
    *(
        Probe(f"{GYM}reasoning_gym.{name}", value, reasoning_rows, REASONING)
        for name, value in {
            "tasks": {"chain_sum": {"most": 50}},
            "train_rows": 8,
            "eval_rows": 4,
            "seed": 1,
            "system_prompt": "simple",
        }.items()
    ),
    Probe(f"{MCP}servers", mcp_server("image"), mcp_step, MCP_RUN),
    Probe(f"{MCP}reward", "aime", mcp_step, MCP_RUN),
    mcp_timeout("call_timeout_seconds", "hang"),
    mcp_timeout("start_timeout_seconds", "mute"),
    Probe(f"{MCP}max_result_characters", 3, mcp_step, MCP_RUN),
    Probe(f"{REWARD_MODEL}timeout", 7, step, {**env(of="reward_model"), f"{REWARD_MODEL}url": SERVICE}),
)

"""Agents that are not trusted: a sandbox in each tier that has networks, and the endpoint as the only way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.config.settings.environment import AgentConfig
from skyrl.errors import RewardError, TaskError, UserError, WorkerEnded
from skyrl.experiments.preflight import the_task_can_be_imported
from skyrl.rollout.agent_runner import AgentCall, Returned, agent_of
from skyrl.sandbox import sandbox
from skyrl.sandbox.fork_client import Command
from skyrl.sandbox.sandbox import Ran, ResourceLimits
from skyrl.trajectory import Trajectory
from tests.nano_run import config, metrics, train
from tests.rollout.agent_episodes import scripted
from tests.sandbox.test_commands import NETWORKED

ASKS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
asked = json.dumps({"messages": task["messages"], "max_tokens": 4}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def agent(folder: Path, program: str, **changes: Any) -> AgentConfig:
    """An isolated agent that asks once, and goes on with this program."""
    file = folder / "agent.py"
    file.write_text(ASKS + program, encoding="utf-8")
    return AgentConfig(
        **{"command": (sys.executable, "-I", "-S", str(file)), "reward": "returned", "isolate": True, **changes}
    )


async def play(tier: str, config: AgentConfig) -> Trajectory:
    trajectory, _ = await scripted(["3"], config, gym={"sandbox_tier": tier})
    return trajectory


@pytest.mark.parametrize("tier", NETWORKED)
async def test_an_isolated_agent_is_trained_on_as_any_other(tier: str, tmp_path: Path) -> None:
    program = "print('looking at', task['data_source'])\nprint(float(answer == '3') / 2)"
    trajectory = await play(tier, agent(tmp_path, program))
    assert (trajectory.failures, trajectory.reward) == ((), 0.5)
    assert trajectory.metrics["agent_requests"] == 1.0


@pytest.mark.long
@pytest.mark.parametrize("tier", NETWORKED)
async def test_openais_client_reaches_the_policy_from_the_sandbox(tier: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import json, os, sys\nimport openai\ntask = json.load(sys.stdin)\nclient = openai.OpenAI(max_retries=0)\n"
        "answer = client.chat.completions.create(model=os.environ['MODEL'], messages=task['messages'], stream=True)\n"
        "print(float(''.join(part.choices[0].delta.content or '' for part in answer if part.choices)))\n"
    )
    trajectory = await play(tier, AgentConfig(command=(sys.executable, str(file)), reward="returned", isolate=True))
    assert (trajectory.failures, trajectory.reward) == ((), 3.0)


@pytest.mark.parametrize("tier", NETWORKED)
async def test_an_agent_sees_the_way_to_the_policy_and_nothing_else_of_the_run(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_SECRET", "1")
    trajectory = await play(tier, agent(tmp_path, "print(json.dumps(dict(os.environ)))", reward="environment"))
    seen = json.loads(str(trajectory.answer))
    ours = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "MODEL"}
    assert ours <= set(seen) <= ours | {"PATH", "LANG", "VIRTUAL_ENV", "PYTHONPATH", "HOME", "TMPDIR", "LC_CTYPE"}
    assert (seen["OPENAI_BASE_URL"], seen["ANTHROPIC_BASE_URL"]) == (
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000",
    )
    assert seen["HOME"] == seen["TMPDIR"] != str(Path.home())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tier", NETWORKED)
async def test_an_agent_reads_what_it_was_given(tier: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "modules").mkdir(parents=True)
    (closed / "modules" / "more.py").write_text("PAID = 0.75")
    (closed / "beside.py").write_text("PAID = 1.0")
    closed.chmod(0o700)
    program = f"sys.path.insert(0, {str(closed / 'modules')!r})\nimport more\nprint(more.PAID)"
    trajectory = await play(tier, agent(tmp_path, program, readable=(str(closed / "modules"),)))
    assert (trajectory.failures, trajectory.reward) == ((), 0.75)
    trajectory = await play(tier, agent(tmp_path, program))
    is_open = tier == "namespace" and not sandbox.Sandbox("namespace").record()["own_user_for_each_program"]
    assert trajectory.failed != is_open
    trajectory = await play(tier, agent(tmp_path, program.replace("modules", "."), readable=(str(closed / "modules"),)))
    assert trajectory.failed


@pytest.mark.parametrize("tier", NETWORKED)
async def test_relative_files_of_the_command_become_absolute_paths(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = agent(tmp_path, "print(len(os.listdir('.')))", command=(sys.executable, "-I", "-S", "agent.py"))
    trajectory = await play(tier, config)
    assert (trajectory.failures, trajectory.reward) == ((), 0.0)  # and it starts in an empty folder


@pytest.mark.sampled(8)
@pytest.mark.parametrize("tier", NETWORKED)
@pytest.mark.parametrize(
    ("program", "changes", "kind", "message"),
    [
        ("x = 'x' * 600_000_000\nprint(1)", {"memory_gb": 0.4}, "raised", "MemoryError"),
        ("print('x' * 2_000_000)", {}, "raised", "printed more than 1048576 bytes"),
        ("import time\ntime.sleep(1000)", {"timeout_seconds": 3.0}, "timeout", "3 s"),
        (
            "import time\nfor _ in range(300):\n  if os.fork() == 0: time.sleep(1000)\nprint(1)",
            {},
            "raised",
            "BlockingIOError",
        ),
    ],
    ids=["memory", "output", "time", "forks"],
)
async def test_an_agent_beyond_its_limits_has_failed(
    tier: str, tmp_path: Path, program: str, changes: dict[str, Any], kind: str, message: str
) -> None:
    trajectory = await play(tier, agent(tmp_path, program, **changes))
    assert [failure.kind for failure in trajectory.failures] == [kind]
    assert message in trajectory.failures[0].reason
    trajectory = await play(tier, agent(tmp_path, "print(1)", **changes))
    assert (trajectory.failures, trajectory.reward) == ((), 1.0)


@pytest.mark.parametrize("tier", NETWORKED)
async def test_the_policy_of_another_trajectory_is_out_of_reach(tier: str, tmp_path: Path) -> None:
    program = (
        "def status(key):\n"
        "  headers['authorization'] = 'Bearer ' + key\n"
        "  request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/models', headers=headers)\n"
        "  try: return urllib.request.urlopen(request).status\n"
        "  except urllib.error.HTTPError as error: return error.code\n"
        "own = os.environ['OPENAI_API_KEY']\n"
        "print([status(own), status(own[:-4] + 'AAAA'), status('any')])"
    )
    trajectory = await play(tier, agent(tmp_path, program, reward="environment"))
    assert trajectory.answer == "[200, 401, 401]"


class Ends:
    """A sandbox in which every command ends as it is told, and which notes its limits."""

    tier = "namespace"

    def __init__(self, ended: Any) -> None:
        self.ended = ended

    def run_command(self, command: Command, stdin: bytes, limits: ResourceLimits) -> Ran:
        self.limits = limits
        return Ran(ended=self.ended, code=0, stdout=b"0.5", stderr=b"")


@pytest.mark.parametrize(
    ("ended", "timeout", "value"),
    [
        ("exit", 3.0, "0.5"),
        ("exit", None, "0.5"),
        ("output", 3.0, "printed more than 1048576 bytes"),
        ("timeout", 3.0, "gave no answer within 3 s and was ended"),
    ],
)
def test_how_a_command_ended_decides_what_an_agent_returns(
    ended: Any, timeout: float | None, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = Ends(ended)
    monkeypatch.setattr("skyrl.rollout.agent_runner._sandbox", lambda tier, readable: sandbox)
    run = agent_of(agent(tmp_path, "", timeout_seconds=timeout), "namespace")
    call = AgentCall(task={}, url="http://127.0.0.1:1", key="k", model="m")
    if ended == "exit":
        assert run(call) == Returned(value=value, exit_code=0)
    else:
        with pytest.raises((RewardError, WorkerEnded), match=value):
            run(call)
    assert sandbox.limits.seconds == (timeout or 1e6)


def test_an_agent_that_cannot_be_isolated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match="environment.agent.readable names .*nowhere, which does not exist"):
        agent_of(agent(tmp_path, "", readable=("nowhere",)), "namespace")
    monkeypatch.setattr(sandbox, "why_unavailable", lambda tier: "" if tier == "process" else "no namespaces")
    with pytest.raises(UserError, match="'bwrap' is not available on this machine: no namespaces"):
        agent_of(agent(tmp_path, "x = 1"), "bwrap")
    sandbox.strongest_tier.cache_clear()
    (tmp_path / "elsewhere").mkdir()
    try:
        with pytest.raises(TaskError, match="needs the sandbox tier namespace or bwrap, which this machine lacks"):
            agent_of(agent(tmp_path / "elsewhere", "x = 2"), "auto")
    finally:
        sandbox.strongest_tier.cache_clear()


def test_a_run_says_before_it_starts_what_is_missing(nano: Path, tmp_path: Path) -> None:
    changes = {"environment__agent__command": ("python",), "environment__agent__isolate": True}
    run = config(nano, tmp_path, **changes, environment__agent__readable=("nowhere",))
    (problem,) = the_task_can_be_imported(run)
    assert (problem.path, "nowhere" in problem.message) == ("environment.agent", True)
    assert list(the_task_can_be_imported(config(nano, tmp_path, **changes))) == []


@pytest.mark.long
def test_a_run_trains_an_isolated_agent_and_records_its_tier(nano: Path, tmp_path: Path) -> None:
    program = agent(tmp_path, "print(float(answer.isascii()))")
    changes = {f"environment__agent__{name}": getattr(program, name) for name in ("command", "reward", "isolate")}
    train(nano, tmp_path / "out", **changes, generator__max_input_length=40, trainer__max_training_steps=2)
    assert metrics(tmp_path / "out")[-1]["environment/agent_requests"] == 1.0
    record = json.loads((tmp_path / "out" / "run" / "sandbox.json").read_text(encoding="utf-8"))
    assert record["environments"] == ["environment.agent"]
    assert record["tier"] == sandbox.strongest_tier()

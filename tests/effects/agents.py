"""Probes of `environment.agent`: who plays an episode, what it pays, and how long agents may run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import evolve

from skyrl.rollout.agent_runner import AgentCall, AgentRunner, agent_of
from tests.effects.probe import Probe, Scene, observable
from tests.rollout.agent_episodes import scripted

A = "environment.agent."


@observable("the episode that the agent plays, and its reward")
def played(scene: Scene) -> object:
    agent = scene.run.environment.agent
    if not agent.plays:
        return None
    trajectory, _ = asyncio.run(scripted(["3"] * 80, agent))
    return (
        trajectory.reward,
        trajectory.answer,
        sum(trajectory.loss_mask),
        trajectory.metrics,
        [failure.reason for failure in trajectory.failures],
    )


@observable("how many agents run at a time, and how long each")
def limits(scene: Scene) -> object:
    with mock.patch("skyrl.rollout.agent_runner.EnvCalls") as calls:
        AgentRunner(scene.run.environment.agent, lambda: None, "policy")
    return calls.call_args.args


@observable("the most agents that start in a second")
def starts(scene: Scene) -> object:
    with mock.patch("skyrl.rollout.agent_runner.Pace") as pace:
        AgentRunner(scene.run.environment.agent, lambda: None, "policy")
    return pace.call_args


ASKS_AND_WRITES = """
import json, os, sys, urllib.request
asked = {"messages": json.load(sys.stdin)["messages"]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers)).read()
try:
    open(sys.argv[1], "w").close()
    print(1)
except OSError:
    print(0)
"""


@observable("whether an agent can write files outside its own folder")
def written(scene: Scene) -> object:
    Path.cwd().chmod(0o777)  # where the run is root's, a sandbox has a user of its own
    Path("agent.py").write_text(ASKS_AND_WRITES, encoding="utf-8")
    command = (sys.executable, "-I", "-S", "agent.py", str(Path.cwd() / "written"))
    trajectory, _ = asyncio.run(scripted(["3"], evolve(scene.run.environment.agent, command=command)))
    return trajectory.reward, [failure.reason for failure in trajectory.failures]


@observable("what an isolated agent can read, and how much memory it has")
def kept_apart(scene: Scene) -> object:
    environment = scene.run.environment
    with mock.patch("skyrl.rollout.agent_runner._sandbox") as sandbox:
        sandbox.return_value.tier = "namespace"
        agent = agent_of(environment.agent, environment.skyrl_gym.sandbox_tier)
        agent(AgentCall(task={}, url="http://127.0.0.1:1", key="", model=""))
    _, files = sandbox.call_args.args
    (_, _, limits) = sandbox.return_value.run_command.call_args.args
    return [file.name for file in files], limits.memory_bytes


def by(name: str, **more: Any) -> dict[str, Any]:
    """A run that this agent plays."""
    return {f"{A}function": f"tests.rollout.agents:{name}", f"{A}reward": "returned", **more}


ISOLATED: dict[str, Any] = {f"{A}command": ["true"], f"{A}isolate": True}

PROBES: tuple[Probe, ...] = (
    Probe(f"{A}function", "tests.rollout.agents:wants_heat", played),
    Probe(f"{A}command", ["true"], played),
    Probe(f"{A}reward", "environment", played, by("wants_heat")),
    Probe(f"{A}max_requests", 2, played, by("never_stops")),
    Probe(f"{A}max_concurrent", 2, limits, by("wants_heat")),
    Probe(f"{A}max_starts_per_second", 2.0, starts, by("wants_heat")),
    Probe(f"{A}kwargs", {"pays": 0.5}, played, by("pays")),
    Probe(f"{A}timeout_seconds", 5.0, limits, by("wants_heat")),
    Probe(f"{A}isolate", True, written, {f"{A}command": ["true"], f"{A}reward": "returned"}),
    Probe(f"{A}readable", ["{nano}/model"], kept_apart, ISOLATED),
    Probe(f"{A}memory_gb", 2.0, kept_apart, ISOLATED),
)

"""Probes of `environment.agent`: who plays an episode, what it pays, and how long agents may run."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

from skyrl.rollout.agent_runner import AgentRunner
from tests.effects.probe import Probe, Scene, observable
from tests.rollout.agent_episodes import scripted

A = "environment.agent."


@observable("the episode that the agent plays, and its reward")
def played(scene: Scene) -> object:
    agent = scene.run.environment.agent
    if not agent.plays:
        return None
    made, _ = asyncio.run(scripted(["3"] * 80, agent))
    return made.reward, made.answer, sum(made.loss_mask), made.metrics, [each.reason for each in made.failures]


@observable("how many agents run at a time, and how long each")
def limits(scene: Scene) -> object:
    with mock.patch("skyrl.rollout.agent_runner.EnvCalls") as calls:
        AgentRunner(scene.run.environment.agent, lambda: None, "policy")
    return calls.call_args


def by(name: str, **more: Any) -> dict[str, Any]:
    """A run that this agent plays."""
    return {f"{A}function": f"tests.rollout.agents:{name}", f"{A}reward": "returned", **more}


PROBES: tuple[Probe, ...] = (
    Probe(f"{A}function", "tests.rollout.agents:wants_heat", played),
    Probe(f"{A}command", ["true"], played),
    Probe(f"{A}reward", "environment", played, by("wants_heat")),
    Probe(f"{A}max_requests", 2, played, by("never_stops")),
    Probe(f"{A}max_concurrent", 2, limits, by("wants_heat")),
    Probe(f"{A}timeout_seconds", 5.0, limits, by("wants_heat")),
)

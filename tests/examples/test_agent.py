from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skyrl.config import compose
from skyrl.config.settings.environment import AgentConfig
from tests.rollout.agent_episodes import scripted

AGENT = Path(__file__).parents[2] / "examples" / "agent"
CALL = '<tool_call>{{"name": "look", "arguments": {{"shelf": "{}"}}}}</tool_call>'


def test_the_agent_imports_nothing_of_skyrl() -> None:
    assert "skyrl" not in (AGENT / "agent.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("texts", "reward", "requests"),
    [
        ([CALL.format("b"), "7"], 1.0, 2),
        ([CALL.format("a"), CALL.format("b"), "7"], 1.0, 3),
        ([CALL.format("a"), "3"], 0.0, 2),
        ([CALL.format("b")] * 3, 0.0, 3),
    ],
)
def test_agent_is_rewarded_for_shelf_answer(texts: list[str], reward: float, requests: int) -> None:
    config = AgentConfig(function=f"{AGENT}/agent.py:solve", reward="returned")
    row = {"extra_info": {"shelf": "b"}, "reward_spec": {"ground_truth": "7"}}
    trajectory, script = asyncio.run(scripted(texts, config, extras=row))
    assert (trajectory.failures, trajectory.reward, len(script.requests)) == ((), reward, requests)
    assert ("7" in script.tokenizer.decode(trajectory.response_ids)) == (CALL.format("b") in texts)


def test_the_configuration_runs_without_a_warning() -> None:
    assert not compose([str(AGENT / "grpo.toml")], [], strict=True).warnings

"""The example of MCP tools: its server is called in a rollout, and a run that resumes has the tools that it had."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, compose
from skyrl.config.settings.environment import McpEnvConfig, McpServerConfig, SkyRLGymConfig
from skyrl.envs.mcp import environment
from skyrl.errors import ResumeError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.starter.tiny_chat import TOOL_TEMPLATE
from skyrl.tree.imports import import_object
from tests.examples.test_search import overrides
from tests.rollout.chats import Says, chat_tokenizer, generator, play, prompt

MCP = Path(__file__).parents[2] / "examples" / "mcp"
LINES = Path(__file__).parents[1] / "envs" / "mcp_servers" / "lines.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with two supervised steps instead of 400 and fewer rows."""
    monkeypatch.syspath_prepend(str(MCP))
    module = sys.modules[import_object(f"{MCP}/train.py:main").__module__]
    for name, value in {"STEPS": 2, "TRAIN_ROWS": 16, "VALIDATION_ROWS": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.long
async def test_its_worked_conversation_is_the_one_that_the_server_has(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "LOOKS", 1.0)
    _, user, call, result, answer = example.conversation(example.seeded(0))
    server = McpServerConfig(command=(sys.executable, str(MCP / "digits_server.py")))
    gym = SkyRLGymConfig(mcp=McpEnvConfig(servers=(server,), reward=f"{MCP / 'reward.py'}:exact"))
    tokenizer = chat_tokenizer(TOOL_TEMPLATE.replace("<|end|>", "<|im_end|>"))
    engine = Says(tokenizer, [f"{turn['content']}<|im_end|>" for turn in (call, answer)])
    row = {"reward_spec": {"ground_truth": result["content"]}}
    (group,) = await play(generator(engine, tokenizer, gym), prompt(tokenizer, "mcp", user["content"], **row))
    (played,) = group.trajectories
    assert "<|system|>look" in tokenizer.decode(played.prompt_ids)
    assert f"<|tool|>{result['content']}<|im_end|>" in tokenizer.decode(played.response_ids)
    assert (played.reward, played.failures) == (1.0, ())
    assert played.metrics["tool_calls"] == 1.0


def test_the_file_has_no_setting_without_effect() -> None:
    assert not compose([str(MCP / "grpo.toml")], [], strict=True).warnings


@pytest.mark.long
def test_two_steps_are_trained_and_other_tools_are_refused_on_resume(example: ModuleType, tmp_path: Path) -> None:
    base, run, server = tmp_path / "base", tmp_path / "run", tmp_path / "server.py"
    base.mkdir()
    example.make(base)
    server.write_text(LINES.read_text())
    settings = {
        "environment.skyrl_gym.mcp.servers": [{"command": [sys.executable, str(server), "chatter"]}],
        "trainer.ckpt_interval": 1,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
    }

    def until(step: int) -> SkyRLTrainConfig:
        values: dict[str, Any] = {**overrides(base, run), **settings, "trainer.max_training_steps": step}
        environment._offered.cache_clear()  # another session asks again
        return compose([str(MCP / "grpo.toml")], values).config

    BasePPOExp(until(1)).run()
    server.write_text(LINES.read_text().replace('"one", "two"', '"one", "three"'))
    with pytest.raises(ResumeError, match=r"environment.skyrl_gym.mcp.servers: tools has changed"):
        BasePPOExp(until(2)).run()
    server.write_text(LINES.read_text())
    BasePPOExp(until(2)).run()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"]]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(line["environment/servers_lost"] == 0 and line["rollout/failures"] == 0 for line in trained)

"""The adapter against a stand-in for `verifiers.v1` (0.4), whose dependencies do not fit beside vLLM's.

The stand-in has the names and fields that the adapter touches, and keeps rewards and metrics as the package does;
`verifiers_live.py` runs the same task in the package itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from skyrl.envs.verifiers_task import VerifiersTaskEnv, messages_of, write_rows
from skyrl.errors import TaskError


class Trace(SimpleNamespace):
    def __init__(self, **fields: Any) -> None:
        super().__init__(rewards={}, metrics={}, **fields)

    @property
    def last_reply(self) -> str:
        return str(self.nodes[-1].message.content).strip()

    @property
    def num_turns(self) -> int:
        return sum(node.sampled for node in self.nodes)

    @property
    def reward(self) -> float:
        return float(sum(reward.score * reward.weight for reward in self.rewards.values() if reward is not None))


class Sum:
    """As `verifiers_live.py` has it, scored as `Task.score` does."""

    NEEDS_CONTAINER = False
    key = hash = "k"
    config = None

    def __init__(self, prompt: Any = "2+2?", system_prompt: str | None = "Only the number.") -> None:
        self.data = SimpleNamespace(prompt=prompt, system_prompt=system_prompt, idx=0)

    def hooks(self, kind: str) -> list[Callable[..., Any]]:
        return [self.right] if kind == "reward" else [self.turns]

    def plugged_judges(self) -> list[Any]:
        return []

    def toolsets(self, config: Any) -> list[Any]:
        return []

    async def right(self, trace: Trace) -> float:
        return float(trace.last_reply == "4")

    async def turns(self, trace: Trace) -> float:
        return float(trace.num_turns)

    async def score(self, trace: Trace) -> None:
        trace.metrics["turns"] = await self.turns(trace)
        trace.rewards["right"] = SimpleNamespace(score=await self.right(trace), weight=2.0)
        trace.rewards["skipped"] = None


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    v1: Any = ModuleType("verifiers.v1")
    for name in ("SystemMessage", "UserMessage", "AssistantMessage", "MessageNode", "TraceTask", "AgentInfo"):
        setattr(v1, name, SimpleNamespace)
    v1.AgentConfig, v1.Trace = SimpleNamespace, Trace
    root: Any = ModuleType("verifiers")
    root.v1 = v1
    monkeypatch.setitem(sys.modules, "verifiers", root)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)


@pytest.mark.parametrize(("answer", "reward"), [(" 4\n", 2.0), ("5", 0.0)])
def test_a_task_of_verifiers_scores_an_answer_by_its_weighted_rewards(answer: str, reward: float) -> None:
    env = VerifiersTaskEnv({}, Sum())
    messages, _ = env.init(())
    assert messages == (
        {"role": "system", "content": "Only the number."},
        {"role": "user", "content": "2+2?"},
    )
    step = env.step(answer)
    assert (step.reward, step.done, step.components) == (reward, True, {"right": reward / 2})
    assert env.get_metrics() == {"turns": 1.0}


def test_a_task_without_a_prompt_takes_the_rows(tmp_path: Path) -> None:
    prompt = ({"role": "user", "content": "2+2?"},)
    assert VerifiersTaskEnv({}, Sum(prompt=None, system_prompt=None)).init(prompt)[0] == prompt


def test_rows_name_the_place_of_their_task(tmp_path: Path) -> None:
    write_rows([Sum(), Sum()], tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert rows[0]["prompt"][1] == {"role": "user", "content": "2+2?"}


def test_a_prompt_that_is_not_text_is_refused() -> None:
    image = SimpleNamespace(role="user", content=[{"type": "image_url"}])
    with pytest.raises(TaskError, match="not text"):
        messages_of(Sum(prompt=[image]))


def test_a_task_that_needs_more_than_an_answer_is_refused() -> None:
    class Boxed(Sum):
        NEEDS_CONTAINER = True

        def toolsets(self, config: Any) -> list[Any]:
            return ["server"]

        async def right(self, trace: Trace, runtime: Any = None) -> float:
            return 1.0

        async def turns(self, trace: Trace, *, runtime: Any) -> float:  # type: ignore[override]  # any trace
            return 1.0

    with pytest.raises(
        TaskError, match="Boxed of verifiers needs a container and tool servers and a runtime for turns"
    ):
        VerifiersTaskEnv({}, Boxed())

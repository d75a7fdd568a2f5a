"""300 answers to each environment of SkyRL-Gym and what it rewards them with, as numbers in a table."""

from __future__ import annotations

import json
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from skyrl.config.settings.environment import SkyRLGymConfig, Text2SQLEnvConfig
from skyrl.envs import find_env
from skyrl.envs.http_json import ServiceReply
from skyrl.errors import TaskError

TABLE = Path(__file__).parents[1] / "reference" / "skyrl_answers.json"
BETTER = {
    "nested braces": "a box ends at its own brace: SkyRL reads \\boxed{\\frac{1}{2}} as \\frac{1",
    "only what the policy wrote": "a number in a document or in what a program printed is no answer of the policy's",
    "broken gold query": "the row is at fault, and its sample a failure: SkyRL counts a wrong answer",
    "failed exit": "a program that ends with an error failed, as in contests; SkyRL takes sys.exit(1) for success",
    "standard input has a buffer": "sys.stdin.buffer is there, as in any process; SkyRL's replacement has none",
    "imports from the future": "`from __future__` is the program's first line; SkyRL puts its own imports before it",
    "tolerance": "numbers with a fraction may differ by 1e-6, as in contests; SkyRL compares every digit",
    "spaces after the language": "an opening fence may end in spaces; SkyRL finds no program behind it",
}
"""Why an answer is not rewarded as there."""


@cache
def table() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return read


@pytest.fixture
def gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SkyRLGymConfig:
    """Settings, with the database of the table and a retriever that finds its document."""
    file = tmp_path / "databases" / "shop" / "shop.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as connection:
        for statement in table()["setup"]:
            connection.execute(statement)
    connection.close()
    for folder in (file.parents[1], file.parent):
        folder.chmod(0o755)
    reply = ServiceReply(value=f"Doc 1: {table()['found']}", retries=0)
    monkeypatch.setattr("skyrl.envs.registry.ask_retriever", lambda *_, patience: reply)
    return SkyRLGymConfig(text2sql=Text2SQLEnvConfig(db_path=str(file.parents[1])))


def differences(name: str, gym: SkyRLGymConfig, cases: list[dict[str, Any]]) -> list[str]:
    """Cases whose rewards are not those of the table."""
    wrong = []
    for case in cases:
        truth = table()["tests"][case["truth"]] if name == "lcb" else case["truth"]
        spec = {"reward_spec": {"ground_truth": truth}, "max_turns": case["turns"], "db_id": "shop"}
        expected = case.get("ours", case["rewards"])
        rewards, done = rewards_of(name, gym, spec, case["said"])
        if rewards != expected or done is not case.get("done", True):
            wrong.append(f"{name} {spec} {case['said']}: {rewards} (done: {done}) instead of {expected}")
    return wrong


def rewards_of(
    name: str, gym: SkyRLGymConfig, extras: dict[str, Any], actions: list[str]
) -> tuple[list[float] | None, bool]:
    """Turn by turn, to the end of the episode; None where the row is refused."""
    env = find_env(name, gym)(extras)
    rewards: list[float] = []
    try:
        for action in actions:
            step = env.step(action)
            rewards.append(float(step.reward))
            if step.done:
                return rewards, True
    except TaskError:
        return None, True
    return rewards, False


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn", "multiply", "search", "searchcode"])
def test_three_hundred_answers_are_rewarded_as_in_skyrl(name: str, gym: SkyRLGymConfig) -> None:
    cases = table()["cases"][name]
    assert len(cases) == 300
    assert differences(name, gym, cases) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["text2sql", "lcb"])
def test_some_answers_that_are_run_are_rewarded_as_in_skyrl(name: str, gym: SkyRLGymConfig) -> None:
    """Every fifteenth, and one that differs for each reason."""
    cases = table()["cases"][name]
    reasons = {case["why"]: case for case in cases if "why" in case}
    assert differences(name, gym, [*cases[::15], *reasons.values()]) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["text2sql", "lcb"])
def test_three_hundred_answers_that_are_run_are_rewarded_as_in_skyrl(name: str, gym: SkyRLGymConfig) -> None:
    cases = table()["cases"][name]
    assert len(cases) == 300
    assert differences(name, gym, cases) == []


def test_every_difference_has_its_reason_and_every_reason_a_difference() -> None:
    differing = [case for cases in table()["cases"].values() for case in cases if "ours" in case]
    assert {case["why"] for case in differing} == set(BETTER)
    assert all(case["ours"] != case["rewards"] for case in differing)

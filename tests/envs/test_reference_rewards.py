"""The reward rules of the environments on the cases of the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl.envs import aime, search, text2sql
from skyrl.envs.registry import find_env

Case = dict[str, Any]


def answer(case: Case) -> str:
    inputs = case["inputs"]
    return str(inputs.get("action", inputs.get("response")))


def of_aime(case: Case) -> Any:
    env = find_env("aime")({"reward_model": {"ground_truth": case["inputs"]["ground_truth"]}})
    return {"reward": env.step(answer(case)).reward, "pred": aime.prediction(answer(case))}


def of_gsm8k(case: Case) -> Any:
    env = find_env("gsm8k")({"reward_spec": {"ground_truth": case["inputs"]["ground_truth"]}})
    return {"reward": env.step(answer(case)).reward}


def of_search(case: Case) -> Any:
    right = search.targets(case["inputs"]["ground_truth"])
    return {"reward": search.score(case["inputs"]["chat_concat"], right)}


def of_text2sql(case: Case) -> Any:
    found = text2sql.solution(case["inputs"]["output"])
    return {"valid": found is not None, "solution": found}


RULES: dict[str, Callable[[Case], Any]] = {
    "env_reward:aime": of_aime,
    "env_reward:gsm8k": of_gsm8k,
    "env_reward:gsm8k(strict)": of_gsm8k,
    "env_reward:search(em)": of_search,
    "env_format:text2sql": of_text2sql,
}


def test_every_case_of_an_environment_has_its_rule(reference: Path) -> None:
    cases = json.loads((reference / "algorithm_cases.json").read_text(encoding="utf-8"))["cases"]
    assert {case["function"] for case in cases if case["function"].startswith("env_")} <= set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_rewards_are_those_of_the_reference(reference: Path, rule: str) -> None:
    cases = json.loads((reference / "algorithm_cases.json").read_text(encoding="utf-8"))["cases"]
    own = [case for case in cases if case["function"] == rule]
    assert own
    for case in own:
        expected = dict(case["expected"])
        expected.setdefault("reward", expected.get("score"))
        for name, value in RULES[rule](case).items():
            if name in case["expected"] or (name == "reward" and "score" in case["expected"]):
                assert value == expected[name], case["id"]

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from skyrl.config import compose
from skyrl.config.settings.environment import Text2SQLEnvConfig
from skyrl.envs.text2sql import Text2SQLEnv
from skyrl.experiments.ppo import BasePPOExp
from skyrl.sandbox.sandbox import shared_sandbox
from skyrl.tree.imports import import_object
from tests.examples.test_search import overrides

TEXT2SQL = Path(__file__).parents[2] / "examples" / "text2sql"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with two supervised steps instead of 300 and fewer rows."""
    module = sys.modules[import_object(f"{TEXT2SQL}/train.py:main").__module__]
    for name, value in {"STEPS": 2, "TRAIN_ROWS": 16, "VALIDATION_ROWS": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_the_worked_conversations_are_those_that_the_environment_has(example: ModuleType, tmp_path: Path) -> None:
    """Its observation, word for word, and a reward of 1 for who looks."""
    example.make_data(tmp_path, random.Random(0))
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[1])
    env = Text2SQLEnv(
        {**row, "max_turns": 2},
        Text2SQLEnvConfig(db_path=str(tmp_path / "databases")),
        shared_sandbox("auto", (tmp_path / "databases",)),
    )
    rng = random.Random(0)
    worked = next(talk for talk in iter(lambda: example.conversation(rng), None) if len(talk) == 4)
    step = env.step(worked[1]["content"])
    (seen,) = step.observations
    before, after = worked[2]["content"].split(worked[2]["content"].split("\n")[3])
    assert seen["content"].startswith(before)
    assert seen["content"].endswith(after)
    assert env.step(f"<think>so</think><solution>{row['reward_spec']['ground_truth']}</solution>").reward == 1.0


def test_a_fruit_in_another_spelling_is_not_found(example: ModuleType, tmp_path: Path) -> None:
    example.make_data(tmp_path, random.Random(0))
    row = json.loads((tmp_path / "validation.jsonl").read_text().splitlines()[1])
    settings = Text2SQLEnvConfig(db_path=str(tmp_path / "databases"))
    wrong = example.query("plum", capitals="plum" in row["reward_spec"]["ground_truth"])
    env = Text2SQLEnv({**row, "max_turns": 2}, settings, shared_sandbox("auto", (tmp_path / "databases",)))
    assert env.step(f"<think>so</think><solution>{wrong}</solution>").reward == 0.0


def test_the_file_has_no_setting_without_effect() -> None:
    assert not compose([str(TEXT2SQL / "grpo.toml")], [], strict=True).warnings


@pytest.mark.long
def test_two_steps_are_trained(example: ModuleType, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    base.mkdir()
    example.make(base)
    values = overrides(base, run) | {
        "environment.skyrl_gym.text2sql.db_path": str(base / "databases"),
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "generator.n_samples_per_prompt": 2,
    }
    BasePPOExp(compose([str(TEXT2SQL / "grpo.toml")], values).config).run()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"]]
    assert [line["step"] for line in trained] == [1, 2]
    assert all("policy/final_loss" in line and line["rollout/failures"] == 0 for line in trained)

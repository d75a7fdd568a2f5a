"""Recipes of `tinker-cookbook`, unmodified, against `skyrl serve-training`: they learn.

The commands are those of docs/training-service.md. Each change has to be half of the one that the page reports.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import tinker
from attrs import frozen

from tests.other_environments import ROOT, python_with
from tests.training_service.running import KEY
from tests.training_service.test_whole_service import service

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("recipes")]

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""Name of the model in `examples/tinker/cookbook.py`, from which the recipes know the chat format."""


def commands() -> list[str]:
    """The commands of the page that runs recipes, each in a line."""
    page = (ROOT / "docs" / "training-service.md").read_text(encoding="utf-8")
    block = next(part for part in page.split("```") if "tinker_cookbook" in part)
    return block.replace("\\\n", " ").splitlines()


@frozen
class Recipes:
    """A running service and the folder in which recipes run."""

    python: str
    url: str
    folder: Path

    def run(self, recipe: str, *before: str) -> list[dict[str, Any]]:
        """The lines that a recipe wrote into its metrics, in order. `before` are beginnings of other commands."""
        prefixes = ("model=", *before, f"python -m tinker_cookbook.recipes.{recipe} ")
        script = [command for command in commands() if command.startswith(prefixes)]
        assert len(script) == len(prefixes)
        environ = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(self.python).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(Path(tinker.__file__).parents[1]),  # the client and transformers of this environment
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": KEY,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hub"),
            "OMP_NUM_THREADS": "1",
        }
        call = ["bash", "-ec", "\n".join(script)]
        result = subprocess.run(call, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-4000:]
        log = next(word for word in shlex.split(script[-1]) if word.startswith("log_path=")).partition("=")[2]
        metrics = (self.folder / log / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in metrics.splitlines()]


def values(lines: list[dict[str, Any]], name: str) -> list[float]:
    """A metric at the steps that have it."""
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipes]:
    [packages] = [command.split()[2:] for command in commands() if command.startswith("pip install --no-deps")]
    python = python_with("cookbook", packages)
    folder = tmp_path_factory.mktemp("recipes") / "cookbook"
    command = [sys.executable, "examples/tinker/cookbook.py", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    changes = [f"trainer.policy.model.path={folder / MODEL}", "trainer.max_prompt_length=256"]
    changes += [f"generator.inference_engine.served_model_name={MODEL}"]
    changes += ["generator.sampling_params.max_generate_length=64"]
    with service(folder.parent / "service", folder, *changes) as (url, _):
        yield Recipes(python, url, folder)


@pytest.fixture(scope="module")
def chats(recipes: Recipes) -> list[dict[str, Any]]:
    """What supervised training on chats wrote; distillation learns from its model."""
    return recipes.run("chat_sl.train")


def test_supervised_training_on_chats_learns(chats: list[dict[str, Any]]) -> None:
    losses = values(chats, "test/nll")
    print("chat_sl.train, test loss per token:", losses)
    assert losses[0] - losses[-1] > (0.280 - 0.111) / 2


def test_reinforcement_learning_on_arithmetic_learns(recipes: Recipes) -> None:
    rewards = values(recipes.run("rl_loop"), "reward/total")
    print("rl_loop, mean reward:", rewards)
    assert fmean(rewards[-2:]) - fmean(rewards[:2]) > (0.73 - 0.44) / 2


def test_preferring_the_shorter_answer_shortens_answers(recipes: Recipes) -> None:
    tokens = values(recipes.run("preference.shorter.train"), "env/all/ac_tokens_per_turn")
    print("preference.shorter.train, tokens of an answer:", tokens)
    assert tokens[0] - tokens[-1] > (4.9 - 2.2) / 2


@pytest.mark.usefixtures("chats")
def test_on_policy_distillation_approaches_its_teacher(recipes: Recipes) -> None:
    lines = recipes.run("distillation.on_policy_distillation", "teacher=")
    divergences = values(lines, "teacher_kl")
    print("on_policy_distillation, divergence from the teacher:", divergences)
    assert fmean(divergences[:2]) - fmean(divergences[-3:]) > (0.280 - 0.037) / 2

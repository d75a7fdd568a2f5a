"""Recipes of `tinker-cookbook`, unmodified, against the command: they learn what they teach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.other_environments import ROOT, python_with
from tests.training_service.running import KEY
from tests.training_service.test_whole_service import service

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("recipes")]

PACKAGES = (
    *("--no-deps", "tinker==0.38.0", "tinker-cookbook==0.6.1"),
    *("blobfile", "chz", "cloudpickle", "distro", "h2", "hpack", "hyperframe", "lxml"),
    *("math-verify", "orjson", "pycryptodomex", "pylatexenc", "pyqwest"),
    *("pyrage", "sympy", "termcolor", "tml-renderers", "zstandard"),
)
"""What the recipes import beyond this environment, which has the rest of their dependencies."""

MODEL = "Qwen/Qwen3-4B-Instruct-2507"


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter with the cookbook on top of this environment."""
    try:
        found = python_with("cookbook", PACKAGES)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the package index lacks tinker-cookbook: {error}")
    [packages] = Path(found).parents[1].glob("lib/python*/site-packages")
    (packages / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the recipes run."""
    made = tmp_path_factory.mktemp("recipes") / "cookbook"
    command = [sys.executable, "examples/tinker/cookbook.py", "--out", str(made)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return made


@pytest.fixture(scope="module")
def url(folder: Path, nano: Path) -> Iterator[str]:
    """The address of a service with the model of the folder."""
    changes = (f"trainer.policy.model.path={folder / MODEL}", "trainer.max_prompt_length=256")
    named = f"generator.inference_engine.served_model_name={MODEL}"
    with service(folder.parent / "service", nano, *changes, named) as (address, _):
        yield address


def run(python: str, folder: Path, url: str, recipe: str, *arguments: str) -> Sequence[dict[str, float]]:
    """The numbers that a recipe logs, one row for each step."""
    out = folder.parent / recipe
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", f"log_path={out}", *arguments],
        cwd=folder,
        env=os.environ | offline | {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def column(rows: Sequence[dict[str, float]], name: str) -> list[float]:
    """The values of a number, in the steps that have it."""
    return [row[name] for row in rows if name in row]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


RECIPE_ARGUMENTS = {
    "chat_sl.train": "dataset=no_robots batch_size=32 learning_rate=2e-3 lora_rank=16 max_length=256 eval_every=4",
    "rl_loop": "batch_size=16 group_size=8 learning_rate=2e-3 lora_rank=16 max_tokens=8 save_every=0 max_steps=12 "
    "loss_fn=importance_sampling",
    "preference.shorter.train": "renderer_name=qwen3_instruct batch_size=8 group_size=8 learning_rate=2e-3 "
    "max_tokens=16 max_steps=8",
    "distillation.on_policy_distillation": "dataset=deepmath renderer_name=qwen3_instruct group_size=4 "
    "groups_per_batch=16 learning_rate=2e-3 lora_rank=16 max_tokens=16 max_steps=10",
}


def test_supervised_chat_and_distillation_of_what_it_learned(python: str, folder: Path, url: str) -> None:
    rows = run(python, folder, url, "chat_sl.train", *RECIPE_ARGUMENTS["chat_sl.train"].split())
    losses = column(rows, "test/nll")
    assert losses[-1] < losses[0] / 2
    kept = (folder.parent / "chat_sl.train" / "checkpoints.jsonl").read_text().splitlines()[-1]
    teacher = (f"teacher_model={MODEL}", f"teacher_checkpoint={json.loads(kept)['sampler_path']}")
    recipe = "distillation.on_policy_distillation"
    far = column(run(python, folder, url, recipe, *RECIPE_ARGUMENTS[recipe].split(), *teacher), "teacher_kl")
    assert far[-1] < far[0] / 2


def test_rl_loop_learns_sums(python: str, folder: Path, url: str) -> None:
    rewards = column(run(python, folder, url, "rl_loop", *RECIPE_ARGUMENTS["rl_loop"].split()), "reward/total")
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.3


def test_shorter_answers_win(python: str, folder: Path, url: str) -> None:
    recipe = "preference.shorter.train"
    lengths = column(run(python, folder, url, recipe, *RECIPE_ARGUMENTS[recipe].split()), "env/all/ac_tokens_per_turn")
    assert mean(lengths[-2:]) < mean(lengths[:2]) / 1.5

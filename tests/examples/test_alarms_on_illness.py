"""The default alarms on trainings of the quick start: raised where a training is ill, silent where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

REWARDS = '''
def longer(completion, ground_truth, **columns):
    return len(completion) / 10

def leaking(completion, ground_truth, extra_info, **columns):
    """Training rows are paid for the wrong order, so that their reward says nothing of the task."""
    wrong = ground_truth[::-1] if extra_info["split"] == "train" else ground_truth
    return float(completion.strip() == wrong)
'''

ILL: dict[str, tuple[str, dict[str, Any]]] = {
    "a learning rate times 100": (
        "kl_blow_up",
        {"trainer.policy.optimizer_config.lr": 2e-2, "trainer.algorithm.use_kl_loss": True},
    ),
    "a learning rate times 100, and no KL term": (
        "reward_collapse",
        {"trainer.policy.optimizer_config.lr": 2e-2},
    ),
    "a reward for length": (
        "length_explosion",
        {
            "environment.env_class": "{out}/rewards.py:longer",
            "generator.sampling_params.max_generate_length": 48,
            "trainer.policy.optimizer_config.lr": 1e-3,
        },
    ),
    "a leaking reward": (
        "evaluation_falls",
        {"environment.env_class": "{out}/rewards.py:leaking"},
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model and data, and rewards that make its training ill."""
    out = tmp_path_factory.mktemp("base")
    run_python("examples/quickstart/prepare.py", "--out", str(out / "base"))
    (out / "rewards.py").write_text(REWARDS)
    return out


def run_python(*arguments: str) -> None:
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def raised(base: Path, out: Path, changes: dict[str, Any]) -> set[str]:
    """Names of the alarms that a training raises, but for the one of its speed, which the machine decides."""
    values = {
        "data.train_data": json.dumps([f"{base}/base/train.parquet"]),
        "data.val_data": json.dumps([f"{base}/base/validation.parquet"]),
        "environment.env_class": f"{ROOT}/examples/quickstart/reward.py:sorted_exactly",
        "trainer.policy.model.path": f"{base}/base/model",
        "trainer.run_path": str(out),
        **{path: str(value).format(out=base) for path, value in changes.items()},
    }
    words = [f"{path}={value}" for path, value in values.items()]
    run_python("-m", "skyrl.cli", "run", "examples/quickstart/grpo.toml", *words)
    file = out / "alarms.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {json.loads(line)["name"] for line in lines} - {"throughput_halved"}


@pytest.mark.long
@pytest.mark.parametrize("illness", ILL)
def test_an_ill_training_raises_the_alarm_for_its_illness(base: Path, tmp_path: Path, illness: str) -> None:
    alarm, changes = ILL[illness]
    assert alarm in raised(base, tmp_path / "run", {"trainer.max_training_steps": 40, **changes})


@pytest.mark.long
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_the_quick_start_raises_none(base: Path, tmp_path: Path, seed: int) -> None:
    assert raised(base, tmp_path / "run", {"trainer.seed": seed}) == set()

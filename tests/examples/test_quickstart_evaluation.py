"""`skyrl eval` of the quick start's model on every engine, beside what its training found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("quickstart_evaluation")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared model, and the first 20 steps of the quick start with greedy evaluation, in a folder."""
    out = tmp_path_factory.mktemp("quickstart")
    _python("examples/quickstart/prepare.py", "--out", str(out / "base"))
    _python("-m", "skyrl.cli", "run", *words(out), "trainer.max_training_steps=20")
    return out


def words(out: Path) -> list[str]:
    return [
        str(ROOT / "examples" / "quickstart" / "grpo.toml"),
        f'data.train_data=["{out}/base/train.parquet"]',
        f'data.val_data=["{out}/base/validation.parquet"]',
        f"environment.env_class={ROOT}/examples/quickstart/reward.py:sorted_exactly",
        f"trainer.policy.model.path={out}/base/model",
        f"trainer.run_path={out}/run",
        "generator.eval_sampling_params.temperature=0.0",
    ]


def _python(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def evaluated(out: Path, *overrides: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(
        _python("-m", "skyrl.cli", "eval", str(out / "run"), *words(out), *overrides, "--json")
    )["result"]
    assert results["prompts"]["all"] == 256
    metrics: dict[str, Any] = results["metrics"]
    return metrics


def of_training(out: Path) -> dict[str, Any]:
    lines = (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {name: value for name, value in json.loads(lines[-1]).items() if name.startswith("eval/")}


@pytest.mark.long
def test_the_embedded_engine_gives_exactly_the_scores_of_training(quickstart: Path) -> None:
    before, after = evaluated(quickstart), of_training(quickstart)
    assert 0.05 < after["eval/all/accuracy"] < 1.0, "an evaluation that could not differ would show nothing"
    assert before == after


@pytest.mark.long
@pytest.mark.parametrize(
    "engine",
    [
        ("trainer.placement.executor=ray", "trainer.placement.colocate_all=false"),
        ("generator.inference_engine.backend=vllm",),
        ("generator.inference_engine.backend=vllm", "trainer.placement.executor=ray"),
    ],
    ids=["Ray", "vLLM", "vLLM on Ray"],
)
def test_other_engines_are_at_most_two_answers_off(quickstart: Path, engine: tuple[str, ...]) -> None:
    accuracy = evaluated(quickstart, *engine)["eval/all/accuracy"]
    assert abs(accuracy - of_training(quickstart)["eval/all/accuracy"]) <= 2 / 256

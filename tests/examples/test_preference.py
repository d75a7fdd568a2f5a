"""The program that makes pairs of the samples of an evaluation, for rounds of iterated DPO."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.config import load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "preference"


def sample(prompt: int, answer: str, reward: float) -> dict[str, object]:
    chat = [{"role": "user", "content": f"sort: {prompt}"}]
    return {"prompt_id": f"0:{prompt}", "prompt": chat, "response": f"{answer}<|end|>", "reward": reward}


def test_the_best_answer_of_a_prompt_is_paired_with_its_worst(tmp_path: Path) -> None:
    samples = [sample(0, "b", 0.5), sample(0, "a", 1.0), sample(1, "c", 1.0), sample(0, "d", 0.0), sample(1, "e", 1.0)]
    file, pairs = tmp_path / "sort.jsonl", tmp_path / "round" / "pairs.jsonl"
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    program = [sys.executable, str(EXAMPLE / "pairs_from_samples.py"), str(file), str(pairs)]
    output = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    [row] = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    assert row == {"prompt": [{"role": "user", "content": "sort: 0"}], "chosen": "a", "rejected": "d"}
    assert output == "1 pairs of 2 prompts\n"


def test_the_online_example_is_the_quick_start_with_pairs_in_place_of_advantages() -> None:
    online = load([EXAMPLE / "online.toml"], environ={}).config
    assert online.trainer.algorithm.policy_loss_type == "online_dpo"
    assert online.trainer.train_batch_size == 16 and online.generator.n_samples_per_prompt == 8


@pytest.mark.long
def test_two_rounds_of_the_readme_raise_the_score(tmp_path: Path) -> None:
    """The commands as they are written, on a copy of the quick start's data."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    blocks = page.split("```\n")[1::2]
    [rounds] = [block for block in blocks if "pairs_from_samples.py" in block]
    output = ""
    for line in [*blocks[0].splitlines()[:2], *rounds.replace("\\\n", "").splitlines()]:
        if line:
            output += succeeds(line, tmp_path)
    scores = [score_of(tmp_path / "runs" / name) for name in ("round-1/samples", "round-2/samples", "round-2/after")]
    assert scores[0] < 0.2 < scores[1] < scores[2], output


def succeeds(line: str, folder: Path) -> str:
    """Output of a command, in `folder`."""
    program, *words = shlex.split(line)
    command = {"python": [sys.executable], "skyrl": [sys.executable, "-m", "skyrl.cli"]}[program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def score_of(folder: Path) -> float:
    score: float = json.loads((folder / "results.json").read_text(encoding="utf-8"))["metrics"]["eval/all/avg_score"]
    return score

"""examples/gsm8k: its files are runs that fit, its page says their memory, its data are what the environment reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import compose
from skyrl.data.makers import gsm8k_rows
from skyrl.envs.registry import find_env
from skyrl.errors import DataError

FOLDER = Path(__file__).parents[2] / "examples" / "gsm8k"
FILES = sorted(FOLDER.glob("qwen*.toml"))
PHASES = ("generation", "scoring", "update", "transfer")


def planned(file: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["plan", str(file), "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)["result"]
    return report


def row_of(file: Path) -> str:
    """The row of the page's table: GiB of the fullest model in each phase, and on the host."""
    memory = planned(file)["memory"]
    run = compose([str(file)]).config
    most = [max(usage["bytes"] for usage in memory["phases"] if usage["name"] == phase) for phase in PHASES]
    assert memory["fits"]
    host = max(usage["host"] for usage in memory["phases"])
    numbers = " | ".join(f"{number / 2**30:.1f}" for number in (*most, host))
    return f"| [{file.name}]({file.name}) | {run.trainer.placement.policy_num_gpus_per_node} | {numbers} |"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_is_a_run_without_a_warning(file: Path) -> None:
    composed = compose([str(file)])
    assert composed.warnings == ()
    assert composed.config.generator.inference_engine.backend == "vllm"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_says_the_memory_that_the_plan_estimates(file: Path) -> None:
    assert row_of(file) in (FOLDER / "README.md").read_text()


def test_both_models_have_adapters_and_all_weights_on_one_gpu_or_eight() -> None:
    runs = [compose([str(file)]).config.trainer for file in FILES]
    variants = {
        (run.policy.model.path, run.placement.policy_num_gpus_per_node, run.policy.model.lora.rank) for run in runs
    }
    small, large = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
    assert variants == {(small, 1, 0), (small, 1, 32), (small, 8, 0), (large, 1, 32), (large, 8, 0), (large, 8, 32)}


def test_a_file_of_the_hubs_form_becomes_prompts(tmp_path: Path) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "One and one.\n#### 1,002"}) + "\n")
    words = ["data", "make", "gsm8k", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(cli, [*words, "--source", f"train={source}", "--source", f"test={source}"])
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["result"]["files"].values()) == [1, 1]
    [row] = map(json.loads, (tmp_path / "out" / "train.jsonl").read_text().splitlines())
    assert row["reward_spec"] == {"ground_truth": "1002"}
    assert re.search(r"1 \+ 1\?.*####", row["prompt"][0]["content"])


def test_a_row_without_a_number_is_named(tmp_path: Path) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "two"}) + "\n")
    with pytest.raises(DataError, match="row 0: no question, or no number behind ####"):
        list(gsm8k_rows(str(source)))


def test_the_environment_rewards_the_form_that_the_prompt_asks_for(tmp_path: Path) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    [row] = gsm8k_rows(str(source))
    rewards = [find_env("gsm8k")(row).step(answer).reward for answer in ("One and one.\n#### 2", "#### 3", "2")]
    assert rewards == [1.0, 0.0, 0.0]

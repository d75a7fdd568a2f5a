"""A rehearsal finds what is planted in a configuration for many GPUs, and nothing where nothing is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner, Result

from skyrl.cli.planning.rehearse import rehearse
from skyrl.errors import UserError
from tests import nano_run
from tests.interop.corpora import RECORDED, areal_files, scripts_of_2026
from tests.long_cases import long_except

ENGINE = "generator.inference_engine."
PLACEMENT = "trainer.placement."

CLUSTER: dict[str, Any] = {
    "trainer.device": "cuda",
    "trainer.strategy": "deepspeed",
    "trainer.train_batch_size": 512,
    "trainer.policy_mini_batch_size": 128,
    "trainer.micro_train_batch_size_per_gpu": 2,
    f"{PLACEMENT}policy_num_nodes": 8,
    f"{PLACEMENT}policy_num_gpus_per_node": 8,
    f"{ENGINE}backend": "vllm",
    f"{ENGINE}num_engines": 32,
    f"{ENGINE}tensor_parallel_size": 2,
    "generator.n_samples_per_prompt": 8,
    "trainer.logger": "console",
}
"""The nano run on 64 GPUs."""


def rehearsed(nano: Path, out: Path, *options: str, **changes: Any) -> Result:
    """The end of a rehearsal of the nano run on 64 GPUs with these changes; `__` stands for a dot."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    words = nano_run.as_words(nano_run.overrides(nano, out) | CLUSTER | named)
    return CliRunner().invoke(rehearse, [*options, *words])


def outcomes(result: Result) -> dict[str, list[str]]:
    """Phase -> outcomes, of the lines of the table."""
    by_phase: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        if line and not line.startswith(" "):
            by_phase.setdefault(line[:12].strip(), []).append(line[12:22].strip())
    return by_phase


@pytest.mark.long
def test_a_run_for_64_gpus_goes_through_every_phase(nano: Path, tmp_path: Path) -> None:
    result = rehearsed(nano, tmp_path)
    assert result.exit_code == 0, result.output
    by_phase = outcomes(result)
    assert {phase for phase, states in by_phase.items() if "passed" in states} == {
        "placement",
        "folders",
        "training",
        "environment",
        "evaluation",
        "checkpoints",
        "resume",
        "export",
    }
    assert {phase for phase, states in by_phase.items() if "folded" in states} == {"model", "data", "layout"}
    assert not (tmp_path / "run").exists()


def raising_reward(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """A reward function that has no answer to some completions."""
    (tmp_path / "bad.py").write_text("def judge(completion, ground_truth, **others):\n    return 1 / 0\n")
    return {"environment__env_class": f"{tmp_path / 'bad.py'}:judge"}


def reward_of_text(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """A reward function that returns a word."""
    (tmp_path / "bad.py").write_text("def judge(completion, ground_truth, **others):\n    return 'good'\n")
    return {"environment__env_class": f"{tmp_path / 'bad.py'}:judge"}


def no_system_role(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """Rows with a system message, and a template that refuses one."""
    from transformers import AutoTokenizer

    rows = [json.loads(line) for line in (nano / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"].insert(0, {"role": "system", "content": "be brief"})
    (tmp_path / "system.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: Any = AutoTokenizer.from_pretrained(nano / "model")
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
        + tokenizer.chat_template
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return {
        "data__train_data": [str(tmp_path / "system.jsonl")],
        "trainer__tokenizer_path": str(tmp_path / "tokenizer"),
    }


def missing_column(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """A column that the rows have not got."""
    return {"data__prompt_column": "question"}


def missing_file(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """Training data that is not there."""
    return {"data__train_data": [str(tmp_path / "nowhere.jsonl")]}


def short_prompts(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """A bound that no prompt keeps."""
    return {"trainer__max_prompt_length": 1}


def file_as_folder(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """A checkpoint folder below a file."""
    return {"trainer__ckpt_path": str(nano / "train.jsonl" / "checkpoints")}


def too_few_gpus(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """Nothing changes: the option says that there are fewer GPUs."""
    return {}


def too_large(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """A model that its GPUs cannot hold; the sizes alone are there, so the rest cannot be tried."""
    (tmp_path / "large").mkdir()
    config = json.loads((nano / "model" / "config.json").read_text())
    large = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 200, "num_attention_heads": 128}
    (tmp_path / "large" / "config.json").write_text(json.dumps({**config, **large, "layer_types": None}))
    return {"trainer__policy__model__path": str(tmp_path / "large"), "trainer__placement__gpu_kind": "A100-40"}


def odd_heads(nano: Path, tmp_path: Path) -> dict[str, Any]:
    """Heads of a size that the engine's kernels have not got."""
    (tmp_path / "odd").mkdir()
    config = json.loads((nano / "model" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "hidden_size": 4 * 36, "head_dim": 36}))
    return {"trainer__policy__model__path": str(tmp_path / "odd")}


MISTAKES: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str, str]] = {
    "reward that raises": (raising_reward, "training", "ZeroDivisionError"),
    "reward that is no number": (reward_of_text, "training", "good"),
    "template without system role": (no_system_role, "training", "no system role here"),
    "missing column": (missing_column, "training", "question"),
    "missing file": (missing_file, "training", "nowhere.jsonl"),
    "no prompt is short enough": (short_prompts, "training", "max_prompt_length"),
    "a file where a folder goes": (file_as_folder, "folders", "ckpt_path"),
    "too few GPUs": (too_few_gpus, "placement", "64 GPUs"),
    "a model that does not fit": (too_large, "memory", "does not fit"),
    "heads that no kernel has": (odd_heads, "engine", "36"),
}
"""Mistake -> what plants it, the phase that finds it, and a word of the finding."""


@pytest.mark.parametrize("name", long_except(MISTAKES, "heads that no kernel has"))
def test_a_planted_mistake_is_found_and_named(name: str, nano: Path, tmp_path: Path) -> None:
    plant, phase, word = MISTAKES[name]
    options = ["--gpus", "32"] if plant is too_few_gpus else []
    result = rehearsed(nano, tmp_path / "out", *options, **plant(nano, tmp_path))
    failures = [line for line in result.output.splitlines() if line[12:22].strip() == "failed"]
    assert result.exit_code == 1, result.output
    assert any(line.startswith(phase) for line in failures), result.output
    assert word in result.output


def test_a_wrong_number_of_engines_is_refused_before_anything_is_tried(nano: Path, tmp_path: Path) -> None:
    result = rehearsed(nano, tmp_path, generator__inference_engine__num_engines=7)
    assert "num_engines" in str(result.exception)
    assert result.stdout == ""


PUBLISHED = (
    "examples/train/gsm8k/run_gsm8k.sh",
    "examples/train/algorithms/dapo/run_dapo_gsm8k.sh",
    "examples/train/ppo/run_ppo.sh",
    "examples/math/gsm8k_liteppo.yaml",
    "examples/experimental/prox_approx/gsm8k_grpo_prox_approx.yaml",
)
"""Three scripts of SkyRL and two files of AReaL, each of GSM8K on several GPUs."""


@pytest.fixture(scope="module")
def gsm8k(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of rows in the form of GSM8K's, and of a model with room for its prompts."""
    folder = tmp_path_factory.mktemp("gsm8k")
    shutil.copytree(nano / "model", folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    rows = [
        {
            "prompt": [{"role": "user", "content": f"How much is {number} + {number}? Let's think. #### "}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": str(2 * number)},
            "data_source": "openai/gsm8k",
        }
        for number in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(folder / "rows.jsonl")]
    return {
        "data.train_data": files,
        "data.val_data": files,
        "trainer.policy.model.path": str(folder / "model"),
        "environment.env_class": "gsm8k",
    }


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_go_through_every_phase(name: str, gsm8k: dict[str, Any], tmp_path: Path) -> None:
    tables = {file.name: file.conversion.tables for file in (*scripts_of_2026(RECORDED, "rl"), *areal_files(RECORDED))}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables[name]))
    folders = {f"trainer.{kind}_path": str(tmp_path / kind) for kind in ("run", "ckpt", "export")}
    if "critic" in tables[name]["trainer"]:
        folders["trainer.critic.model.path"] = gsm8k["trainer.policy.model.path"]
    words = nano_run.as_words(gsm8k | folders)
    result = CliRunner().invoke(rehearse, [str(tmp_path / "run.toml"), *words])
    assert result.exit_code == 0, result.output
    assert "failed" not in [state for states in outcomes(result).values() for state in states]


def test_a_folder_that_cannot_be_kept_is_refused(nano: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    result = rehearsed(nano, tmp_path, "--to", str(in_the_way))
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == f"--to {in_the_way}: the folder cannot be created: File exists"

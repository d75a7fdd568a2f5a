from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyrl.config import compose
from skyrl.envs.services.retriever import SearchIndex, read_corpus
from skyrl.experiments.ppo import BasePPOExp
from skyrl.tree.imports import import_object

SEARCH = Path(__file__).parents[2] / "examples" / "search"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with two supervised steps instead of 300 and fewer rows."""
    module = sys.modules[import_object(f"{SEARCH}/train.py:main").__module__]
    for name, value in {"STEPS": 2, "TRAIN_ROWS": 32, "VALIDATION_ROWS": 8}.items():
        monkeypatch.setattr(module, name, value)
    return module


def overrides(base: Path, run: Path) -> dict[str, Any]:
    return {
        "data.train_data": [str(base / "train.jsonl")],
        "data.val_data": [str(base / "validation.jsonl")],
        "trainer.policy.model.path": str(base / "model"),
        "trainer.run_path": str(run),
        "trainer.ckpt_path": str(run / "checkpoints"),
        "trainer.export_path": str(run / "exports"),
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.eval_batch_size": 8,
        "trainer.max_training_steps": 2,
        "trainer.policy.optimizer_config.num_warmup_steps": 1,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "generator.n_samples_per_prompt": 4,
    }


def test_the_corpus_answers_who_names_what_is_wanted_and_not_who_names_the_person_only(
    example: ModuleType, tmp_path: Path
) -> None:
    example.make_data(tmp_path, random.Random(0))
    index = SearchIndex(read_corpus(tmp_path / "corpus.jsonl"))
    for line in (tmp_path / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = row["prompt"][0]["content"].removeprefix("where is ").removesuffix("?")
        home = row["reward_spec"]["ground_truth"]["target"]
        assert index.search(f"{name} lives", topk=1)[0].document["contents"] == f"{name} lives in {home}"
        assert index.search(name, topk=1)[0].document["contents"].startswith(f"{name} likes")


def test_nobody_who_is_asked_for_in_validation_is_asked_for_in_training(example: ModuleType, tmp_path: Path) -> None:
    example.make_data(tmp_path, random.Random(0))
    questions = [
        {json.loads(line)["prompt"][0]["content"] for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()}
        for split in ("train", "validation")
    ]
    assert [len(names) for names in questions] == [24, 8]
    assert not questions[0] & questions[1]


def test_the_file_has_no_setting_without_effect() -> None:
    assert not compose([str(SEARCH / "grpo.toml")], [], strict=True).warnings


@pytest.mark.long
def test_two_steps_are_trained_against_the_real_retriever(example: ModuleType, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    base.mkdir()
    example.make(base)
    with example.retriever(base / "corpus.jsonl") as url:
        values = overrides(base, run) | {"environment.skyrl_gym.search.search_url": url}
        BasePPOExp(compose([str(SEARCH / "grpo.toml")], values).config).run()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"]]
    assert [line["step"] for line in trained] == [1, 2]
    assert all("policy/final_loss" in line and line["rollout/failures"] == 0 for line in trained)

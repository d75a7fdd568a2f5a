"""A run whose tokenizer is not the one beside the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skyrl.experiments.model_checks import models_exist, policy_has_chat_template
from skyrl.models.files.loading import load_tokenizer
from tests.nano_run import config, train

OF_A_TOKENIZER = ("tokenizer*", "chat_template*", "vocab*", "merges*", "special_tokens*", "added_tokens*")


@pytest.fixture
def parts(nano: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A folder with the model alone, and one with the tokenizer alone, whose template says hello."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(nano / "model", model, ignore=shutil.ignore_patterns(*OF_A_TOKENIZER))
    shutil.copytree(nano / "model", tokenizer, ignore=shutil.ignore_patterns("config.json", "*.safetensors", "gen*"))
    template = tokenizer / "chat_template.jinja"
    template.write_text("hello " + template.read_text())
    return model, tokenizer


def test_a_run_is_trained_and_exported_with_its_own_tokenizer(
    nano: Path, tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    model, tokenizer = parts
    experiment = train(
        nano,
        tmp_path,
        trainer__policy__model__path=str(model),
        trainer__tokenizer_path=str(tokenizer),
        trainer__max_training_steps=1,
    )
    [prompt, *_] = experiment.train_dataset.prompts
    assert experiment.tokenizer.decode(list(prompt.token_ids)).startswith("hello ")
    stored = load_tokenizer(str(tmp_path / "run" / "model"))
    assert str(stored.chat_template).startswith("hello ")


def test_what_lies_in_its_folder_is_looked_at_before_the_start(
    nano: Path, tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    model, tokenizer = (str(part) for part in parts)

    def found(own: str | None) -> list[tuple[str, str]]:
        run = config(nano, tmp_path, trainer__policy__model__path=model, trainer__tokenizer_path=own)
        checks = (models_exist, policy_has_chat_template)
        return [(problem.path, problem.message) for check in checks for problem in check(run)]

    assert found(tokenizer) == []
    [(path, message)] = found(None)
    assert path == "trainer.policy.model.path" and message.startswith(f"the folder {model} contains no tokenizer")
    [(path, message)] = found(str(tmp_path / "nowhere"))
    assert path == "trainer.tokenizer_path" and message.startswith("there is no tokenizer folder")
    (Path(tokenizer) / "chat_template.jinja").unlink()
    [(path, message)] = found(tokenizer)
    assert f"the tokenizer of {tokenizer} has no chat template" in message

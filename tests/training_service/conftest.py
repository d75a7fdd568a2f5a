"""Models for the tests of what the training service learns."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.config import TrainerConfig
from tests.training_service.banks import trainer_of


@pytest.fixture(scope="session")
def untied(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with an output head of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(nano / "model", folder)
    settings = AutoConfig.from_pretrained(folder)
    settings.tie_word_embeddings = False
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def trainer(nano: Path, untied: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    return trainer_of(nano, tmp_path_factory.mktemp("service"), untied)


@pytest.fixture(scope="session")
def tied(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    return trainer_of(nano, tmp_path_factory.mktemp("service"), nano / "model")

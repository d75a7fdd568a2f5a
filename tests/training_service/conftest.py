"""Fixtures of the training service's tests."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.config import TrainerConfig
from skyrl.training_service.serving import ServedTraining
from tests.training_service.banks import trainer_of
from tests.training_service.running import KEY, client_of, running


@pytest.fixture(autouse=True)
def _client_of_a_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client sends no telemetry, has a key that it accepts, and leaves connections open, collected here."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServedTraining]:
    """A service with the default settings."""
    with running(tmp_path / "service") as served:
        yield served


@pytest.fixture
def client(service: ServedTraining) -> Iterator[tinker.ServiceClient]:
    """A client of `service`."""
    with client_of(service.url) as client:
        yield client


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

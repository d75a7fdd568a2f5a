"""Probes of `training_service`: where each setting arrives. `tests/training_service` tests what it does there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import attrs
import pytest

from skyrl.config import TrainingServiceConfig
from skyrl.experiments.training_service import TrainingServiceExp
from skyrl.training_service.backend import Backend, ServedModel
from tests.effects.probe import Probe, Scene, observable

T = "training_service."


@observable("the limits, models and engines that a training service is started with")
def served(scene: Scene) -> object:
    arguments: dict[str, object] = {}

    @asynccontextmanager
    async def serving(
        backend: Backend, folder: Path, settings: TrainingServiceConfig, model: ServedModel, records: object
    ) -> AsyncIterator[Any]:
        del backend, folder, records
        arguments["settings"], arguments["model"] = attrs.asdict(settings), model.full
        running = MagicMock()
        running.run = lambda: asyncio.sleep(0)
        running.status = lambda: asyncio.sleep(3600)
        yield running

    def bank(*_: object, **settings: object) -> MagicMock:
        arguments["bank"] = {name: settings[name] for name in ("full", "resident")}
        return MagicMock()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.experiments.training_service.serving_training", serving)
        patch.setattr("skyrl.experiments.training_service.ModelBank", MagicMock(side_effect=bank))
        patch.setattr("skyrl.experiments.training_service.BankRanks", lambda ranks: AsyncMock())
        experiment = TrainingServiceExp(scene.run, {})
        vars(experiment)["client"] = MagicMock()
        arguments["adapters"] = experiment.adapters
        asyncio.run(experiment.answer_clients(lambda line: None))
    return arguments


PROBES = tuple(
    Probe(f"{T}{name}", value, served)
    for name, value in {
        "host": "127.0.0.2",
        "port": 8011,
        "train_all_weights": True,
        "max_models": 3,
        "max_rank": 5,
        "resident_models": 2,
        "max_snapshots": 3,
        "max_pass_tokens": 100,
        "max_datums": 7,
        "max_body_bytes": 1000,
        "max_samples": 2,
        "client_models": 1,
        "client_queue_length": 10,
        "client_bytes": 10,
        "session_seconds": 10.0,
        "state_steps": 2,
        "state_seconds": 2.0,
    }.items()
)

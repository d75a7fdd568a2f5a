"""Which trackers a run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.cli.results.track import SERVICES
from skyrl.config import ConfigError, TrainerConfig
from skyrl.config.settings.trackers import TRACKERS
from skyrl.tracking.console import Console
from skyrl.tracking.factory import trackers_of


def test_the_console_is_made_once_however_often_it_is_named(tmp_path: Path) -> None:
    trainer = TrainerConfig(logger=("console", "console"), run_path=str(tmp_path))
    assert [type(tracker) for tracker in trackers_of(trainer, total_steps=3, first_step=0)] == [Console]


def test_a_tracker_that_does_not_exist_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.tracking.factory.TRACKERS", {"console": TRACKERS["console"]})
    with pytest.raises(ConfigError, match=r"no tracker 'wandb'"):
        trackers_of(TrainerConfig(logger="wandb", run_path=str(tmp_path)), total_steps=3, first_step=0)


def test_the_command_delivers_to_every_tracker_that_is_outside_of_the_run() -> None:
    assert list(SERVICES) == [name for name, facts in TRACKERS.items() if not facts.in_run]

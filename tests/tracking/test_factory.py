"""Which trackers a run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.config import ConfigError, TrainerConfig
from skyrl.tracking.console import Console
from skyrl.tracking.factory import trackers_of


def test_the_console_is_made_once_however_often_it_is_named(tmp_path: Path) -> None:
    trainer = TrainerConfig(logger=("console", "console"), run_path=str(tmp_path))
    assert [type(tracker) for tracker in trackers_of(trainer, total_steps=3, first_step=0)] == [Console]


@pytest.mark.parametrize(
    ("logger", "hint"),
    [
        ("wandbb", "did you mean wandb"),
        (("console", "tensorbord"), "did you mean tensorboard"),
        ("", "file.py:name"),
        ("mine", "file.py:name"),
        ("aim", "file.py:name"),
    ],
)
def test_a_tracker_that_does_not_exist_is_refused_by_name(logger: str | tuple[str, ...], hint: str) -> None:
    with pytest.raises(ConfigError, match=f"is not one of: console, wandb(.|\n)*{hint}"):
        TrainerConfig(logger=logger)

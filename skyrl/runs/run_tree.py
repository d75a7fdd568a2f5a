"""The configuration of any kind of run, and the names of its fields in messages."""

from __future__ import annotations

from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.loading.kinds import kind_of
from skyrl.config.settings.trainer_fields import trainer_field

AnyRun = SkyRLTrainConfig | SupervisedConfig
"""The root of a configuration: `.trainer` is what sessions and learners are built from, in either tree."""


def field_path(run: AnyRun, field: str) -> str:
    """The path in the user's own file of a field of `TrainerConfig`, such as `ckpt_path` or `faults.stop_before`."""
    return trainer_field(kind_of(run).trainer, field)

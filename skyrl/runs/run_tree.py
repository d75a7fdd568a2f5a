"""A run's configuration, whatever its kind, and how messages name its fields."""

from __future__ import annotations

from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.kinds import kind_of

AnyRun = SkyRLTrainConfig | SupervisedConfig
"""The root of a configuration: `.trainer` is what sessions and learners are built from, in either tree."""

_SUPERVISED = {"resume_mode": "resume_from", "resume_path": "resume_from", "use_sample_packing": "use_sequence_packing"}
"""Fields of `TrainerConfig` that have another name in the supervised tree."""


def field_path(run: AnyRun, field: str) -> str:
    """The path in the user's own file of a field of `TrainerConfig`, such as `ckpt_path` or `faults.stop_before`."""
    return kind_of(run).path(_SUPERVISED.get(field, field) if isinstance(run, SupervisedConfig) else field)

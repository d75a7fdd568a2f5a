"""Paths of the fields of `TrainerConfig` in a user's own file, for messages of components that serve both trees."""

from __future__ import annotations

from skyrl.tree import joined

_SUPERVISED = {"resume_mode": "resume_from", "resume_path": "resume_from", "use_sample_packing": "use_sequence_packing"}
"""Fields that have another name at the root of the supervised trees."""


def trainer_field(table: str, field: str) -> str:
    """The path of a field such as `device` or `faults.stop_before`.

    `table` holds the trainer's fields: `trainer`, or empty for supervised runs, which have them at the root.
    """
    return joined(table, field if table else _SUPERVISED.get(field, field))


def table_above(config_path: str) -> str:
    """The table of the trainer's fields, given that of a model: `trainer` for `trainer.policy`, empty for the root."""
    return config_path.rpartition(".")[0]

"""Conditions under which the fields of samplers have an effect, relative to the table that `curriculum` is in."""

from __future__ import annotations

from skyrl.config.foundation.import_paths import is_import_path
from skyrl.tree import get_at
from skyrl.tree.rules import Condition, Effect


def draws_by(name: str) -> Condition:
    """Whether the sampler, or that of a stage, is the built-in one of this name."""
    words = f"curriculum.sampler is {name}, or schedule with a stage of it"
    return Condition(words, lambda table: name in get_at(table, "curriculum").names)


SAMPLER_EFFECTS: tuple[Effect, ...] = (
    Effect(
        "curriculum.sampler_kwargs",
        Condition(
            "curriculum.sampler is an import path", lambda table: is_import_path(get_at(table, "curriculum").sampler)
        ),
    ),
    Effect("curriculum.mixture", draws_by("mixture")),
    Effect(
        "curriculum.stages",
        Condition("curriculum.sampler is schedule", lambda table: get_at(table, "curriculum").sampler == "schedule"),
    ),
)

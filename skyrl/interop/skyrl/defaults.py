"""SkyRL's defaults of settings that a file omits: those that differ here, by the tree of the file's version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from skyrl.config import SFTConfig, SkyRLTrainConfig
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.check import has_effect
from skyrl.config.loading.kinds import kind_of
from skyrl.config.loading.migrations import MIGRATIONS
from skyrl.interop.peer_trees import PeerTree, peer_trees, versions_with
from skyrl.interop.report import OtherDefault
from skyrl.interop.writing import Writing
from skyrl.tree import get_at
from skyrl.tree.dump import stored_value

_ROOTS: Mapping[str, type[RunConfig]] = {"rl": SkyRLTrainConfig, "sft": SFTConfig}
"""Kind of a recorded tree -> the class of ours."""

Convert = Callable[[Writing, str, Any, Mapping[str, Any]], None]
"""Converts one setting, given all."""

_EVERYTHING_ON: Mapping[str, Mapping[str, Any]] = {
    "rl": {
        "trainer.strategy": "megatron",
        "trainer.fully_async.enabled": True,
        **{
            f"trainer.{model}.megatron_config.moe_router_load_balancing_type": "aux_loss" for model in ("policy", "ref")
        },
    },
    "sft": {},
}
"""Values of the switches that turn on features which exist here too."""

_SAME = ("trainer.strategy", "gradient_accumulation_fusion")
"""Ends of settings whose default means the same here: fsdp is fsdp2, and the other is Megatron-core's own default."""

_PARTLY_GIVEN: Mapping[str, Mapping[str, Any]] = {
    "generator.eval_sampling_params.": {"temperature": 1.0, "max_generate_length": 1024},
    "trainer.critic.optimizer_config.": {"lr": 1e-6},
}
"""Beginning of a table -> values of settings that are not in it although the table is in the file: SkyRL then takes the
defaults of the class, not those of the tree (train/config/config.py:1829). Here they are those of the tree."""

_OLD_NAMES = frozenset(item.old for item in MIGRATIONS if item.since)
"""Settings of the Hydra era, whose files are merged with the tree's defaults."""

_MOSTLY = 0.9
"""Share of a file's settings that a version must know to be named as the file's."""


def tree_of(kind: str, keys: Iterable[str]) -> PeerTree:
    """The newest tree that has the most of a file's settings."""
    trees = peer_trees("skyrl", kind)
    versions = versions_with(trees, keys)
    return next((tree for tree in reversed(trees) if tree.version in versions), trees[-1])


def version_notice(kind: str, keys: Iterable[str]) -> str:
    """A sentence that names the version of SkyRL that a file is of; empty if its settings do not tell."""
    keys, trees = list(keys), peer_trees("skyrl", kind)
    versions = versions_with(trees, keys)
    known = len({*keys} & tree_of(kind, keys).defaults.keys())
    if not versions or len(versions) == len(trees) or known < _MOSTLY * len(keys):
        return ""
    return f"The settings are those of SkyRL {' or '.join(versions)}."


def defaults_of_classes(settings: Iterable[str]) -> dict[str, Any]:
    """Settings that a file omits in tables that it has, and SkyRL's values of them, where they differ here."""
    keys = {*settings}
    if keys & _OLD_NAMES:
        return {}
    return {
        table + name: value
        for table, values in _PARTLY_GIVEN.items()
        if any(key.startswith(table) for key in keys)
        for name, value in values.items()
        if table + name not in keys
    }


def other_defaults(
    writing: Writing, kind: str, settings: Mapping[str, Any], convert: Convert
) -> Iterable[OtherDefault]:
    """Settings that a file omits, that act in the finished run, and whose default differs in it. `settings` are
    those that are not omitted.
    """
    tree = tree_of(kind, settings)
    values = {**tree.defaults, **settings}
    reference = Writing(writing.where, writing.root)
    for key in _candidates(kind, tree.version, convert):
        if key not in settings:
            convert(reference, key, tree.defaults[key], values)
    expected = reference.unresolved()
    for line in reference.lines:
        for path in line.targets:
            if path in writing.written or not has_effect(writing.resolved, path):
                continue
            ours = stored_value(get_at(writing.resolved, path))
            if ours != stored_value(get_at(expected, path)):
                yield OtherDefault(
                    source=line.source, source_default=tree.defaults[line.source], path=path, skyrl_default=ours
                )
                break


@cache
def _candidates(kind: str, version: str, convert: Convert) -> tuple[str, ...]:
    """Settings whose default differs here in some run: with all features on, or after derivation."""
    [tree] = [tree for tree in peer_trees("skyrl", kind) if tree.version == version]
    values = {**tree.defaults, **_EVERYTHING_ON[kind]}
    root = _ROOTS[kind]
    reference, ours = Writing("", root), root()
    for key, value in tree.defaults.items():
        convert(reference, key, value, values)
    expected = reference.unresolved()
    derived = {rule.writes for rule in kind_of(ours).rules}
    return tuple(
        line.source
        for line in reference.lines
        if not line.source.endswith(_SAME)
        and any(
            (expected_value := stored_value(get_at(expected, path))) is not None
            and (path in derived or stored_value(get_at(ours, path)) != expected_value)
            for path in line.targets
        )
    )

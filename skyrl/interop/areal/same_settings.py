"""Settings of AReaL that are one setting here (intervals and copies of others), the names of all of its settings, to
tell unknown settings from unconverted ones, and the version that a file is of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from skyrl.interop.areal.defaults import age
from skyrl.interop.peer_trees import peer_trees, versions_with
from skyrl.interop.translation import Dependent, Translation, Values, redundant, refused
from skyrl.interop.writing import Writing
from skyrl.tree.names import nearest
from skyrl.tree.types import display_value

KINDS = ("GRPOConfig", "SFTConfig", "RWConfig", "DPOConfig")
_ENGINE_OF_ACTOR = re.compile(r"actor\.(?!adv_norm|reward_|kl_)")
_FREE = ("env_vars", "dataset_kwargs", "config", "reward_functioncall_config", "lora_paths", "lora_modules")
"""Tables whose keys are chosen by the user."""

_BETWEEN = ("actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode", "model.is_critic")
"""Settings of versions between those of the trees."""


def is_known(key: str) -> bool:
    """Whether AReaL has a setting or a table of this dotted name, in any kind of experiment."""
    name = _plain(key)
    return any(known == name or known.startswith(f"{name}.") for known in known_names()) or any(
        f".{table}." in name for table in _FREE
    )


@cache
def known_names() -> tuple[str, ...]:
    """Every dotted name of a setting, except those inside tables with user-chosen keys."""
    keys = [*(_plain(key) for kind in KINDS for tree in peer_trees("areal", kind) for key in tree.defaults), *_BETWEEN]
    own = [_ENGINE_OF_ACTOR.sub("model.", key) for key in keys if _ENGINE_OF_ACTOR.match(key)]
    return tuple(dict.fromkeys([*keys, *own]))


def version_notice(values: Values, kind: str) -> str:
    """A sentence that names the version of a file: among those of its `age`, the one that has most of its settings."""
    trees = [tree for tree in peer_trees("areal", kind) if tree.version.startswith("0.") is (age(values) < 2026)]
    versions = versions_with(trees, (re.sub(r"\[\d+\]", "[0]", key) for key in values))
    return f"Read as a file of AReaL {' or '.join(versions)}." if versions else ""


def _plain(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key)


_UNKNOWN = "not known to this converter"
_LINES_WITH_SUGGESTIONS = 200
"""Largest number of report lines for which similar names are searched; experiments have fewer."""

_UNITS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda number: number,
    "epochs": lambda number: "1 epoch" if number == 1 else f"{number} epochs",
    "secs": lambda number: f"{number}s",
}


def intervals(paths: Mapping[str, str]) -> dict[str, Dependent]:
    """Entries of `steps`, `epochs` and `secs` after prefixes such as `saver.freq_`, each with our path. They become one
    setting, in which each triggers independently, as in AReaL.
    """
    return {prefix + unit: partial(_interval, prefix, path) for prefix, path in paths.items() for unit in _UNITS}


def _interval(prefix: str, path: str, key: str, value: object, values: Values) -> Translation:
    numbers = {unit: values[prefix + unit] for unit in _UNITS if values.get(prefix + unit) is not None}
    if value is None and numbers:
        return redundant("not set")
    parts = [_UNITS[unit](number) for unit, number in numbers.items()]
    return Translation(writes={path: -1 if not parts else parts[0] if len(parts) == 1 else parts})


def copies(originals: Mapping[str, str], defaults: Values) -> dict[str, Dependent]:
    """Entries of settings that must equal another one, because there is a single field for both here. `defaults` are
    those of originals that a file may leave out.
    """
    return {key: partial(_copy, original, defaults) for key, original in originals.items()}


def _copy(original: str, defaults: Values, key: str, value: object, values: Values) -> Translation | None:
    known = {**defaults, **values}
    if original not in known or value in (None, ""):
        return None
    if value == known[original]:
        return redundant(f"same as {original}; both are one setting here")
    return refused(f"differs from {original} = {display_value(known[original])}, but both are one setting here")


def follows(original: str) -> Dependent:
    """Entry of a setting that has the value of `original` here if nothing else is written."""
    return lambda key, value, values: (
        redundant(f"same as {original}, its default here") if value == values.get(original) else None
    )


def why_unknown(key: str, writing: Writing) -> str:
    """Why a setting in no table is refused, with a similar name if there is one."""
    if is_known(key):
        return "an AReaL setting that this converter does not convert"
    if len(writing.lines) >= _LINES_WITH_SUGGESTIONS:
        return _UNKNOWN
    siblings = [name for name in known_names() if name.partition(".")[0] == key.partition(".")[0]]
    meant = nearest(key, siblings or known_names())
    return _UNKNOWN + (f"; did you mean {meant}?" if meant else "")

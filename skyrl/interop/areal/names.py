"""The names of AReaL's settings, to tell unknown settings from unconverted ones, and the version that a file is of."""

from __future__ import annotations

import re
from functools import cache

from skyrl.interop.areal.defaults import age
from skyrl.interop.peer_trees import peer_trees, versions_with
from skyrl.interop.translation import Values

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

"""Settings of verl with their defaults, from its YAML files: `python -m tests.interop.peers.verl FOLDER`.

The wheel holds composed files of its RL trees; what the programs for asynchronous training add to them, and the tree of
the supervised trainer, are composed here. References (`${oc.select:...}`) stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.interop.values import flat
from skyrl.tree.files import read_file

_CONFIG = "verl/trainer/config"
_COMPOSED = {
    "fsdp": "ppo_trainer",
    "megatron": "ppo_megatron_trainer",
    "torchtitan": "ppo_torchtitan_trainer",
    "veomni": "ppo_veomni_trainer",
}
_ASYNCHRONOUS = {
    "fully_async": "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
    "one_step_off": "verl/experimental/one_step_off_policy/config/one_step_off_ppo_trainer.yaml",
}
_SUPERVISED = {"sft": "fsdp", "sft_megatron": "megatron"}
"""Kind of run -> its engine, which also chooses the settings of the optimizer."""


def trees(wheel: Path) -> dict[str, dict[str, Any]]:
    """Kind of run -> its source and defaults."""
    tree_by_kind: dict[str, dict[str, Any]] = {}
    for kind, name in _COMPOSED.items():
        source = f"{_CONFIG}/_generated_{name}.yaml"
        tree_by_kind[kind] = _tree(source, _read(wheel / source))
    ppo = _read(wheel / _CONFIG / "_generated_ppo_trainer.yaml")
    for kind, source in _ASYNCHRONOUS.items():
        tree_by_kind[kind] = _tree(source, _merged(ppo, _without_hydra(_read(wheel / source))))
    for kind, engine in _SUPERVISED.items():
        source = f"{_CONFIG}/sft_trainer_engine.yaml"
        tree_by_kind[kind] = _tree(source, _composed(wheel / source, engine))
    return tree_by_kind


def _tree(source: str, table: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {key: value for key, value in flat(table) if not key.endswith("_target_")}
    return {"source": source, "defaults": {key: None if value == "???" else value for key, value in defaults.items()}}


def _composed(file: Path, engine: str) -> dict[str, Any]:
    """The file, over the files that its defaults list names as `group@table: name`."""
    own = _read(file)
    composed: dict[str, Any] = {}
    for entry in own["defaults"]:
        for group, name in entry.items() if isinstance(entry, Mapping) else ():
            folder, _, table = group.partition("@")
            chosen = engine if folder in ("engine", "optim") else name
            composed[table] = _read(file.parent / folder / f"{chosen}.yaml")
    return _merged(composed, _without_hydra(own))


def _without_hydra(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in ("defaults", "hydra")}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = _merged(dict(under or {}), dict(value)) if both else value
    return merged


def _read(file: Path) -> dict[str, Any]:
    return dict(read_file(str(file))[-1].value)


if __name__ == "__main__":
    print(json.dumps(trees(Path(sys.argv[1]))))

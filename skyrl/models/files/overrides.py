"""Replaces values of a model's transformers configuration, rotary embeddings among them.

transformers silently drops `rope_theta` if it is given alone, and the model's own base if `rope_scaling` is given: both
are parts of its single table `rope_parameters`, which is assembled here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from skyrl.config.derive.model_overrides import LONGEST_ROW
from skyrl.errors import ModelError
from skyrl.models.files.rotation import with_fixed_rotation
from skyrl.tree.frozen import thaw
from skyrl.tree.names import nearest

ROPE = ("rope_scaling", "rope_theta", "rope_parameters")
"""Names of overrides that describe rotary embeddings."""

SCALED = ("linear", "dynamic", "yarn", "llama3")
"""Kinds of rotary embeddings that need a factor."""

KINDS = ("default", *SCALED, "longrope")
"""Kinds of rotary embeddings that transformers computes."""


def with_overrides(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """A copy of the configuration with the named values replaced, and with the rotary embeddings for rows of
    `LONGEST_ROW` tokens, an entry of its own. Raises `ModelError` for a name that it does not have, and for rotary
    embeddings that cannot be computed.
    """
    named = {name: value for name, value in overrides.items() if name != LONGEST_ROW}
    return with_fixed_rotation(_replaced(config, named) if named else config, overrides.get(LONGEST_ROW))


def _replaced(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    known = config.to_dict()
    for name in overrides:
        if name not in known and name not in ROPE:
            close = nearest(name, list(known))
            raise ModelError(
                f"a configuration of {config.model_type} has no {name!r}, which model_config_kwargs gives"
                + (f"; did you mean {close}?" if close else "")
            )
    plain: dict[str, Any] = {name: thaw(value) for name, value in overrides.items()}
    changed = known | {name: value for name, value in plain.items() if name not in ROPE}
    if any(name in plain for name in ROPE):
        changed["rope_parameters"] = _rope(known, plain)
    new_config: PretrainedConfig = type(config).from_dict(changed)
    return new_config


def changed_values(config: PretrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values that `with_overrides` changes, by name, in the form that vLLM accepts. Raises the same errors."""
    before, after = config.to_dict(), with_overrides(config, overrides).to_dict()
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


def values_as_given(config: PretrainedConfig, overrides: Mapping[str, Any]) -> dict[str, object]:
    """The values that are replaced, by name and as they were given; the table of rotary embeddings is whole where the
    longest row chooses it. Raises the same errors.
    """
    named = {name: value for name, value in overrides.items() if name != LONGEST_ROW}
    replaced = _replaced(config, named) if named else config
    fixed: Any = with_fixed_rotation(replaced, overrides.get(LONGEST_ROW)).get_text_config()
    if fixed is replaced.get_text_config():
        return named
    return {name: value for name, value in named.items() if name not in ROPE} | {
        "rope_parameters": fixed.rope_parameters
    }


def _rope(known: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The whole table of rotary embeddings: the model's own, updated with the overrides."""
    own = known.get("rope_parameters")
    if not isinstance(own, Mapping) or any(isinstance(value, Mapping) for value in own.values()):
        raise ModelError(
            f"{known.get('model_type')} has no single table of rotary embeddings: leave trainer.rope_scaling and "
            "trainer.rope_theta out"
        )
    table = {**own, **plain.get("rope_parameters", {}), **plain.get("rope_scaling", {})}
    if "type" in table:  # an older name
        table["rope_type"] = table.pop("type")
    if "rope_theta" in plain:
        table["rope_theta"] = plain["rope_theta"]
    kind = table.get("rope_type", "default")
    if kind not in KINDS:
        raise ModelError(f"rotary embeddings of type {kind!r} are not supported; choose from {', '.join(KINDS)}")
    if kind in SCALED and "factor" not in table:
        raise ModelError(f"rotary embeddings of type {kind!r} need a factor: give trainer.rope_scaling.factor")
    if kind not in ("default", "linear"):
        table.setdefault("original_max_position_embeddings", known["max_position_embeddings"])
    return table

"""Replaces values of a model's transformers configuration, and fixes one set of rotary embeddings for a whole run.

transformers silently drops `rope_theta` if it is given alone, and the model's own base if `rope_scaling` is given: both
are parts of its single table `rope_parameters`, which is assembled here.

transformers chooses the factors of `longrope`, and the base of `dynamic`, by the largest position of each call: a row's
numbers then depend on the other rows of its micro-batch, and an engine that decodes beyond the bound mixes keys of both
sets. Here the set is chosen once, by the longest row that a run admits, as vLLM chooses by `max_model_len`, and written
into the model's configuration, which learners, engines and exports share.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from skyrl.config.derive.model_overrides import LONGEST_ROW
from skyrl.errors import ModelError
from skyrl.tree.frozen import thaw
from skyrl.tree.names import nearest

_log = logging.getLogger(__name__)

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


def with_fixed_rotation(config: PretrainedConfig, longest: int | None = None) -> PretrainedConfig:
    """The configuration with rotary embeddings that do not depend on the length of a call: those for rows of up to
    `longest` tokens. None: rows as long as the model's positions. The same object if nothing changes.
    """
    if not varies_with_length(config):
        return config
    fixed = copy.deepcopy(config)
    text: Any = fixed.get_text_config()
    rows = min(longest or text.max_position_embeddings, text.max_position_embeddings)
    for name, table in list(_tables(fixed)):
        if _varies(table):
            chosen = _scaled_for_rows(table, text, rows)
            text.rope_parameters = chosen if name is None else {**text.rope_parameters, name: chosen}
            _log.info("rotary embeddings (%s) are those for rows of %d tokens, in every call", table["rope_type"], rows)
    return fixed


def varies_with_length(config: PretrainedConfig) -> bool:
    """Whether the rotary embeddings of a token depend on the longest row of its call."""
    return any(_varies(table) for _, table in _tables(config))


def _tables(config: PretrainedConfig) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """The tables of rotary embeddings of the text model: one under None, or one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield None, parameters
        return
    for name, table in parameters.items():
        if isinstance(table, Mapping) and "rope_type" in table:
            yield name, table


def _varies(table: Mapping[str, object]) -> bool:
    """Whether transformers computes other embeddings for calls with longer rows."""
    match table["rope_type"]:
        case "longrope":
            pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
            return any(table.get(short) != table.get(long) for short, long in pairs)
        case "dynamic":
            return not table.get("alpha")  # a constant base, in Hunyuan's models
        case _:
            return False


def _scaled_for_rows(table: Mapping[str, Any], text: Any, rows: int) -> dict[str, object]:
    original = table.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    original = original or text.max_position_embeddings
    if table["rope_type"] == "longrope":
        kept, lost = ("long", "short") if rows > original else ("short", "long")
        chosen = {
            f"{lost}_{name}": table[f"{kept}_{name}"] for name in ("factor", "mscale") if f"{kept}_{name}" in table
        }
        return {**table, **chosen}
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotated = int(head * table.get("partial_rotary_factor", 1.0))
    stretched = table["factor"] * max(rows, original) / original - (table["factor"] - 1)
    kept_names = ("rope_theta", "partial_rotary_factor")
    plain = {name: table[name] for name in kept_names if name in table}
    # the base of a call with `rows` positions; NTK-aware scaling, as transformers' _compute_dynamic_ntk_parameters
    return {**plain, "rope_type": "default", "rope_theta": table["rope_theta"] * stretched ** (rotated / (rotated - 2))}

"""One set of rotary embeddings for a whole run.

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

_log = logging.getLogger(__name__)


def with_fixed_rotation(config: PretrainedConfig, longest: int | None = None) -> PretrainedConfig:
    """The configuration with rotary embeddings that do not depend on the length of a call: those for rows of up to
    `longest` tokens. None: rows as long as the model's positions. The same object if nothing changes.
    """
    if not varies_with_length(config):
        return config
    fixed = copy.deepcopy(config)
    positions: int = fixed.get_text_config().max_position_embeddings
    rows = min(longest or positions, positions)
    text: Any = fixed.get_text_config()
    for name, table in list(_tables(fixed)):
        if _varies(table):
            chosen = _scaled_for_rows(table, text, rows)
            text.rope_parameters = chosen if name is None else {**text.rope_parameters, name: chosen}
            _log.info("rotary embeddings (%s) are those for rows of %d tokens, in every call", table["rope_type"], rows)
    return fixed


def varies_with_length(config: PretrainedConfig) -> bool:
    """Whether the rotary embeddings of a token depend on the longest row of its call."""
    return any(_varies(table) for _, table in _tables(config))


def _tables(config: PretrainedConfig) -> Iterator[tuple[str | None, Mapping[str, object]]]:
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


def _scaled_for_rows(parameters: Mapping[str, object], config: PretrainedConfig, rows: int) -> dict[str, object]:
    table: Any = parameters
    text: Any = config
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

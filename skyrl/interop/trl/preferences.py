"""Converts TRL's `DPOConfig` and `KTOConfig` to `kind = "preference"`, whose settings have TRL's names.

Lines are those of TRL 1.16.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.config.settings.preference_root import PREFERENCE_LOSSES
from skyrl.interop.translation import (
    Dependent,
    Entry,
    Translation,
    Values,
    fixed,
    is_off,
    missing,
    number,
    numeric,
    redundant,
    unsupported,
)
from skyrl.interop.trl import supervised
from skyrl.tree.rules import join_choices

_SMOOTHED_IN_TRL = ("robust", "exo_pair", "aot", "aot_unpaired")
"""Losses of `DPOConfig` that read `label_smoothing`."""

_ENGINES = "answers are sampled by `skyrl eval`, after the training or beside it"
_WHOLE = "max_length bounds a whole row"


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list | tuple) else [str(value)]


def _loss(key: str, value: object, values: Values) -> Translation:
    """Convert the losses of a pair; of `rpo_alpha`, which TRL 0.18 adds to them, see `_rpo`."""
    names = _names(value)
    if unknown := [name for name in names if name not in PREFERENCE_LOSSES]:
        return unsupported(f"the loss {join_choices(unknown, 'and')}")
    if not is_off(values.get("rpo_alpha")):
        return redundant("loss_type is set with rpo_alpha")
    return Translation(writes={"loss_type": names})


def _rpo(key: str, value: object, values: Values) -> Translation:
    """Convert the weight of the likelihood of the chosen answer (RPO), which is the loss `sft` here."""
    if is_off(value):
        return redundant("off")
    names = _names(values.get("loss_type", "sigmoid"))
    if any(name not in PREFERENCE_LOSSES for name in names):
        return unsupported("rpo_alpha beside a loss that is refused")
    return Translation(writes={"loss_type": [*names, "sft"], "loss_weights": [*[1.0] * len(names), number(value)]})


def _smoothing(key: str, value: object, values: Values) -> Translation:
    """Convert label smoothing, which the sigmoid of `DPOConfig` ignores and ours reads."""
    if is_off(number(value)):
        return redundant("off")
    names = _names(values.get("loss_type", "sigmoid"))
    readers = [name for name in names if name in _SMOOTHED_IN_TRL]
    if not readers:
        return redundant(f"TRL's {join_choices(names, 'and')} ignores it")
    if "sigmoid" in names:
        return unsupported(f"label smoothing of {join_choices(readers, 'and')} beside a sigmoid without it")
    return Translation(writes={"label_smoothing": number(value)})


def _divergence(value: object) -> Translation:
    name = str(value).removeprefix("FDivergenceType.").lower()
    named = {"none": "reverse_kl", "js": "js_divergence", "alpha": "alpha_divergence"}
    return redundant("not set") if value is None else Translation(writes={"f_divergence_type": named.get(name, name)})


def _reference(value: object) -> Translation:
    """Convert the reference that a program gives: a name, or None for the model that training starts from."""
    if value is None:
        return redundant("not set: the model that training starts from")
    return Translation(writes={"ref_model_path": value})


def _cut(key: str, value: object, values: Values) -> Translation:
    return (
        unsupported(f"limits of prompt and answer of their own; {_WHOLE}") if value is not None else redundant(_WHOLE)
    )


def _syncing(key: str, value: object, values: Values) -> Translation:
    if not values.get("sync_ref_model"):
        return redundant("only read with sync_ref_model")
    return Translation(writes={key: value})


DEPENDENT: dict[str, Dependent] = {
    **supervised.SUPERVISED,
    "ref_model_mixup_alpha": _syncing,
    "ref_model_sync_steps": _syncing,
    "loss_type": _loss,
    "rpo_alpha": _rpo,
    "label_smoothing": _smoothing,
    "max_completion_length": _cut,
    "max_prompt_length": lambda key, value, values: (
        redundant(f"TRL's default; {_WHOLE}") if value in (None, 512) else _cut(key, value, values)
    ),
}
"""Settings whose meaning depends on others."""

KEYS: dict[str, Entry] = {
    **{key: entry for key, entry in supervised.KEYS.items() if key not in ("loss_type", "center_rewards_coefficient")},
    "torch_compile": fixed(False, does="off", otherwise="compiling a model that learns from pairs by torch.compile"),
    "beta": numeric("beta"),
    "loss_weights": "loss_weights",
    "f_divergence_type": _divergence,
    "f_alpha_divergence_coef": numeric("f_alpha_divergence_coef"),
    "discopop_tau": numeric("discopop_tau"),
    "ld_alpha": numeric("ld_alpha"),
    "desirable_weight": numeric("desirable_weight"),
    "undesirable_weight": numeric("undesirable_weight"),
    "reference_free": "reference_free",
    "ref_model": _reference,
    "precompute_ref_log_probs": "precompute_ref_log_probs",
    "precompute_ref_batch_size": redundant("it affects memory, not results"),
    "use_weighting": "use_weighting",
    "sync_ref_model": "sync_ref_model",
    "ref_model_init_kwargs": missing("arguments of the reference of its own", {}),
    **dict.fromkeys(("model_adapter_name", "ref_adapter_name"), missing("adapters by name; the reference has none")),
    "force_use_ref_model": fixed(False, does="off", otherwise="a second model beside an adapter; see ref_model_path"),
    "generate_during_eval": fixed(False, does="off", otherwise=f"sampling in evaluations; {_ENGINES}"),
    "is_encoder_decoder": fixed(None, False, does="models are causal", otherwise="models with an encoder"),
    "base_model_attribute_name": redundant("the models of transformers are known"),
    "label_pad_token_id": redundant("rows are laid end to end without padding"),
    "padding_value": redundant("rows are laid end to end without padding"),
    "use_logits_to_keep": redundant("only answers are scored"),
    "tools": missing("tools of all rows; write them into the column tools of each"),
    "truncation_mode": fixed(
        "keep_start", "keep_end", does="pairs beyond max_length are left out, not cut", otherwise="cutting pairs"
    ),
}
"""Settings that convert independently."""

_LEFT_OUT = (
    "TRL cuts answers at max_length; here a row with a longer side is left out and counted, since a shortened answer "
    "is another one."
)


def remarks(keys: Mapping[str, Any]) -> Iterator[str]:
    """Remarks on an outcome that differs from TRL's."""
    if keys.get("max_length", 1024) is not None:
        yield _LEFT_OUT

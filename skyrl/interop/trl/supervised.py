"""Converts TRL's `SFTConfig` to `kind = "sft"`, its `RewardConfig` to `kind = "reward_model"`, its `DPOConfig` and
`KTOConfig` to `kind = "preference"`, whose settings have TRL's names, and its distillation: `DistillationConfig`, which
is reinforcement learning without rewards here, and `GKDConfig` on given rows, which is `kind = "sft"` with a teacher
beside the model.

The divergence of distillation and its `beta` mean the same: 0 is KL(teacher || student), 1 KL(student || teacher), both
averaged over all tokens of a batch (trl/trainer/distillation_trainer.py:203, trl/experimental/gkd/gkd_trainer.py:260).
`GKDTrainer` takes the divergence at temperature 1 whatever `temperature` says (line 320).

Lines are those of TRL 1.16.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from skyrl.config.settings.preference_root import PREFERENCE_LOSSES
from skyrl.interop.translation import (
    ALGORITHM,
    SAMPLING,
    Dependent,
    Entry,
    Translation,
    Values,
    dependent_of_one_model,
    dropout,
    entry_of_one_model,
    fixed,
    is_off,
    maps_to,
    missing,
    number,
    numeric,
    redundant,
    table,
    unsupported,
)
from skyrl.interop.trl.dependent import DEPENDENT, GPUS_OF_A_NODE, are_known, implied, processes, samples_per_update
from skyrl.interop.trl.keys import KEYS as KEYS_OF_GRPO
from skyrl.interop.trl.keys import SHARED, resume
from skyrl.tree.rules import join_choices
from skyrl.tree.types import display_value


def _batch(key: str, value: object, values: Values) -> Translation:
    if not are_known(values):
        return unsupported("a batch size that is not a number in the file")
    if key == "per_device_train_batch_size":
        return Translation(writes={"batch_size": samples_per_update(values), "micro_train_batch_size_per_gpu": value})
    return redundant("batch_size is derived from it")


def _packing(key: str, value: object, values: Values) -> Translation:
    """Refuse batches that are counted in packed blocks: here `batch_size` counts rows, however they are laid out."""
    if is_off(value):
        return redundant("off")
    return unsupported(
        "batches of packed blocks (sft_trainer.py:1436); without packing, rows are laid end to end anyway, and "
        "batch_size counts rows"
    )


def _order(key: str, value: object, values: Values) -> Translation:
    match value:
        case "random":
            return Translation(writes={"sampler": "random"})
        case "sequential" if not values.get("shuffle_dataset"):
            return Translation(writes={"sampler": "sequential"})
    return unsupported(f"rows in the order {display_value(value)}")


def _loss_on_all(key: str, value: object, values: Values) -> Translation:
    """Convert the choice of learned tokens (sft_trainer.py:961): by default, the completion of a row that has one."""
    if value is False:
        return unsupported("a loss on prompts, too; only completions are learned")
    return redundant("the completion of a row of prompt and completion is learned")


def _template(key: str, value: object, values: Values) -> Translation:
    if is_off(value):
        return redundant("not set: the tokenizer's own")
    if not str(value).endswith((".jinja", ".j2")):
        return unsupported("the chat template of another tokenizer; write it to a file ending in .jinja")
    return Translation(writes={"chat_template.source": "file", "chat_template.name_or_path": value})


def _averaging(key: str, value: object, values: Values) -> Translation | None:
    if value is False and values.get("num_processes", 1) != 1:
        return unsupported("a loss that each rank averages over its own tokens")
    return None


_OF_EVERY_TRAINER = (
    "max_steps", "save_strategy", "eval_strategy", "save_steps", "eval_steps", "warmup_steps", "warmup_ratio",
    "dataset_name", "datasets", "dataset_mixture", "test_split_size", "report_to", "attn_implementation", "bf16",
)  # fmt: skip

SUPERVISED: dict[str, Dependent] = {
    **{
        key: dependent_of_one_model(convert)
        for key, convert in DEPENDENT.items() if key in _OF_EVERY_TRAINER
    },
    "per_device_train_batch_size": _batch,
    "gradient_accumulation_steps": _batch,
    "disable_dropout": partial(dropout, "use_dropout", "model_name_or_path"),
    "train_sampling_strategy": _order,
    "group_by_length": lambda key, value, values: (
        redundant("off") if is_off(value) else unsupported("batches of rows of similar length")
    ),
    "chat_template_path": _template,
    **dict.fromkeys(("packing", "eval_packing"), _packing),
    "completion_only_loss": _loss_on_all,
    "average_tokens_across_devices": _averaging,
}  # fmt: skip
"""Settings whose meaning depends on others."""

KEYS: dict[str, Entry] = {
    **{key: entry_of_one_model(entry) for key, entry in SHARED.items()},
    "resume_from_checkpoint": resume("resume_from", ""),
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "gradient_checkpointing_use_reentrant"),
        redundant("it affects memory, not results"),
    ),
    "shuffle_dataset": redundant("rows are shuffled in every epoch anyway, unless sampler is sequential"),
    "router_aux_loss_coef": fixed(
        None, 0, 0.0, does="experts have no load-balancing loss", otherwise="a load-balancing loss for experts in SFT"
    ),
    "lora_task_type": fixed("CAUSAL_LM", "SEQ_CLS", does="set by kind", otherwise="other task types"),
    "bf16_full_eval": redundant("set by bf16"),
    "fp16_full_eval": redundant("set by bf16"),
    "dataset_text_field": fixed("text", does="the column of plain text", otherwise="another column of plain text"),
    "dataset_kwargs": missing("a way to prepare rows of its own; rows may be tokenized already (docs/sft.md)", {}),
    "eos_token": missing("another end-of-sequence token; chats end as their template ends them"),
    "pad_token": redundant("rows are laid end to end without padding"),
    "padding_free": redundant("rows are laid end to end without padding"),
    "pad_to_multiple_of": redundant("rows are laid end to end without padding"),
    **dict.fromkeys(("max_length", "max_seq_length"), "max_length"),
    "truncation_mode": fixed("keep_start", does="too_long cuts the end off", otherwise="cutting off the beginning"),
    "assistant_only_loss": maps_to(
        "train_on_what", convert=lambda on: "all_assistant_messages" if on else "all_tokens"
    ),
    "loss_type": fixed("nll", "chunked_nll", does="the likelihood of the learned tokens", otherwise="the loss dft"),
    "activation_offloading": "offload_activations",
    "dataloader_drop_last": redundant("epoch_tail is derived from it"),
    "center_rewards_coefficient": missing("rewards drawn towards 0 (arXiv:2312.09244)"),
    "system_prompt": redundant("only used for benchmarks"),
    "chat_template": missing("a template in the settings; write it to a file, and set chat_template"),
}
"""Settings that convert independently."""

OF_REWARDS: dict[str, Entry] = {
    **KEYS,
    "torch_compile": fixed(False, does="off", otherwise="compiling a reward model by torch.compile"),
}
"""The same for a reward model."""


def implied_by_rows(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths of a supervised run that follow from several settings."""
    if "model_name_or_path" not in values:
        return
    ranks = processes(values)
    nodes = -(-ranks // GPUS_OF_A_NODE)
    yield "implied", "device", "cpu" if values.get("use_cpu") or values.get("no_cuda") else "cuda"
    yield "implied", "placement.num_nodes", nodes
    yield "implied", "placement.num_gpus_per_node", -(-ranks // nodes)
    yield "implied", "epoch_tail", "drop" if values.get("dataloader_drop_last") else "short"
    if values.get("weight_decay"):
        yield "implied", "optimizer_config.weight_decay_on", "matrices"


def implied_by_chats(values: Values) -> Iterator[tuple[str, str, Any]]:
    """The same for fine-tuning, which cuts long rows (sft_trainer.py:1439): a reward model leaves them out
    (reward_trainer.py:734).
    """
    yield from implied_by_rows(values)
    if "assistant_only_loss" not in values:
        yield "assistant_only_loss", "train_on_what", "all_tokens"
    yield "implied", "too_long", "truncate"


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


def _cut(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant(_WHOLE)
    return unsupported(f"limits of prompt and answer of their own; {_WHOLE}")


OF_PAIRS: dict[str, Dependent] = {
    **SUPERVISED,
    **dict.fromkeys(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"), lambda key, value, values: Translation(writes={key: value})
    ),
    "loss_type": _loss,
    "rpo_alpha": _rpo,
    "label_smoothing": _smoothing,
    "max_completion_length": _cut,
    "max_prompt_length": lambda key, value, values: (
        redundant(f"TRL's default; {_WHOLE}") if value in (None, 512) else _cut(key, value, values)
    ),
}
"""Settings whose meaning depends on others."""

PAIRS: dict[str, Entry] = {
    **{key: entry for key, entry in KEYS.items() if key not in ("loss_type", "center_rewards_coefficient")},
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
    "ref_model": lambda name: (
        redundant("not set: the model that training starts from")
        if name is None
        else Translation(writes={"ref_model_path": name})
    ),
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


_OURS = ALGORITHM + "distillation."
_SAMPLED = (
    "answers that the model samples for a share lmbda of the batches; 0 learns from given rows, and where all answers "
    "are sampled, DistillationConfig is converted"
)


def _teacher(path: str, key: str, value: object, values: Values) -> Translation:
    if value is None:
        return unsupported("a teacher that is not named in the file")
    return Translation(writes={path: value})


def _teacher_arguments(value: object) -> Translation:
    """Convert arguments of the teacher's `from_pretrained`; its dtype is that of the computation."""
    rest = {*table(value)} - {"torch_dtype", "dtype", "use_cache"}
    listed = ", ".join(sorted(map(str, rest)))
    return unsupported(f"arguments of the teacher {listed}") if rest else redundant("set by bf16")


OF_DISTILLATION: dict[str, Dependent] = {
    "teacher_model_name_or_path": partial(_teacher, "trainer.teacher.model.path"),
    # answers are sampled and distributions are compared at one temperature
    "temperature": lambda key, value, values: Translation(
        writes={SAMPLING + "temperature": number(value), _OURS + "temperature": number(value)}
    ),
    "beta": lambda key, value, values: Translation(writes={_OURS + "type": "loss", _OURS + "beta": number(value)}),
}
"""Settings of `DistillationConfig` that mean something else in GRPO."""

DISTILLATION: dict[str, Entry] = {
    **KEYS_OF_GRPO,
    "teacher_model_revision": fixed(
        "main", None, does="the default revision", otherwise="other revisions of a teacher"
    ),
    "teacher_model_init_kwargs": _teacher_arguments,
}
"""Settings of `DistillationConfig` that convert independently."""


def implied_by_distillation(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that follow from several settings."""
    for source, path, value in implied({**values, "beta": 0.0}):
        yield source, path, value
        if path.startswith("trainer.placement.policy_"):
            yield source, path.replace("policy_", "teacher_"), value
    yield "distillation", _OURS + "task_coef", 0.0
    yield "distillation", ALGORITHM + "use_kl_loss", False
    yield "distillation", ALGORITHM + "loss_reduction", "token_mean"


GKD: dict[str, Entry] = {
    **{key: entry for key, entry in KEYS.items() if key != "assistant_only_loss"},
    "teacher_model_init_kwargs": _teacher_arguments,
    "lmbda": lambda share: redundant("rows are given") if is_off(number(share)) else unsupported(_SAMPLED),
    "seq_kd": fixed(False, does="off", otherwise="answers of the teacher; `skyrl generate` writes them"),
    "beta": numeric("distillation.beta"),
    **dict.fromkeys(("temperature", "max_new_tokens"), redundant("no answers are sampled")),
    "assistant_only_loss": redundant("the last message is learned"),
}
"""Settings of `GKDConfig` that convert independently."""

OF_GKD: dict[str, Dependent] = {
    **SUPERVISED,
    "teacher_model_name_or_path": partial(_teacher, "distillation.teacher_path"),
}
"""Settings of `GKDConfig` whose meaning depends on others."""


def implied_by_gkd(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that follow from several settings of `GKDConfig`."""
    yield from implied_by_rows(values)
    yield "gkd", "too_long", "truncate"
    yield "gkd", "distillation.task_coef", 0.0

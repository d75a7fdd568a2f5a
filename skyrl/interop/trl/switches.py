"""TRL's settings that turn features on, and the settings that only these features read.

Lines are those of TRL 1.16.0 and transformers 5.19.0.
"""

from __future__ import annotations

from skyrl.interop.switches import Switch
from skyrl.interop.translation import is_off, number

_GRPO = "trl/trainer/grpo_trainer.py"
_ARGUMENTS = "trl/trainer/utils.py"

SWITCHES: tuple[Switch, ...] = (
    Switch(
        key="use_peft",
        settings=("lora_*", "use_rslora", "use_dora"),
        source=f"{_ARGUMENTS}:281",
    ),
    Switch(
        key="load_in_4bit",
        settings=("bnb_4bit_*", "use_bnb_nested_quant"),
        source=f"{_ARGUMENTS}:262",
    ),
    Switch(key="use_vllm", settings=("vllm_*",), source=f"{_GRPO}:1105"),
    Switch(
        key="vllm_importance_sampling_correction",
        settings=("vllm_importance_sampling_*",),
        default=True,
        source=f"{_GRPO}:3146",
    ),
    Switch(
        key="use_transformers_continuous_batching",
        settings=("transformers_continuous_batching_config",),
        source=f"{_GRPO}:794",
    ),
    Switch(key="sync_ref_model", settings=("ref_model_mixup_alpha", "ref_model_sync_steps"), source=f"{_GRPO}:1190"),
    Switch(
        key="use_adaptive_entropy",
        settings=("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        source=f"{_GRPO}:3206",
    ),
    Switch(
        key="beta",
        settings=("use_bias_correction_kl",),
        default=0.0,
        is_off=lambda value: is_off(number(value)),
        source=f"{_GRPO}:3099",
    ),
    Switch(
        key="loss_type",
        settings=("sapo_*",),
        default="dapo",
        is_off=lambda value: value != "sapo",
        source=f"{_GRPO}:3121",
    ),
    Switch(
        key="loss_type",
        settings=("vespo_*",),
        default="dapo",
        is_off=lambda value: value != "vespo",
        source=f"{_GRPO}:3125",
    ),
    Switch(key="packing", settings=("packing_strategy",), source="trl/trainer/sft_trainer.py:916"),
    Switch(
        key="gradient_checkpointing",
        settings=("gradient_checkpointing_kwargs", "gradient_checkpointing_use_reentrant"),
        default=True,
        source="transformers/trainer.py:1503",
    ),
    Switch(key="use_liger_kernel", settings=("liger_kernel_config",), source="transformers/trainer.py:1494"),
    Switch(
        key="eval_strategy",
        settings=("eval_delay", "eval_steps", "num_generations_eval"),
        default="no",
        is_off=lambda value: value in ("no", False, None),
        source="transformers/trainer_callback.py:577",
    ),
)

"""TRL's settings that turn features on, and the settings that only these features read.

Lines are those of TRL 1.16.0 and transformers 5.19.0.
"""

from __future__ import annotations

from skyrl.interop.systems import Switch, other_than
from skyrl.interop.translation import is_off, number

_GRPO = "trl/trainer/grpo_trainer.py"
_ARGUMENTS = "trl/trainer/utils.py"

SWITCHES: tuple[Switch, ...] = (
    Switch("use_peft", ("lora_*", "use_rslora", "use_dora"), f"{_ARGUMENTS}:281"),
    Switch("load_in_4bit", ("bnb_4bit_*", "use_bnb_nested_quant"), f"{_ARGUMENTS}:262"),
    Switch("use_vllm", ("vllm_*",), f"{_GRPO}:1105"),
    Switch("vllm_importance_sampling_correction", ("vllm_importance_sampling_*",), f"{_GRPO}:3146", default=True),
    Switch("use_transformers_continuous_batching", ("transformers_continuous_batching_config",), f"{_GRPO}:794"),
    Switch("sync_ref_model", ("ref_model_mixup_alpha", "ref_model_sync_steps"), f"{_GRPO}:1190"),
    Switch(
        "use_adaptive_entropy",
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        f"{_GRPO}:3206",
    ),
    Switch(
        "beta", ("use_bias_correction_kl",), f"{_GRPO}:3099", default=0.0, is_off=lambda value: is_off(number(value))
    ),
    Switch("loss_type", ("sapo_*",), f"{_GRPO}:3121", default="dapo", is_off=other_than("sapo")),
    Switch("loss_type", ("vespo_*",), f"{_GRPO}:3125", default="dapo", is_off=other_than("vespo")),
    Switch("packing", ("packing_strategy",), "trl/trainer/sft_trainer.py:916"),
    Switch(
        "gradient_checkpointing",
        ("gradient_checkpointing_kwargs", "gradient_checkpointing_use_reentrant"),
        "transformers/trainer.py:1503",
        default=True,
    ),
    Switch("use_liger_kernel", ("liger_kernel_config",), "transformers/trainer.py:1494"),
    Switch(
        "eval_strategy",
        ("eval_delay", "eval_steps", "num_generations_eval"),
        "transformers/trainer_callback.py:577",
        default="no",
        is_off=lambda value: value in ("no", False, None),
    ),
)

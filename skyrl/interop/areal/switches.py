"""AReaL's settings that turn features on. Lines of its source are those of version 2.0.0."""

from __future__ import annotations

from skyrl.interop.systems import Switch
from skyrl.interop.translation import number

SWITCHES: tuple[Switch, ...] = (
    Switch(
        "actor.overlong_reward_penalty",
        ("actor.overlong_tokens", "actor.overlong_penalty_factor", "actor.max_new_tokens"),
        "areal/trainer/ppo/actor.py:187",
    ),
    # Without the decoupled loss, both log-probabilities are the same tensor: their ratio is 1, which nothing rejects.
    Switch(
        "actor.use_decoupled_loss",
        ("actor.prox_logp_method", "actor.rejection_sampling*"),
        "areal/trainer/ppo/actor.py:229",
    ),
    Switch(
        "actor.gae_lambda",
        ("actor.gae_lambda_kwargs*",),
        "areal/trainer/ppo/actor.py:90",
        default=1.0,
        is_off=lambda value: not isinstance(number(value), str),
    ),
    Switch("actor.use_sapo_loss", ("actor.sapo_tau_*",), "areal/trainer/ppo/actor.py:598"),
    Switch(
        "*.enable_delta_weight_update",
        ("*.weight_update_delta_method", "*.weight_update_anchor_interval"),
        "areal/utils/dte.py:25",
    ),
    # The reference model exists only for the penalty.
    Switch("actor.kl_ctl", ("ref.*",), "areal/trainer/rl_trainer.py:205", default=0.1),
    Switch(
        "*.use_lora",
        ("*.lora_rank", "*.lora_alpha", "*.target_modules", "*.peft_type"),
        "areal/engine/fsdp_engine.py:401",
    ),
    Switch(
        "*.gradient_checkpointing",
        ("*.megatron.recompute_*", "*.megatron.distribute_saved_activations"),
        "areal/engine/megatron_engine.py:722",
    ),
    Switch(
        "*.gradient_checkpointing",
        ("*.archon.ac_*", "*.archon.selective_ac_option"),
        "areal/experimental/engine/archon_utils.py:119",
    ),
    Switch(
        "*.archon.fp8_config.mode",
        ("*.archon.fp8_config.*",),
        "areal/api/cli_args.py:587",
        default="disabled",
        is_off=lambda mode: mode in (None, "disabled"),
    ),
    Switch("*.fsdp.per_layer_optim_step", ("*.fsdp.optim_step_prefetch_layers",), "areal/engine/fsdp_engine.py:473"),
)

SUPERVISED_SWITCHES: tuple[Switch, ...] = tuple(switch for switch in SWITCHES if switch.key.startswith("*."))
"""The switches of a single model, which is `model` in every supervised run."""

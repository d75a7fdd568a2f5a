"""AReaL's settings that turn features on. Lines of its source are those of version 2.0.0."""

from __future__ import annotations

from skyrl.interop.switches import Switch
from skyrl.interop.translation import number

SWITCHES: tuple[Switch, ...] = (
    Switch(
        key="actor.overlong_reward_penalty",
        settings=("actor.overlong_tokens", "actor.overlong_penalty_factor", "actor.max_new_tokens"),
        source="areal/trainer/ppo/actor.py:187",
    ),
    # Without the decoupled loss, both log-probabilities are the same tensor: their ratio is 1, which nothing rejects.
    Switch(
        key="actor.use_decoupled_loss",
        settings=("actor.prox_logp_method", "actor.rejection_sampling*"),
        source="areal/trainer/ppo/actor.py:229",
    ),
    Switch(
        key="actor.gae_lambda",
        settings=("actor.gae_lambda_kwargs*",),
        default=1.0,
        is_off=lambda value: not isinstance(number(value), str),
        source="areal/trainer/ppo/actor.py:90",
    ),
    Switch(key="actor.use_sapo_loss", settings=("actor.sapo_tau_*",), source="areal/trainer/ppo/actor.py:598"),
    Switch(
        key="*.enable_delta_weight_update",
        settings=("*.weight_update_delta_method", "*.weight_update_anchor_interval"),
        source="areal/utils/dte.py:25",
    ),
    # The reference model exists only for the penalty.
    Switch(key="actor.kl_ctl", default=0.1, settings=("ref.*",), source="areal/trainer/rl_trainer.py:205"),
    Switch(
        key="*.use_lora",
        settings=("*.lora_rank", "*.lora_alpha", "*.target_modules", "*.peft_type"),
        source="areal/engine/fsdp_engine.py:401",
    ),
    Switch(
        key="*.gradient_checkpointing",
        settings=("*.megatron.recompute_*", "*.megatron.distribute_saved_activations"),
        source="areal/engine/megatron_engine.py:722",
    ),
    Switch(
        key="*.gradient_checkpointing",
        settings=("*.archon.ac_*", "*.archon.selective_ac_option"),
        source="areal/experimental/engine/archon_utils.py:119",
    ),
    Switch(
        key="*.archon.fp8_config.mode",
        settings=("*.archon.fp8_config.*",),
        default="disabled",
        is_off=lambda mode: mode in (None, "disabled"),
        source="areal/api/cli_args.py:587",
    ),
    Switch(
        key="*.fsdp.per_layer_optim_step",
        settings=("*.fsdp.optim_step_prefetch_layers",),
        source="areal/engine/fsdp_engine.py:473",
    ),
)

SUPERVISED_SWITCHES: tuple[Switch, ...] = tuple(switch for switch in SWITCHES if switch.key.startswith("*."))
"""The switches of a single model, which is `model` in every supervised run."""

"""verl's settings of GPUs, micro-batches, engines, data and exports that depend on one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config.settings.strategies import has_own_modules
from skyrl.interop.conversions import ENGINE, Becomes
from skyrl.interop.foreign import Together, Values, needless, off, whole
from skyrl.interop.verl.objective import ACTOR, has_critic

_ROLLOUT = "actor_rollout_ref.rollout."
_REF = "actor_rollout_ref.ref."
_MODEL = "actor_rollout_ref.model."
_VLLM = ENGINE + "engine_init_kwargs."
_LEAST = "one setting for all models; it does not affect results"
_TOKENS = "one setting for all models: trainer.max_tokens_per_microbatch; it does not affect results"
_TRACKERS = ("console", "wandb", "tensorboard", "mlflow", "swanlab")
_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_MEGATRON_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
_MEGATRON_NEEDLESS = (
    "param_offload", "grad_offload", "optimizer_offload", "use_mbridge", "vanilla_mbridge",
    "seed", "use_remove_padding",
)  # fmt: skip
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")


def layout(values: Values) -> Mapping[str, Any]:
    """Our paths that follow from nodes, GPUs and parallel sizes together."""
    if _MODEL + "path" not in values:
        return {}
    nodes, gpus = whole(values.get("trainer.nnodes")), whole(values.get("trainer.n_gpus_per_node"), default=8)
    has_reference = values.get(ACTOR + "use_kl_loss") or values.get("algorithm.use_kl_in_reward")
    models = ["policy"] + ["ref"] * bool(has_reference) + ["critic"] * has_critic(values)
    found: dict[str, Any] = {"trainer.device": "cuda", "trainer.placement.colocate_all": True}
    for model in models:
        found[f"trainer.placement.{model}_num_nodes"] = nodes
        found[f"trainer.placement.{model}_num_gpus_per_node"] = gpus
    of_one = _gpus_of_an_engine(values)
    if nodes * gpus % of_one == 0:
        found[ENGINE + "num_engines"] = nodes * gpus // of_one
    return found


def _gpus_of_an_engine(values: Values) -> int:
    size = 1
    for name in _SIZES:
        size *= max(whole(values.get(_ROLLOUT + name)), 1)
    return size


def _machines(key: str, value: object, values: Values) -> Becomes:
    ours = {"trainer.nnodes": "num_nodes", "trainer.n_gpus_per_node": "num_gpus_per_node"}[key]
    if not isinstance(value, int):
        return Becomes(refused=f"{value!r} is not a number of nodes or GPUs: replace it with its value")
    return Becomes(writes={f"trainer.placement.policy_{ours}": value})


def _engine_size(key: str, value: object, values: Values) -> Becomes:
    gpus = whole(values.get("trainer.nnodes")) * whole(values.get("trainer.n_gpus_per_node"), default=8)
    if gpus % _gpus_of_an_engine(values):
        return Becomes(refused=f"{gpus} GPUs cannot be split into engines of {_gpus_of_an_engine(values)} GPUs")
    name = key.rpartition(".")[2].replace("_model", "")
    return Becomes(writes={ENGINE + name: value})


def _engine(key: str, value: object, values: Values) -> Becomes:
    if value == "vllm":
        return Becomes(writes={ENGINE + "backend": "vllm"})
    if value == "sglang":
        return Becomes(writes={ENGINE + "backend": "vllm"}, note="SGLang engines become vLLM engines")
    if value == "hf":
        return Becomes(writes={ENGINE + "backend": "torch"})
    return Becomes(not_yet=f"engine {value!r}; see generator.inference_engine.backend")


def _engine_option(key: str, value: object, values: Values) -> Becomes:
    """Convert `engine_kwargs.vllm.NAME`; options of other engines have no effect if the engine is vLLM."""
    _, _, rest = key.partition(".engine_kwargs.")
    engine, _, name = rest.partition(".")
    used = values.get(_ROLLOUT + "name", "vllm")
    if engine != used or off(value):
        return needless("no effect at this value" if engine == used else f"no effect: the engine is {used}")
    return Becomes(writes={_VLLM + name: value}) if engine == "vllm" else Becomes(not_yet=f"{engine} options")


def _strategy(key: str, value: object, values: Values) -> Becomes:
    if key != ACTOR + "strategy":
        return needless("one setting for all models: trainer.strategy")
    if value not in _STRATEGIES:
        return Becomes(not_yet=f"strategy {value!r}")
    return Becomes(writes={"trainer.strategy": value})


def _tokens(key: str, value: object, values: Values) -> Becomes:
    if not values.get(ACTOR + "use_dynamic_bsz"):
        return needless("use_dynamic_bsz is off")
    if key == ACTOR + "ppo_max_token_len_per_gpu":
        return Becomes(writes={"trainer.max_tokens_per_microbatch": value})
    return needless(_TOKENS)


def _dynamic(key: str, value: object, values: Values) -> Becomes:
    if key != ACTOR + "use_dynamic_bsz" or not value or ACTOR + "ppo_max_token_len_per_gpu" in values:
        return needless(_TOKENS if value else "micro-batches are counted in rows")
    return Becomes(writes={"trainer.max_tokens_per_microbatch": 16384})


def _rows(key: str, value: object, values: Values) -> Becomes:
    """Convert the rows of a micro-batch, given per GPU or for all GPUs together."""
    if value is None:
        return needless("not set")
    if values.get(ACTOR + "use_dynamic_bsz"):
        return needless("micro-batches are counted in tokens")
    if not key.startswith((ACTOR, _ROLLOUT)):
        return needless(_LEAST)
    if not key.endswith("_per_gpu"):
        gpus = whole(values.get("trainer.nnodes")) * whole(values.get("trainer.n_gpus_per_node"), default=8)
        value = max(value // gpus, 1) if isinstance(value, int) else value
    name = "micro_train_batch_size_per_gpu" if key.startswith(ACTOR) else "micro_forward_batch_size_per_gpu"
    return Becomes(writes={f"trainer.{name}": value})


def _megatron(key: str, value: object, values: Values) -> Becomes:
    if not has_own_modules(values.get(ACTOR + "strategy")):
        return needless("no effect: the strategy is not megatron")
    owner, _, name = key.partition(".megatron.")
    table = {"critic": "critic"}.get(owner, "ref" if key.startswith(_REF) else "policy")
    if name in _MEGATRON_SIZES:
        return Becomes(writes={f"trainer.{table}.megatron_config.{name}": value})
    if name.startswith("override_transformer_config."):
        option = name.partition(".")[2]
        return Becomes(writes={f"trainer.{table}.megatron_config.transformer_config_kwargs.{option}": value})
    if name in _MEGATRON_NEEDLESS or off(value):
        return needless("no effect at this value" if off(value) else "done automatically")
    return Becomes(not_yet="this Megatron option")


def _of_fsdp(name: str) -> Together:
    return lambda key, value, values: (
        needless("no effect: the strategy is megatron")
        if has_own_modules(values.get(ACTOR + "strategy"))
        else Becomes(writes={_ours(key) + name: value})
    )


def _dtype(name: str) -> Together:
    """Convert a dtype of FSDP, which is written only where it differs from our default."""
    usual, why = {
        "param_dtype": (("bf16", "bfloat16"), "set by trainer.bf16"),
        "reduce_dtype": (("fp32", "float32"), "gradients are summed in float32"),
        "buffer_dtype": (("fp32", "float32"), "buffers are float32"),
    }[name]

    def become(key: str, value: object, values: Values) -> Becomes:
        if name == "reduce_dtype" and key.startswith(_REF):
            return needless("the reference model has no gradients")
        if value is None or value in usual:
            return needless(why)
        return _of_fsdp(f"fsdp_config.mixed_precision.{name}")(key, value, values)

    return become


def _ours(key: str) -> str:
    return "trainer.critic." if key.startswith("critic.") else f"trainer.{'ref' if key.startswith(_REF) else 'policy'}."


def _truncation(key: str, value: object, values: Values) -> Becomes:
    if values.get("data.filter_overlong_prompts") or value == "error":
        return needless("longer prompts are skipped and counted")
    return Becomes(not_yet="truncating prompts; those longer than trainer.max_prompt_length are skipped and counted")


def _contents(key: str, value: object, values: Values) -> Becomes:
    if isinstance(value, list) and "hf_model" in value:
        return Becomes(writes={"trainer.hf_save_interval": values.get("trainer.save_freq", -1)})
    return needless("checkpoints always contain all that resuming needs")


def _warm_up(key: str, value: object, values: Values) -> Becomes:
    """Convert the warmup; verl's schedules count training steps."""
    table, _, name = key.rpartition(".")
    ours = _optimizer(key)
    if name == "lr_warmup_steps":
        if off(value) or value == -1:
            return needless("set by lr_warmup_steps_ratio")
        return Becomes(writes={ours + "num_warmup_steps": value, ours + "schedule_unit": "training_step"})
    steps = values.get(f"{table}.lr_warmup_steps")
    if off(value) or (isinstance(steps, int) and steps > 0):
        return needless("set by lr_warmup_steps" if not off(value) else "no effect at this value")
    return Becomes(writes={ours + "warmup_steps_proportion": value, ours + "schedule_unit": "training_step"})


def _scheduler(key: str, value: object, values: Values) -> Becomes:
    if value is None:
        return needless("set by lr_scheduler_type")
    if value not in ("constant", "cosine"):
        return Becomes(refused=f"unknown schedule {value!r}; verl supports: constant, cosine")
    name = "constant_with_warmup" if value == "constant" else "cosine"
    return Becomes(writes={_optimizer(key) + "scheduler": name, _optimizer(key) + "schedule_unit": "training_step"})


def _optimizer(key: str) -> str:
    return ("trainer.critic." if key.startswith("critic.") else "trainer.policy.") + "optimizer_config."


def _clipping(key: str, value: object, values: Values) -> Becomes:
    """Convert the model's `grad_clip`, or `optim.clip_grad` of another version; the former takes precedence."""
    owner = "critic." if key.startswith("critic.") else ACTOR
    if key.endswith("clip_grad") and owner + "grad_clip" in values:
        return needless("set by grad_clip")
    return Becomes(writes={_optimizer(key) + "max_grad_norm": value})


def _trackers(key: str, value: object, values: Values) -> Becomes:
    asked = value if isinstance(value, list) else [value]
    ours = [name for name in asked if name in _TRACKERS]
    if len(ours) < len(asked):
        missing = ", ".join(str(name) for name in asked if name not in _TRACKERS)
        return Becomes(not_yet=f"tracker {missing}; supported: {', '.join(_TRACKERS)}")
    return Becomes(writes={"trainer.logger": ours})


def _resume(key: str, value: object, values: Values) -> Becomes:
    modes = {"auto": "latest", "disable": "none", "resume_path": "from_path"}
    if value not in modes:
        return Becomes(refused=f"unknown resume_mode {value!r}; verl supports: {', '.join(modes)}")
    return Becomes(writes={"trainer.resume_mode": modes[value]})


def _reward_model(key: str, value: object, values: Values) -> Becomes:
    if off(values.get("reward_model.enable")) and key != "reward_model.enable":
        return needless("reward_model.enable is off")
    if off(value):
        return needless("off")
    if key not in ("reward_model.enable", "reward_model.model.path"):
        return needless("only used with reward_model.enable, which is not implemented")
    return Becomes(
        not_yet='converting reward models; set environment.env_class = "reward_model" (docs/environments.md)'
    )


def _profile(key: str, value: object, values: Values) -> Becomes:
    return needless("trainer.profile_steps profiles the listed steps")


def _turns(key: str, value: object, values: Values) -> Becomes:
    if not values.get(_ROLLOUT + "multi_turn.enable") and off(values.get(_ROLLOUT + "multi_turn.tool_config_path")):
        return needless("multi_turn.enable is off")
    name = key.rpartition(".")[2]
    if name == "max_assistant_turns" and value:
        return Becomes(writes={"generator.max_turns": value})
    if off(value) or name == "enable":
        return needless("no effect at this value" if off(value) else "environments decide on further turns")
    return Becomes(
        not_yet="converting verl's tools and interactions, which are environments here (docs/environments.md)"
    )


def _template(key: str, value: object, values: Values) -> Becomes:
    return Becomes(writes={f"generator.chat_template_kwargs.{key.partition('apply_chat_template_kwargs.')[2]}": value})


def _override(key: str, value: object, values: Values) -> Becomes:
    name = key.partition("override_config.")[2].removeprefix("model_config.")
    return Becomes(writes={f"{_ours(key)}model_config_kwargs.{name}": value})


LAYOUT: Mapping[str, Together] = {
    "reward_model.*": _reward_model,
    "trainer.nnodes": _machines,
    "trainer.n_gpus_per_node": _machines,
    "trainer.logger": _trackers,
    "trainer.resume_mode": _resume,
    "data.truncation": _truncation,
    "data.apply_chat_template_kwargs.*": _template,
    **{_ROLLOUT + name: _engine_size for name in _SIZES},
    _ROLLOUT + "name": _engine,
    _ROLLOUT + "engine_kwargs.*": _engine_option,
    _ROLLOUT + "multi_turn.*": _turns,
    "*.strategy": _strategy,
    "*.megatron.*": _megatron,
    "*.use_dynamic_bsz": _dynamic,
    "*.log_prob_use_dynamic_bsz": _dynamic,
    "*_max_token_len_per_gpu": _tokens,
    "*micro_batch_size": _rows,
    "*micro_batch_size_per_gpu": _rows,
    "*.save_contents": _contents,
    "*.lr_warmup_steps": _warm_up,
    "*.lr_warmup_steps_ratio": _warm_up,
    "*.lr_scheduler_type": _scheduler,
    "*.warmup_style": _scheduler,
    "*.grad_clip": _clipping,
    "*.clip_grad": _clipping,
    "*.fsdp_config.offload_policy": _of_fsdp("fsdp_config.cpu_offload"),
    "*.fsdp_config.reshard_after_forward": _of_fsdp("fsdp_config.reshard_after_forward"),
    "*.fsdp_config.fsdp_size": _of_fsdp("fsdp_config.fsdp_size"),
    "*.fsdp_config.dtype": _dtype("param_dtype"),
    "*.fsdp_config.mixed_precision.param_dtype": _dtype("param_dtype"),
    "*.fsdp_config.mixed_precision.reduce_dtype": _dtype("reduce_dtype"),
    "*.fsdp_config.mixed_precision.buffer_dtype": _dtype("buffer_dtype"),
    _REF + "fsdp_config.param_offload": _of_fsdp("fsdp_config.cpu_offload"),
    "*.optimizer_offload": _of_fsdp("optimizer_config.offload_after_step"),
    "*.ulysses_sequence_parallel_size": _of_fsdp("sequence_parallel_size"),
    "*profiler.*": _profile,
    _MODEL + "override_config.*": _override,
    "critic.model.override_config.*": _override,
}

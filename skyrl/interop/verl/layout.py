"""verl's settings of GPUs, micro-batches, engines, data and exports that depend on one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.config.settings.strategies import has_own_modules
from skyrl.interop.translation import (
    ENGINE,
    Dependent,
    Translation,
    Values,
    count,
    is_off,
    redundant,
    refused,
    unsupported,
    word,
)
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


def layout(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that follow from nodes, GPUs and parallel sizes together."""
    if _MODEL + "path" not in values:
        return
    nodes, gpus = count(values.get("trainer.nnodes")), count(values.get("trainer.n_gpus_per_node"), default=8)
    has_reference = values.get(ACTOR + "use_kl_loss") or values.get("algorithm.use_kl_in_reward")
    models = ["policy"] + ["ref"] * bool(has_reference) + ["critic"] * has_critic(values)
    paths: dict[str, Any] = {"trainer.device": "cuda", "trainer.placement.colocate_all": True}
    for model in models:
        paths[f"trainer.placement.{model}_num_nodes"] = nodes
        paths[f"trainer.placement.{model}_num_gpus_per_node"] = gpus
    of_one = _gpus_of_an_engine(values)
    if nodes * gpus % of_one == 0:
        paths[ENGINE + "num_engines"] = nodes * gpus // of_one
    yield from (("implied", path, value) for path, value in paths.items())


def _gpus_of_an_engine(values: Values) -> int:
    size = 1
    for name in _SIZES:
        size *= max(count(values.get(_ROLLOUT + name)), 1)
    return size


def _machines(key: str, value: object, values: Values) -> Translation:
    ours = {"trainer.nnodes": "num_nodes", "trainer.n_gpus_per_node": "num_gpus_per_node"}[key]
    if not isinstance(value, int):
        return refused(f"{value!r} is not a number of nodes or GPUs: replace it with its value")
    return Translation(writes={f"trainer.placement.policy_{ours}": value})


def _engine_size(key: str, value: object, values: Values) -> Translation:
    gpus = count(values.get("trainer.nnodes")) * count(values.get("trainer.n_gpus_per_node"), default=8)
    if gpus % _gpus_of_an_engine(values):
        return refused(f"{gpus} GPUs cannot be split into engines of {_gpus_of_an_engine(values)} GPUs")
    name = key.rpartition(".")[2].replace("_model", "")
    return Translation(writes={ENGINE + name: value})


def _engine(key: str, value: object, values: Values) -> Translation:
    if value == "vllm":
        return Translation(writes={ENGINE + "backend": "vllm"})
    if value == "sglang":
        return Translation(writes={ENGINE + "backend": "vllm"}, note="SGLang engines become vLLM engines")
    if value == "hf":
        return Translation(writes={ENGINE + "backend": "torch"})
    return unsupported(f"engine {value!r}; see generator.inference_engine.backend")


def _engine_option(key: str, value: object, values: Values) -> Translation:
    """Convert `engine_kwargs.vllm.NAME`; options of other engines have no effect if the engine is vLLM."""
    _, _, rest = key.partition(".engine_kwargs.")
    engine, _, name = rest.partition(".")
    used = values.get(_ROLLOUT + "name", "vllm")
    if engine != used or is_off(value):
        return redundant("no effect at this value" if engine == used else f"no effect: the engine is {used}")
    return Translation(writes={_VLLM + name: value}) if engine == "vllm" else unsupported(f"{engine} options")


def _strategy(key: str, value: object, values: Values) -> Translation:
    if key != ACTOR + "strategy":
        return redundant("one setting for all models: trainer.strategy")
    if value not in _STRATEGIES:
        return unsupported(f"strategy {value!r}")
    return Translation(writes={"trainer.strategy": value})


def _tokens(key: str, value: object, values: Values) -> Translation:
    if not values.get(ACTOR + "use_dynamic_bsz"):
        return redundant("use_dynamic_bsz is off")
    if key == ACTOR + "ppo_max_token_len_per_gpu":
        return Translation(writes={"trainer.max_tokens_per_microbatch": value})
    return redundant(_TOKENS)


def _dynamic(key: str, value: object, values: Values) -> Translation:
    if key != ACTOR + "use_dynamic_bsz" or not value or ACTOR + "ppo_max_token_len_per_gpu" in values:
        return redundant(_TOKENS if value else "micro-batches are counted in rows")
    return Translation(writes={"trainer.max_tokens_per_microbatch": 16384})


def _rows(key: str, value: object, values: Values) -> Translation:
    """Convert the rows of a micro-batch, given per GPU or for all GPUs together."""
    if value is None:
        return redundant("not set")
    if values.get(ACTOR + "use_dynamic_bsz"):
        return redundant("micro-batches are counted in tokens")
    if not key.startswith((ACTOR, _ROLLOUT)):
        return redundant(_LEAST)
    if not key.endswith("_per_gpu"):
        gpus = count(values.get("trainer.nnodes")) * count(values.get("trainer.n_gpus_per_node"), default=8)
        value = max(value // gpus, 1) if isinstance(value, int) else value
    name = "micro_train_batch_size_per_gpu" if key.startswith(ACTOR) else "micro_forward_batch_size_per_gpu"
    return Translation(writes={f"trainer.{name}": value})


def _megatron(key: str, value: object, values: Values) -> Translation:
    if not has_own_modules(values.get(ACTOR + "strategy")):
        return redundant("no effect: the strategy is not megatron")
    owner, _, name = key.partition(".megatron.")
    table = {"critic": "critic"}.get(owner, "ref" if key.startswith(_REF) else "policy")
    if name in _MEGATRON_SIZES:
        return Translation(writes={f"trainer.{table}.megatron_config.{name}": value})
    if name.startswith("override_transformer_config."):
        option = name.partition(".")[2]
        return Translation(writes={f"trainer.{table}.megatron_config.transformer_config_kwargs.{option}": value})
    if name in _MEGATRON_NEEDLESS or is_off(value):
        return redundant("no effect at this value" if is_off(value) else "done automatically")
    return unsupported("this Megatron option")


def _of_fsdp(name: str) -> Dependent:
    return lambda key, value, values: (
        redundant("no effect: the strategy is megatron")
        if has_own_modules(values.get(ACTOR + "strategy"))
        else Translation(writes={_ours(key) + name: value})
    )


def _dtype(name: str) -> Dependent:
    """Convert a dtype of FSDP, which is written only where it differs from our default."""
    usual, why = {
        "param_dtype": (("bf16", "bfloat16"), "set by trainer.bf16"),
        "reduce_dtype": (("fp32", "float32"), "gradients are summed in float32"),
        "buffer_dtype": (("fp32", "float32"), "buffers are float32"),
    }[name]

    def become(key: str, value: object, values: Values) -> Translation | None:
        if name == "reduce_dtype" and key.startswith(_REF):
            return redundant("the reference model has no gradients")
        if value is None or value in usual:
            return redundant(why)
        return _of_fsdp(f"fsdp_config.mixed_precision.{name}")(key, value, values)

    return become


def _ours(key: str) -> str:
    return "trainer.critic." if key.startswith("critic.") else f"trainer.{'ref' if key.startswith(_REF) else 'policy'}."


def _truncation(key: str, value: object, values: Values) -> Translation:
    if values.get("data.filter_overlong_prompts") or value == "error":
        return redundant("longer prompts are skipped and counted")
    return unsupported("truncating prompts; those longer than trainer.max_prompt_length are skipped and counted")


def _contents(key: str, value: object, values: Values) -> Translation:
    if isinstance(value, list) and "hf_model" in value:
        return Translation(writes={"trainer.hf_save_interval": values.get("trainer.save_freq", -1)})
    return redundant("checkpoints always contain all that resuming needs")


def _warm_up(key: str, value: object, values: Values) -> Translation:
    """Convert the warmup; verl's schedules count training steps."""
    table, _, name = key.rpartition(".")
    ours = _optimizer(key)
    if name == "lr_warmup_steps":
        if is_off(value) or value == -1:
            return redundant("set by lr_warmup_steps_ratio")
        return Translation(writes={ours + "num_warmup_steps": value, ours + "schedule_unit": "training_step"})
    steps = values.get(f"{table}.lr_warmup_steps")
    if is_off(value) or (isinstance(steps, int) and steps > 0):
        return redundant("set by lr_warmup_steps" if not is_off(value) else "no effect at this value")
    return Translation(writes={ours + "warmup_steps_proportion": value, ours + "schedule_unit": "training_step"})


def _scheduler(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant("set by lr_scheduler_type")
    if value not in ("constant", "cosine"):
        return refused(f"unknown schedule {value!r}; verl supports: constant, cosine")
    name = "constant_with_warmup" if value == "constant" else "cosine"
    return Translation(writes={_optimizer(key) + "scheduler": name, _optimizer(key) + "schedule_unit": "training_step"})


def _optimizer(key: str) -> str:
    return ("trainer.critic." if key.startswith("critic.") else "trainer.policy.") + "optimizer_config."


def _clipping(key: str, value: object, values: Values) -> Translation:
    """Convert the model's `grad_clip`, or `optim.clip_grad` of another version; the former takes precedence."""
    owner = "critic." if key.startswith("critic.") else ACTOR
    if key.endswith("clip_grad") and owner + "grad_clip" in values:
        return redundant("set by grad_clip")
    return Translation(writes={_optimizer(key) + "max_grad_norm": value})


def _trackers(key: str, value: object, values: Values) -> Translation:
    trackers = value if isinstance(value, list) else [value]
    ours = [name for name in trackers if name in _TRACKERS]
    if len(ours) < len(trackers):
        missing = ", ".join(str(name) for name in trackers if name not in _TRACKERS)
        return unsupported(f"tracker {missing}; supported: {', '.join(_TRACKERS)}")
    return Translation(writes={"trainer.logger": ours})


def _resume(key: str, value: object, values: Values) -> Translation:
    modes = {"auto": "latest", "disable": "none", "resume_path": "from_path"}
    if word(value, modes) not in modes:
        return refused(f"unknown resume_mode {value!r}; verl supports: {', '.join(modes)}")
    return Translation(writes={"trainer.resume_mode": modes[str(value)]})


def _resume_path(key: str, value: object, values: Values) -> Translation:
    if is_off(value) or values.get("trainer.resume_mode", "auto") != "resume_path":
        return redundant("no effect: resume_mode is not resume_path")
    return Translation(writes={"trainer.resume_path": value})


def _reward_model(key: str, value: object, values: Values) -> Translation:
    if is_off(values.get("reward_model.enable")) and key != "reward_model.enable":
        return redundant("reward_model.enable is off")
    if is_off(value):
        return redundant("off")
    if key not in ("reward_model.enable", "reward_model.model.path"):
        return redundant("only used with reward_model.enable, which is not implemented")
    return unsupported('converting reward models; set environment.env_class = "reward_model" (docs/environments.md)')


def _turns(key: str, value: object, values: Values) -> Translation:
    if not values.get(_ROLLOUT + "multi_turn.enable") and is_off(values.get(_ROLLOUT + "multi_turn.tool_config_path")):
        return redundant("multi_turn.enable is off")
    name = key.rpartition(".")[2]
    if name == "max_assistant_turns" and value:
        return Translation(writes={"generator.max_turns": value})
    if is_off(value) or name == "enable":
        return redundant("no effect at this value" if is_off(value) else "environments decide on further turns")
    return unsupported("converting verl's tools and interactions, which are environments here (docs/environments.md)")


def _template(key: str, value: object, values: Values) -> Translation:
    return Translation(
        writes={f"generator.chat_template_kwargs.{key.partition('apply_chat_template_kwargs.')[2]}": value}
    )


def _override(key: str, value: object, values: Values) -> Translation:
    name = key.partition("override_config.")[2].removeprefix("model_config.")
    return Translation(writes={f"{_ours(key)}model_config_kwargs.{name}": value})


LAYOUT: dict[str, Dependent] = {
    "reward_model.*": _reward_model,
    "trainer.nnodes": _machines,
    "trainer.n_gpus_per_node": _machines,
    "trainer.logger": _trackers,
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": _resume_path,
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
    _REF + "fsdp_config.optimizer_offload": lambda key, value, values: redundant(
        "the reference model has no optimizer"
    ),
    _REF + "fsdp_config.param_offload": _of_fsdp("fsdp_config.cpu_offload"),
    "*.optimizer_offload": _of_fsdp("optimizer_config.offload_after_step"),
    "*.ulysses_sequence_parallel_size": _of_fsdp("sequence_parallel_size"),
    "*profiler.*": lambda key, value, values: redundant("trainer.profile_steps profiles the listed steps"),
    _MODEL + "override_config.*": _override,
    "critic.model.override_config.*": _override,
}

"""verl's settings of GPUs, micro-batches, engines, data and exports that depend on one another."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any

from skyrl.config.settings.learners import sets_dropout
from skyrl.config.settings.strategies import has_own_modules
from skyrl.interop.translation import (
    ENGINE,
    Dependent,
    Translation,
    Values,
    count,
    independent,
    is_off,
    number,
    real,
    redundant,
    refused,
    unsupported,
    word,
)
from skyrl.interop.verl.asynchronous import ENGINE_SIZES, ROLLOUT, engine_gpus, gpus_of_an_engine, mode_of
from skyrl.interop.verl.objective import ACTOR, has_critic, has_v1, longest_answer
from skyrl.tree.types import display_value

_REF = "actor_rollout_ref.ref."
_MODEL = "actor_rollout_ref.model."
_VLLM = ENGINE + "engine_init_kwargs."
_TOKENS = "one setting for all models: trainer.max_tokens_per_microbatch; it does not affect results"
_TRACKERS = ("console", "wandb", "tensorboard", "mlflow", "swanlab")
_STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp2", "dp": "fsdp2", "megatron": "megatron"}
_MEGATRON_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
_MEGATRON_PLACES = (
    "param_offload", "grad_offload", "optimizer_offload", "use_mbridge", "vanilla_mbridge", "use_remove_padding",
    "sequence_parallel", "use_distributed_optimizer", "forward_only", "seed",
    "dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient",
)  # fmt: skip
"""Where weights and states lie and how they are stored: learners choose it themselves."""

_MEGATRON_SPEED = ("entropy_from_logits_*", "pad_to_length*", "pad_bshd_to_minibatch_max")
_ADAPTER = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora.*")


def layout(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that follow from nodes, GPUs and parallel sizes together."""
    if _MODEL + "path" not in values:
        return
    nodes, gpus = count(values.get("trainer.nnodes")), count(values.get("trainer.n_gpus_per_node"), default=8)
    models = ["policy"] + ["ref"] * has_reference(values) + ["critic"] * has_critic(values)
    models += ["teacher"] * bool(values.get("distillation.enabled"))
    engines = engine_gpus(values)
    paths: dict[str, Any] = {"trainer.device": "cuda", "trainer.placement.colocate_all": not engines}
    for model in models:
        paths[f"trainer.placement.{model}_num_nodes"] = nodes
        paths[f"trainer.placement.{model}_num_gpus_per_node"] = gpus
    if mode_of(values) == "one_step_off":  # the next batch is sampled before, and completed before the transfer
        one_step = {"enabled": True, "max_staleness_steps": 1, "interrupt_generation": False}
        paths |= {f"trainer.fully_async.{name}": value for name, value in one_step.items()}
    of_one, gpus_of_engines = gpus_of_an_engine(values), engines or nodes * gpus
    if gpus_of_engines % of_one == 0:
        paths[ENGINE + "num_engines"] = gpus_of_engines // of_one
    yield from (("implied", path, value) for path, value in paths.items())


def has_reference(values: Values) -> bool:
    """Whether there is a reference model: a KL term needs one."""
    return bool(values.get(ACTOR + "use_kl_loss") or values.get("algorithm.use_kl_in_reward"))


def _machines(key: str, value: object, values: Values) -> Translation:
    ours = {"trainer.nnodes": "num_nodes", "trainer.n_gpus_per_node": "num_gpus_per_node"}[key]
    if not isinstance(value, int):
        return refused(f"{display_value(value)} is not a number of nodes or GPUs: replace it with its value")
    return Translation(writes={f"trainer.placement.policy_{ours}": value})


def _learner_gpus(values: Values) -> int:
    return count(values.get("trainer.nnodes")) * count(values.get("trainer.n_gpus_per_node"), default=8)


def _engine_size(key: str, value: object, values: Values) -> Translation:
    gpus, of_one = engine_gpus(values) or _learner_gpus(values), gpus_of_an_engine(values)
    if gpus % of_one:
        return refused(f"{gpus} GPUs cannot be split into engines of {of_one} GPUs")
    name = key.rpartition(".")[2].replace("_model", "")
    return Translation(writes={ENGINE + name: value})


def _engine(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant("not set")
    ours = {"vllm": "vllm", "sglang": "vllm", "hf": "torch"}.get(str(value))
    if ours is None:
        return unsupported(f"engine {display_value(value)}; see generator.inference_engine.backend")
    note = "SGLang engines become vLLM engines" if value == "sglang" else ""
    return Translation(writes={ENGINE + "backend": ours}, note=note)


def _engine_option(key: str, value: object, values: Values) -> Translation:
    """Convert `engine_kwargs.vllm.NAME`; options of other engines have no effect if the engine is vLLM."""
    _, _, rest = key.partition(".engine_kwargs.")
    engine, _, name = rest.partition(".")
    used = values.get(ROLLOUT + "name", "vllm")
    if engine != used or is_off(value):
        return redundant("no effect at this value" if engine == used else f"no effect: the engine is {used}")
    if name.endswith("attention_backend"):
        return redundant(f"chooses kernels of {engine}, which affect speed, not results")
    if engine == "vllm" and name == "enable_expert_parallel":
        degrees = ("data_parallel_size", "tensor_model_parallel_size")
        size = prod(count(values.get(ROLLOUT + degree)) for degree in degrees)
        return Translation(writes={ENGINE + "expert_parallel_size": size})
    return Translation(writes={_VLLM + name: value}) if engine == "vllm" else unsupported(f"{engine} options")


def _strategy(key: str, value: object, values: Values) -> Translation:
    if key != ACTOR + "strategy":
        return redundant("one setting for all models: trainer.strategy")
    if word(value, _STRATEGIES) not in _STRATEGIES:
        return unsupported(f"strategy {display_value(value)}")
    return Translation(writes={"trainer.strategy": _STRATEGIES[str(value)]})


def strategy_of(values: Values) -> str:
    """verl's name of the learners' strategy."""
    return str(values.get(ACTOR + "strategy") or values.get("model_engine", "fsdp"))


def is_megatron(values: Values) -> bool:
    """Whether the learners are Megatron's."""
    return has_own_modules(strategy_of(values))


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
    if not key.startswith((ACTOR, ROLLOUT)):
        return redundant("one setting for all models; it does not affect results")
    if not key.endswith("_per_gpu"):
        value = max(value // _learner_gpus(values), 1) if isinstance(value, int) else value
    name = "micro_train_batch_size_per_gpu" if key.startswith(ACTOR) else "micro_forward_batch_size_per_gpu"
    return Translation(writes={f"trainer.{name}": value})


def _megatron(key: str, value: object, values: Values) -> Translation | None:
    if not is_megatron(values):
        return redundant("no effect: the strategy is not megatron")
    table, name = f"{_ours(key)}megatron_config.", key.partition(".megatron.")[2]
    if name.startswith("qat."):
        return None
    if name in _MEGATRON_SIZES:
        return Translation(writes={table + name: value})
    if name.startswith("override_transformer_config."):
        if value is None:
            return redundant("not set; recomputation affects memory, not results")
        return Translation(writes={f"{table}transformer_config_kwargs.{name.partition('.')[2]}": value})
    if name in _MEGATRON_PLACES or any(fnmatchcase(name, pattern) for pattern in _MEGATRON_SPEED):
        return redundant("affects memory or speed, not results")
    if name == "dtype":
        is_usual = value in ("bfloat16", "bf16")
        return redundant("bfloat16 is the default") if is_usual else unsupported(f"Megatron in {display_value(value)}")
    if name == "router_replay.mode":
        return _router_replay(key, value)
    if is_off(value) or name.startswith("router_replay."):
        return redundant("no effect at this value")
    return unsupported(f"Megatron's {name}")


def _router_replay(key: str, value: object) -> Translation:
    """Convert routing replay: R3 replays the experts of the rollout, R2 the learner's in the old log-probabilities."""
    if value in ("disabled", None):
        return redundant("off")
    if value != "R3":
        return unsupported("replaying the experts that the learner used for old log-probabilities")
    if not key.startswith(ACTOR):
        return redundant("set by the policy's settings")
    returned = "generator.inference_engine.enable_return_routed_experts"
    return Translation(writes={"trainer.policy.moe_enable_routing_replay": True, returned: True})


def _fsdp_only(name: str, key: str, value: object, values: Values) -> Translation:
    if is_megatron(values):
        return redundant("no effect: the strategy is megatron")
    return Translation(writes={_ours(key) + name: value})


def _dtype(name: str, key: str, value: object, values: Values) -> Translation:
    """Convert a dtype of FSDP, which is written only where it differs from our default."""
    usual, reason = {
        "param_dtype": (("bf16", "bfloat16"), "set by trainer.bf16"),
        "reduce_dtype": (("fp32", "float32"), "gradients are summed in float32"),
        "buffer_dtype": (("fp32", "float32"), "buffers are float32"),
    }[name]
    if name == "reduce_dtype" and key.startswith(_REF):
        return redundant("the reference model has no gradients")
    if value is None or value in usual:
        return redundant(reason)
    return _fsdp_only(f"fsdp_config.mixed_precision.{name}", key, value, values)


def _ours(key: str) -> str:
    return "trainer.critic." if key.startswith("critic.") else f"trainer.{'ref' if key.startswith(_REF) else 'policy'}."


def _truncation(key: str, value: object, values: Values) -> Translation:
    if values.get("data.filter_overlong_prompts") or value == "error":
        return redundant("longer prompts are skipped and counted")
    return unsupported("truncating prompts; those longer than trainer.max_prompt_length are skipped and counted")


def _contents(key: str, value: object, values: Values) -> Translation:
    if key.startswith("critic."):
        return redundant("checkpoints contain the critic; the exported model is the policy")
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
        in_a_step = count(values.get(ACTOR + "ppo_epochs")) if _unit(values) == "optimizer_step" else 1
        steps = value * in_a_step if isinstance(value, int) else value
        return Translation(writes={ours + "num_warmup_steps": steps, ours + "schedule_unit": _unit(values)})
    steps = values.get(f"{table}.lr_warmup_steps")
    if is_off(value) or (isinstance(steps, int) and steps > 0):
        return redundant("set by lr_warmup_steps" if not is_off(value) else "no effect at this value")
    return Translation(writes={ours + "warmup_steps_proportion": value, ours + "schedule_unit": _unit(values)})


def _unit(values: Values) -> str:
    """What verl's schedule counts: calls of an update, which are the mini-batches of a step with `separate_async`."""
    return "optimizer_step" if mode_of(values) == "separate_async" else "training_step"


def _megatron_schedule(key: str, value: object, values: Values) -> Translation:
    """Convert the schedule of Megatron's optimizer, which goes down to `min_lr`."""
    if not is_megatron(values):
        return redundant("no effect: the strategy is not megatron")
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    if word(value, names) not in names:
        return unsupported(f"Megatron's schedule {display_value(value)}")
    ours = _optimizer(key)
    return Translation(writes={ours + "scheduler": names[str(value)], ours + "schedule_unit": _unit(values)})


def _lowest(key: str, value: object, values: Values) -> Translation:
    """Convert a rate of Megatron's schedule to a share of the learning rate: its end, or the start of its warm-up."""
    rate = number(_used(key.rpartition(".")[0], "lr", values)) or (1e-5 if key.startswith("critic.") else 1e-6)
    if is_off(value) or not is_megatron(values):
        return redundant("no effect at this value")
    name = "warmup_start_ratio" if key.endswith("lr_warmup_init") else "min_lr_ratio"
    return Translation(writes={_optimizer(key) + name: real(value) / real(rate)})


def _algorithm(key: str, value: object, values: Values) -> Translation:
    """Convert the optimizer. Megatron's `adam` decays weights as AdamW does."""
    if value in ("AdamW", "adamw") or (value == "adam" and is_megatron(values)):
        return redundant("AdamW is the default optimizer")
    return unsupported(f"the optimizer {display_value(value)}")


def _convert_first_rate(key: str, value: object, values: Values) -> Translation:
    schedule = values.get(key.rpartition(".")[0] + ".lr_scheduler_type", "constant")
    if value is True or schedule != "cosine":
        return redundant("the first step has the first rate of the schedule")
    return unsupported("a schedule that leaves out its first rate")


def _length(key: str, value: object, values: Values) -> Translation | None:
    """Convert the longest answer, which two settings have; None for the one that decides."""
    if value == longest_answer(values) and (key.startswith("data.") or value != values.get("data.max_response_length")):
        return None
    other = "data.max_response_length" if key.startswith(ROLLOUT) else ROLLOUT + "response_length"
    return redundant(f"set by {other}")


def _adapter(key: str, value: object, values: Values) -> Translation | None:
    """Convert `lora_*` and `lora.*`: FSDP reads the former, Megatron the latter."""
    name = key.removeprefix(_MODEL)
    if name.startswith("lora.") != is_megatron(values) and name != "lora_adapter_path":
        return redundant(f"no effect: the strategy is {strategy_of(values)}")
    if name.startswith("lora.") and name != "lora.rank" and is_off(values.get(_MODEL + "lora.rank", 0)):
        return redundant("lora.rank is 0")
    return None


def _scheduler(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant("set by lr_scheduler_type")
    if value not in ("constant", "cosine"):
        return refused(f"unknown schedule {display_value(value)}; verl supports: constant, cosine")
    name, ours = "constant_with_warmup" if value == "constant" else "cosine", _optimizer(key)
    return Translation(writes={ours + "scheduler": name, ours + "schedule_unit": _unit(values)})


def _optimizer(key: str) -> str:
    return ("trainer.critic." if key.startswith("critic.") else "trainer.policy.") + "optimizer_config."


def _clipping(key: str, value: object, values: Values) -> Translation:
    """Convert `optim.clip_grad`, or the model's `grad_clip`, which FSDP read instead before verl 0.8."""
    owner = "critic." if key.startswith("critic.") else ACTOR
    of_model, of_optimizer = values.get(owner + "grad_clip"), _used(owner + "optim", "clip_grad", values)
    reads_model = not has_v1(values) and not is_megatron(values) and of_model is not None
    if key.endswith("clip_grad") and reads_model:
        return redundant("set by grad_clip")
    if key.endswith("grad_clip") and not reads_model and of_optimizer is not None:
        return redundant("set by optim.clip_grad")
    return redundant("not set") if value is None else Translation(writes={_optimizer(key) + "max_grad_norm": value})


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
        return refused(f"unknown resume_mode {display_value(value)}; verl supports: {', '.join(modes)}")
    return Translation(writes={"trainer.resume_mode": modes[str(value)]})


def _resume_path(key: str, value: object, values: Values) -> Translation:
    if is_off(value) or values.get("trainer.resume_mode", "auto") != "resume_path":
        return redundant("no effect: resume_mode is not resume_path")
    return Translation(writes={"trainer.resume_path": value})


def _turns(key: str, value: object, values: Values) -> Translation:
    turns = ROLLOUT + "multi_turn."
    if all(is_off(values.get(turns + name)) for name in ("enable", "tool_config_path", "function_tool_path")):
        return redundant("multi_turn.enable is off")
    name = key.rpartition(".")[2]
    if name == "max_assistant_turns" and value:
        return Translation(writes={"generator.max_turns": value})
    if is_off(value) or name == "enable":
        return redundant("no effect at this value" if is_off(value) else "environments decide on further turns")
    return unsupported("converting verl's tools and interactions, which are environments here (docs/tools.md)")


def _profiled(key: str, value: object, values: Values) -> Translation:
    """Convert the steps that are profiled, which verl does only with a tool for it."""
    if is_off(value) or is_off(values.get("global_profiler.tool")):
        return redundant("no step is profiled")
    return Translation(writes={"trainer.profile_steps": value})


def _critic_epochs(key: str, value: object, values: Values) -> Translation:
    if value in (None, values.get(ACTOR + "ppo_epochs", 1)):
        return redundant("one setting for all models: trainer.update_epochs_per_batch")
    return unsupported("passes over a batch that only the critic has")


def _override(key: str, value: object, values: Values) -> Translation:
    """Convert a field of the model's configuration, which verl's reference model has, too."""
    name = key.partition("override_config.")[2].removeprefix("model_config.")
    learner = "critic" if key.startswith("critic.") else "policy"
    models = [learner] + ["ref"] * (learner == "policy" and has_reference(values))
    table = "megatron_config.model_config_kwargs" if is_megatron(values) else "model_config_kwargs"
    writes: dict[str, Any] = {f"trainer.{model}.{table}.{name}": value for model in models}
    if sets_dropout(name, value):  # learners of verl are in training mode (engine/fsdp/transformer_impl.py:1133)
        writes[f"trainer.{learner}.use_dropout"] = True
    return Translation(writes=writes)


def _used(table: str, name: str, values: Values) -> Any:
    """The value with which verl builds the optimizer: what `override_optimizer_config` has replaces the setting."""
    return values.get(f"{table}.override_optimizer_config.{name}", values.get(f"{table}.{name}"))


def _replaced(key: str, value: object, values: Values) -> Translation | None:
    """A setting that verl does not read, since `override_optimizer_config` or Megatron has its own."""
    table, _, name = key.rpartition(".")
    if is_megatron(values) and name == "betas":
        return redundant("no effect: Megatron's are override_optimizer_config.adam_beta1 and adam_beta2")
    if f"{table}.override_optimizer_config.{name}" not in values or (is_megatron(values) and name == "weight_decay"):
        return None
    return redundant(f"verl uses override_optimizer_config.{name} instead")


def _optimizer_option(key: str, value: object, values: Values) -> Translation:
    """Convert an argument that verl gives to the optimizer in place of its own: for Megatron, a field of its
    OptimizerConfig.
    """
    table, _, name = key.partition(".override_optimizer_config.")
    ours = _optimizer(key)
    match name, is_megatron(values):
        case "weight_decay", True:
            return redundant("verl uses optim.weight_decay instead: the schedule sets it again before every step")
        case "lr" | "weight_decay", _:
            return Translation(writes={ours + name: number(value)})
        case ("eps", False) | ("adam_eps", True):
            return Translation(writes={ours + "adam_eps": number(value)})
        case "betas", False:
            return Translation(writes={ours + "adam_betas": value})
        case "amsgrad" | "maximize" | "differentiable" | "capturable", False if value is False:
            return redundant("off, as in torch")
        case "foreach" | "fused", False:
            return redundant("affects speed, not results")
        case "adam_beta1" | "adam_beta2", True:
            first, second = _used(table, "adam_beta1", values), _used(table, "adam_beta2", values)
            betas = [0.9 if first is None else number(first), 0.999 if second is None else number(second)]
            return Translation(writes={ours + "adam_betas": betas})
        case "clip_grad", True:
            return Translation(writes={ours + "max_grad_norm": value})
        case "min_lr", True:
            return _lowest(f"{table}.{name}", value, values)
        case "optimizer", True:
            return _algorithm(key, value, values)
        case _, True:
            return Translation(writes={f"{_ours(key)}megatron_config.optimizer_config_kwargs.{name}": value})
    return unsupported("additional optimizer arguments")


def _decay_steps(key: str, value: object, values: Values) -> Translation:
    table = key.rpartition(".")[0]
    style, ratio = values.get(f"{table}.lr_decay_style", "constant"), values.get(f"{table}.lr_warmup_steps_ratio", 0)
    if value is None or (style == "constant" and is_off(ratio)):
        return redundant("not set" if value is None else "no effect: the rate does not decay")
    return unsupported("a schedule that ends before the run does")


_FSDP = ("*.fsdp_config", "critic.fsdp")
_SHARDING = {
    "offload_policy": "cpu_offload",
    "reshard_after_forward": "reshard_after_forward",
    "fsdp_size": "fsdp_size",
}
_DTYPE_NAMES = {
    "dtype": "param_dtype",
    **{f"mixed_precision.{name}": name for name in ("param_dtype", "reduce_dtype", "buffer_dtype")},
}

LAYOUT: dict[str, Dependent] = {
    **{_MODEL + name: _adapter for name in _ADAPTER},
    **{
        f"*.{name}.*": independent(redundant(f"only read by the strategy {name}, which does not exist here"))
        for name in ("veomni", "torchtitan")
    },
    **dict.fromkeys(
        (_REF + "optim.*", _REF + "fsdp_config.optimizer_offload"),
        independent(redundant("the reference model has no optimizer")),
    ),
    "*.optim.override_optimizer_config.*": _optimizer_option,
    "*.optim.*": _replaced,
    "*.optim.lr_decay_steps": _decay_steps,
    "*.optim.lr_decay_style": _megatron_schedule,
    "*.optim.min_lr": _lowest,
    "*.optim.lr_warmup_init": _lowest,
    "*.optim.optimizer": _algorithm,
    "*.optim.zero_indexed_step": _convert_first_rate,
    "trainer.nnodes": _machines,
    "trainer.n_gpus_per_node": _machines,
    "trainer.logger": _trackers,
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": _resume_path,
    "data.truncation": _truncation,
    **dict.fromkeys(("data.max_response_length", ROLLOUT + "response_length"), _length),
    "data.apply_chat_template_kwargs.*": lambda key, value, values: Translation(
        writes={f"generator.chat_template_kwargs.{key.partition('_kwargs.')[2]}": value}
    ),
    **{ROLLOUT + name: _engine_size for name in ENGINE_SIZES},
    ROLLOUT + "name": _engine,
    ROLLOUT + "engine_kwargs.*": _engine_option,
    ROLLOUT + "multi_turn.*": _turns,
    "critic.ppo_epochs": _critic_epochs,
    "*.strategy": _strategy,
    "*.megatron.*": _megatron,
    "*.router_replay.mode": lambda key, value, values: _router_replay(key, value),
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
    **{
        f"{table}.{name}": partial(_fsdp_only, f"fsdp_config.{ours}")
        for table in _FSDP
        for name, ours in _SHARDING.items()
    },
    **{f"{table}.{name}": partial(_dtype, ours) for table in _FSDP for name, ours in _DTYPE_NAMES.items()},
    _REF + "fsdp_config.param_offload": partial(_fsdp_only, "fsdp_config.cpu_offload"),
    "*.optimizer_offload": partial(_fsdp_only, "optimizer_config.offload_after_step"),
    "*.ulysses_sequence_parallel_size": partial(_fsdp_only, "sequence_parallel_size"),
    "global_profiler.steps": _profiled,
    "*profiler.*": independent(redundant("trainer.profile_steps profiles the listed steps")),
    _MODEL + "override_config.*": _override,
    "critic.model.override_config.*": _override,
}

"""The meaning of each of AReaL's settings in our tree.

Keys are patterns: `*` matches one or more names. An entry is a path of ours, or a function from the value to its
conversion: see `interop/translation.py`.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from skyrl.interop.areal.machines import LINES_OF_BASH, without_own_folder
from skyrl.interop.areal.objective import FUNCTION
from skyrl.interop.environment import Read, read_environment
from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    OPTIMIZER,
    SAMPLING,
    SHAPING,
    Dependent,
    Entry,
    Translation,
    Values,
    fixed,
    maps_to,
    missing,
    non_empty,
    number,
    numeric,
    redundant,
    refused,
    sources,
    when_on,
    word,
)

LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Fields of an optimizer table that count only in float16, in both systems."""


def switch(path: str, *, off: str) -> Entry:
    """Entry of a switch that is off by default in both systems; `off` describes that state."""
    usual = fixed(False, None, does=off, otherwise=off)
    return lambda value: Translation(writes={path: True}) if value is True else usual(value)


def kl(value: object, estimator: object = "k1") -> Translation:
    """Convert `kl_ctl`. AReaL subtracts it times the divergence, estimated by `kl_estimator`, from the rewards."""
    weight = number(value)
    writes = {ALGORITHM + "use_kl_loss": False, ALGORITHM + "use_kl_in_reward": weight != 0}
    if weight != 0:
        writes |= {ALGORITHM + "kl_loss_coef": weight, ALGORITHM + "kl_estimator_type": estimator}
    return Translation(writes=writes)


def optimizer_keys(source: str, target: str, cpu_offload: str) -> dict[str, Entry]:
    """Entries for the optimizer table `source`, which corresponds to ours at `target`; both prefixes end with a dot."""
    usual = fixed("adam", "adamw", does="AdamW is the default optimizer", otherwise="other optimizers")

    def scheduler(value: object) -> Translation:
        names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
        if word(value, names) not in names:
            return refused(f"unknown schedule {value!r}; AReaL supports: {', '.join(names)}")
        return Translation(writes={f"{target}scheduler": names[str(value)]})

    def warmup(value: object) -> Translation:  # AReaL gives it as a share of the training steps
        share = number(value)
        if share == 0:
            return Translation(writes={f"{target}num_warmup_steps": 0})
        return Translation(
            writes={f"{target}warmup_steps_proportion": share, f"{target}schedule_unit": "training_step"}
        )

    def warmup_steps(value: object) -> Translation:
        if value is None:
            return redundant("set by warmup_steps_proportion")
        return Translation(writes={f"{target}num_warmup_steps": value, f"{target}schedule_unit": "training_step"})

    return {
        f"{source}type": lambda value: (
            Translation(writes={f"{target}optimizer": "sgd"}) if value == "sgd" else usual(value)
        ),
        f"{source}lr": numeric(f"{target}lr"),
        f"{source}weight_decay": numeric(f"{target}weight_decay"),
        f"{source}beta1": numeric(f"{target}adam_betas.0"),
        f"{source}beta2": numeric(f"{target}adam_betas.1"),
        f"{source}eps": numeric(f"{target}adam_eps"),
        f"{source}lr_scheduler_type": scheduler,
        f"{source}gradient_clipping": numeric(f"{target}max_grad_norm"),
        f"{source}warmup_steps_proportion": warmup,
        f"{source}warmup_steps": warmup_steps,
        f"{source}offload": cpu_offload,
        f"{source}min_lr_ratio": numeric(f"{target}min_lr_ratio"),
        **{f"{source}{name}": redundant("no effect: loss scaling applies only to float16") for name in LOSS_SCALING},
    }


def warmup_share(key: str, value: object, values: Values) -> Translation | None:
    """Convert the share of the steps that is warm-up, which a number of steps takes the place of."""
    steps = key.removesuffix("_proportion")
    return redundant(f"{steps} takes precedence, as in AReaL") if values.get(steps) is not None else None


def least_micro_batches(value: object) -> Translation:
    """Convert the least number of micro-batches, which is 1 by default in both systems."""
    if value in (None, 1):
        return redundant("the number of micro-batches is derived from their tokens")
    return Translation(writes={"trainer.min_microbatches": value})


def top_k(path: str) -> Entry:
    """Entry of top_k, for which AReaL writes a huge number for "all tokens"."""
    return lambda value: Translation(
        writes={path: -1 if value is None or (isinstance(value, int) and value >= 100_000) else value}
    )


def recovery(path: str) -> Entry:
    """Entry of the ways to resume after a failure."""
    modes = {"off": "disabled", "on": "auto"} | {mode: mode for mode in ("disabled", "auto", "fault", "resume")}

    def become(value: object) -> Translation:
        if isinstance(value, bool):  # YAML 1.1 reads `off` and `on` as booleans
            value = "on" if value else "off"
        if not isinstance(value, str) or value not in modes:
            return refused(f"unknown recovery mode {value!r}; AReaL supports: {', '.join(modes)}")
        return Translation(writes={path: modes[value]})

    return become


def success_rate(bound: str, *, everything: float) -> Entry:
    """Entry of a bound on the share of good samples in a group; the value `everything` keeps all groups."""

    def become(value: object) -> Translation:
        if number(value) in (None, everything):
            return redundant("every group is kept")
        table = ALGORITHM + "dynamic_sampling."
        note = "groups whose rewards are all equal are dropped, too"
        return Translation(writes={f"{table}type": "filter", f"{table}{bound}": number(value)}, note=note)

    return become


def checkpoints(path: str) -> Dependent:
    """Entry of the folder of all experiments; each has its own for checkpoints, so that none continues from another."""

    def become(key: str, value: object, values: Values) -> Translation:
        names = [read_environment(values.get(name), name).value for name in ("experiment_name", "trial_name")]
        if any(not isinstance(name, str) or not name or name.startswith("env:") or "$" in name for name in names):
            return redundant("checkpoints are kept in the run's folder, since the file does not name its trial")
        return Translation(writes={path: "/".join([str(value).rstrip("/"), "checkpoints", *names])})

    return become


def device(values: Values) -> str:
    """The device of a run: a file for CPUs asks for no GPU."""
    gpus = [value for key, value in values.items() if key.endswith((".n_gpus_per_node", ".scheduling_spec[0].gpu"))]
    return "cpu" if 0 in gpus and not any(gpus) else "cuda"


def read_areal(key: str, value: Any, values: Values) -> Read:
    """The value with references to the environment in our form, unless a shell evaluates it here, too, or it refers to
    a list of tables: `${actor.scheduling_spec}`.
    """
    name = value[2:-1] if isinstance(value, str) and value.startswith("${") and value.endswith("}") else ""
    is_table = bool(name) and any(other.startswith((f"{name}.", f"{name}[")) for other in values)
    if is_table or key.endswith(LINES_OF_BASH):
        return Read(value)
    return read_environment(without_own_folder(key, value), key)


def level(path: str) -> Entry:
    """Entry of the level of a normalization: batch, group, or none at all."""
    return lambda value: Translation(writes={path: None if value == "none" else value})


def data_source(name: str, split: object) -> str:
    """The data source `name`, with its split appended: a file has none, and a name may hold its split already."""
    is_file = PurePath(name).suffix in (".json", ".jsonl", ".parquet")
    return name if is_file or ":" in name or not split else f"{name}:{split}"


_INTERVALS = "intervals other than those of exports, checkpoints and evaluation"
_SGLANG = "SGLang options, because the engines become vLLM; --keep-engine keeps SGLang and its options"
_LOGS = "each engine has a log file under trainer.log_path"
_LEAST = "one setting for all models: trainer.min_microbatches; it does not affect results"
_TOKENS = "one setting for all models: trainer.max_tokens_per_microbatch; it does not affect results"
_FOLDERS = "folders are set once: trainer.run_path, ckpt_path and export_path"
_NAMES = "names are set once: trainer.project_name and trainer.run_name"
_LEGACY = "settings of AReaL's legacy system"

_GROUP_NORM = {"mean_level": "group", "std_level": "group", "std_unbiased": True, "eps": 1e-9}
_LOADED = "pretrained weights are loaded"

INTERVALS: dict[str, str] = {
    "saver.freq_": "trainer.hf_save_interval",
    "recover.freq_": "trainer.ckpt_interval",
    "evaluator.freq_": "trainer.eval_interval",
    "exp_ctrl.save_freq_": "trainer.hf_save_interval",
    "exp_ctrl.ckpt_freq_": "trainer.ckpt_interval",
    "exp_ctrl.eval_freq_": "trainer.eval_interval",
}
"""Our equivalent of each group of `epochs`, `steps` and `secs`, any of which may trigger."""


def _prefill_chunk(value: object) -> Translation:
    """Convert the size of prefill chunks; -1 computes a whole prompt at a time."""
    if value == -1:
        return Translation(writes={ENGINE + "enable_chunked_prefill": False})
    return Translation(writes={ENGINE + "max_num_batched_tokens": value})


def _negated(value: object) -> object:
    """The negated bias, since AReaL's older system subtracts it and we add it."""
    bias = number(value)
    return -bias if isinstance(bias, int | float) else bias


KEYS: dict[str, Entry] = {
    "experiment_name": "trainer.project_name",
    "trial_name": "trainer.run_name",
    "*.experiment_name": redundant(_NAMES),
    "*.trial_name": redundant(_NAMES),
    "*.fileroot": redundant(_FOLDERS),
    "seed": "trainer.seed",
    "total_train_epochs": "trainer.epochs",
    "exp_ctrl.total_train_epochs": "trainer.epochs",
    "total_train_steps": "trainer.max_training_steps",
    "total_train_n_seqs": "trainer.max_training_prompts",
    "tokenizer_path": non_empty("trainer.tokenizer_path"),
    "async_training": "trainer.fully_async.enabled",
    "max_turns": "generator.max_turns",
    # models
    "actor.path": "trainer.policy.model.path",
    "ref.path": "trainer.ref.model.path",
    "critic.path": "trainer.critic.model.path",
    "critic.eps_clip": numeric(ALGORITHM + "value_clip"),
    "critic.is_critic": fixed(True, does="critics always have a value head", otherwise="a critic without a value head"),
    "critic.mask_no_eos_with_zero": redundant("set by actor.mask_no_eos_with_zero"),
    **optimizer_keys(
        "critic.optimizer.", "trainer.critic.optimizer_config.", "trainer.critic.fsdp_config.cpu_offload"
    ),
    **{
        f"{source}.init_from_scratch": switch(f"trainer.{target}.model.init_from_scratch", off=_LOADED)
        for source, target in (("actor", "policy"), ("ref", "ref"), ("critic", "critic"))
    },
    "*.init_from_scratch": fixed(False, does=_LOADED, otherwise="random initialization of other models"),
    "*.disable_dropout": redundant("dropout is off in models that are not trained"),
    "actor.gradient_checkpointing": "trainer.gradient_checkpointing",
    "actor.bf16": "trainer.bf16",
    "ref.dtype": redundant("one setting for all models: trainer.bf16"),
    "ref.bf16": redundant("one setting for all models: trainer.bf16"),
    "actor.mb_spec.max_tokens_per_mb": "trainer.max_tokens_per_microbatch",
    "actor_train.mb_spec.max_tokens_per_mb": "trainer.max_tokens_per_microbatch",
    "*.mb_spec.max_tokens_per_mb": redundant(_TOKENS),
    "actor.mb_spec.n_mbs": least_micro_batches,
    "actor_train.mb_spec.n_mbs": least_micro_batches,
    "*.mb_spec.n_mbs": redundant(_LEAST),
    "*.mb_spec.granularity": redundant("samples of the same prompt always stay together"),
    "*.pad_to_maximum": fixed(True, False, does="padding does not affect results", otherwise="other padding"),
    "*.type._class": redundant("the architecture is read from the model"),
    "actor.attn_impl": "trainer.attention",
    "ref.attn_impl": redundant("one setting for all models: trainer.attention"),
    "*.is_critic": fixed(False, does="off", otherwise="reward models"),
    "actor.grad_reduce_dtype": "trainer.policy.fsdp_config.mixed_precision.reduce_dtype",
    "ref.grad_reduce_dtype": redundant("the reference model has no gradients"),
    "*.ds_auto_tp": missing("a value for a whole table; set its fields instead"),
    # optimizer
    **optimizer_keys("actor.optimizer.", OPTIMIZER, "trainer.policy.fsdp_config.cpu_offload"),
    "actor.optimizer": refused("training needs an optimizer"),
    "critic.optimizer": refused("training needs an optimizer"),
    "ref.optimizer": fixed(
        None, does="the reference model has no optimizer", otherwise="an optimizer for the reference model"
    ),
    # objective
    "actor.eps_clip": numeric(ALGORITHM + "eps_clip_low", ALGORITHM + "eps_clip_high"),
    "ppo.eps_clip": numeric(ALGORITHM + "eps_clip_low", ALGORITHM + "eps_clip_high"),
    "actor.eps_clip_higher": numeric(ALGORITHM + "eps_clip_high"),
    "actor.c_clip": numeric(ALGORITHM + "clip_ratio_c"),
    "ppo.c_clip": numeric(ALGORITHM + "clip_ratio_c"),
    "actor.temperature": numeric(ALGORITHM + "temperature"),
    "actor.kl_ctl": kl,
    "ppo.kl_ctl": kl,
    "actor.discount": numeric(ALGORITHM + "gamma"),
    "ppo.discount": numeric(ALGORITHM + "gamma"),
    "ppo.gae_lambda": numeric(ALGORITHM + "lambd"),
    "ppo.value_eps_clip": numeric(ALGORITHM + "value_clip"),
    "ppo.disable_value": fixed(True, does="no critic is trained", otherwise="a critic without a model path"),
    "ppo.use_adaptive_kl_ctl": maps_to(ALGORITHM + "kl_ctrl.type", convert=lambda on: "adaptive" if on else "fixed"),
    "ppo.adv_norm": ALGORITHM + "advantage_batch_normalize",
    "actor.group_reward_norm": lambda on: (  # areal/engine/ppo/actor.py:94 of 0.3.3
        Translation(writes={f"{SHAPING}norm.{name}": value for name, value in _GROUP_NORM.items()})
        if on
        else redundant("off")
    ),
    "*.init_critic_from_actor": redundant("AReaL never reads it"),
    "actor.gae_lambda_kwargs*": missing(FUNCTION),
    "group_adv_norm": missing("normalizing advantages twice", False),
    "actor.reward_norm": missing("a value for a whole table; set its fields instead"),
    "actor.reward_norm.mean_level": level(SHAPING + "norm.mean_level"),
    "actor.reward_norm.std_level": level(SHAPING + "norm.std_level"),
    "actor.reward_norm.mean_leave1out": SHAPING + "norm.mean_leave1out",
    "actor.reward_norm.std_unbiased": SHAPING + "norm.std_unbiased",
    "actor.reward_norm.eps": numeric(SHAPING + "norm.eps"),
    "actor.reward_norm.group_size": redundant("set by generator.n_samples_per_prompt"),
    "actor.adv_norm.group_size": redundant("set by generator.n_samples_per_prompt"),
    "actor.group_size": redundant("set by generator.n_samples_per_prompt"),
    "group_size": "generator.n_samples_per_prompt",
    "actor.reward_scaling": numeric(SHAPING + "scale"),
    "actor.reward_bias": numeric(SHAPING + "bias"),
    "actor.reward_clip": numeric(SHAPING + "clip"),
    "ppo.reward_output_scaling": numeric(SHAPING + "scale"),
    "ppo.reward_output_bias": maps_to(SHAPING + "bias", convert=_negated),
    "ppo.max_reward_clip": numeric(SHAPING + "clip"),
    "actor.mask_no_eos_with_zero": "generator.zero_reward_on_non_stop",
    "ppo.use_decoupled_loss": when_on(ALGORITHM + "policy_loss_type", "decoupled"),
    "*.behav_imp_weight_cap": numeric(ALGORITHM + "decoupled.behav_imp_weight_cap"),
    "actor.dynamic_sampling": when_on(ALGORITHM + "zero_variance_filter", True),
    "actor.overlong_reward_penalty": when_on(SHAPING + "overlong.floor", False),
    "actor.overlong_tokens": SHAPING + "overlong.buffer_len",
    "actor.overlong_penalty_factor": numeric(SHAPING + "overlong.penalty_factor"),
    "actor.max_new_tokens": redundant("set by generator.sampling_params.max_generate_length"),
    "actor.log_agent_stats*": redundant("metrics from get_metrics() are always logged, as environment/<name>"),
    "mask_too_long": "generator.apply_overlong_filtering",
    # sampling
    "gconfig.n_samples": "generator.n_samples_per_prompt",
    "ppo.gen.max_new_tokens": SAMPLING + "max_generate_length",
    "ppo.gen.min_new_tokens": SAMPLING + "min_new_tokens",
    "ppo.gen.greedy": SAMPLING + "greedy",
    "ppo.gen.top_p": numeric(SAMPLING + "top_p"),
    "ppo.gen.top_k": top_k(SAMPLING + "top_k"),
    "ppo.gen.temperature": numeric(SAMPLING + "temperature"),
    "ppo.gen.n": fixed(1, does="set by group_size", otherwise="more than one completion per sample"),
    # data
    "train_dataset.path": sources("data.train_data"),
    "dataset.path": sources("data.train_data"),
    "valid_dataset.path": sources("data.val_data"),
    "train_dataset.batch_size": "trainer.train_batch_size",
    "dataset.train_bs_n_seqs": "trainer.train_batch_size",
    "valid_dataset.batch_size": "trainer.eval_batch_size",
    "train_dataset.max_length": "trainer.max_prompt_length",
    "dataset.max_prompt_len": "trainer.max_prompt_length",
    "train_dataset.shuffle": "data.shuffle",
    "shuffle_dataset": "data.shuffle",
    "valid_dataset.shuffle": redundant("evaluation uses every prompt, so order does not matter"),
    "*_dataset.pin_memory": redundant("prompts are text, so pinned memory does not apply"),
    "valid_dataset.drop_last": fixed(False, does="evaluation uses every prompt", otherwise="dropping prompts"),
    "valid_dataset.max_length": missing("a separate maximum length for evaluation"),
    "*_dataset.reward_fn": missing("a reward in the dataset's table; set environment.env_class instead"),
    "*_dataset.type": fixed("rl", None, does="rows are prompts", otherwise="this type of rows in an RL run"),
    "success_rate_lb": success_rate("min_success_rate", everything=0.0),
    "success_rate_ub": success_rate("max_success_rate", everything=1.0),
    # engines
    "rollout.max_head_offpolicyness": "trainer.fully_async.max_staleness_steps",
    "max_head_offpolicyness": "trainer.fully_async.max_staleness_steps",
    "rollout.max_concurrent_rollouts": "trainer.fully_async.num_parallel_generation_workers",
    "rollout.consumer_batch_size": redundant("derived from trainer.train_batch_size"),
    "rollout.schedule_policy": fixed(
        "round_robin", does="samples are distributed evenly", otherwise="other scheduling policies"
    ),
    "rollout.check_trajectory_format": redundant("trajectories are always type-checked"),
    "rollout.queue_size": "trainer.fully_async.queue_size",
    "*sglang.model_path": redundant("engines always serve the policy"),
    "*sglang.random_seed": redundant("sampling seeds are derived from trainer.seed"),
    "*sglang.skip_tokenizer_init": redundant("engines receive token IDs"),
    "*sglang.dtype": ENGINE + "model_dtype",
    "*sglang.max_running_requests": ENGINE + "max_num_seqs",
    "*sglang.context_length": ENGINE + "engine_init_kwargs.max_model_len",
    "*sglang.mem_fraction_static": numeric(ENGINE + "gpu_memory_utilization"),
    "*sglang.disable_cuda_graph": ENGINE + "enforce_eager",
    "*sglang.disable_radix_cache": maps_to(ENGINE + "enable_prefix_caching", convert=lambda off: not off),
    "*sglang.max_prefill_tokens": ENGINE + "max_num_batched_tokens",
    "*sglang.chunked_prefill_size": _prefill_chunk,
    "*sglang.kv_cache_dtype": ENGINE + "engine_init_kwargs.kv_cache_dtype",
    "*sglang.cpu_offload_gb": ENGINE + "engine_init_kwargs.cpu_offload_gb",
    "*sglang.enable_multimodal": missing("vision-language rollouts", False, None),
    **{f"*sglang.{name}": redundant(_LOGS) for name in ("log_*", "decode_log_interval", "show_time_cost")},
    "*sglang.*": missing(_SGLANG, False, ""),
    # keeping and watching
    "*.freq_*": missing(_INTERVALS),  # unknown groups only: known ones are converted together by INTERVALS
    "exp_ctrl.*": missing(_INTERVALS),
    "recover.mode": recovery("trainer.recover_mode"),
    "recover_mode": recovery("trainer.recover_mode"),
    "recover.retries": "trainer.recover_retries",
    "recover_retries": "trainer.recover_retries",
    "recover_after": missing("a delay before a failed run is restarted"),
    # machines
    "cluster.cluster_name": redundant("only a label"),
    "scheduler.*": missing("settings of AReaL's services other than their addresses"),
    "launcher.*": missing("launcher settings beyond those in docs/launching.md"),
    "metric_discovery_port": missing("metrics served on a port", 0),
    # AReaL's older system
    "actor_train.*": missing(_LEGACY),
    "actor_inf.*": missing(_LEGACY),
    "ref_inf.*": missing(_LEGACY),
    "ppo.actor_sample_reuse": "trainer.update_epochs_per_batch",
    "ppo.critic_sample_reuse": missing(_LEGACY, 1),
    "ppo.early_stop_imp_ratio": numeric(ALGORITHM + "max_importance_ratio"),
    "ppo.fuse_rew_ref": redundant("affects only how AReaL's legacy system overlaps two passes"),
    "rw_type": missing("reward types; set environment.env_class instead", "sparse"),
    "cache_clear_freq": redundant("memory is freed when models take turns on GPUs"),
    "torch_cache_mysophobia": "trainer.policy.megatron_config.empty_cuda_cache",
    "flush_request_timeout": numeric("trainer.placement.call_timeout_seconds"),
    "n_rollout_workers": missing("rollout worker processes"),
}  # fmt: skip
"""AReaL's key or pattern -> entry. An exact key takes precedence, then the first matching pattern."""

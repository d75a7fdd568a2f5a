"""What each of AReaL's settings is in our tree. Keys are patterns: `*` stands for one name or several.

An entry is a path of ours, or a function from the value to what it becomes; see `Becomes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import field, frozen

_ALGORITHM = "trainer.algorithm."
_OPTIMIZER = "trainer.policy.optimizer_config."
_ENGINE = "generator.inference_engine."
_SAMPLING = "generator.sampling_params."


@frozen(kw_only=True)
class Becomes:
    """The outcome for one value: paths to write, or why there are none."""

    writes: dict[str, Any] = field(factory=dict)
    needless: str = ""
    not_yet: str = ""
    refused: str = ""


Entry = str | Callable[[Any], Becomes]


def goes_to(*paths: str, convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Becomes]:
    """To each of the paths; null asks for nothing."""

    def become(value: Any) -> Becomes:
        if value is None:
            return Becomes(needless="null: nothing is asked for")
        return Becomes(writes=dict.fromkeys(paths, convert(value)))

    return become


def only(*usual: Any, does: str, otherwise: str) -> Callable[[Any], Becomes]:
    """These values ask for what happens anyway (`does`); others for a capability."""

    def become(value: Any) -> Becomes:
        if any(type(value) is type(each) and value == each for each in usual):
            return Becomes(needless=does)
        return Becomes(not_yet=otherwise)

    return become


def later(capability: str, *nothing: Any) -> Callable[[Any], Becomes]:
    """A capability that is missing; null, and the values of `nothing`, do not ask for it."""
    return only(None, *nothing, does="asks for nothing", otherwise=capability)


def number(value: Any) -> Any:
    """AReaL writes `1e-5` as text, since YAML 1.1 has no such number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _kl(value: Any) -> Becomes:
    """AReaL takes `kl_ctl` times the divergence from the rewards, estimated by the plain difference (k1)."""
    weight = number(value)
    if weight == 0:
        return Becomes(writes={_ALGORITHM + "use_kl_loss": False, _ALGORITHM + "use_kl_in_reward": False})
    return Becomes(
        writes={
            _ALGORITHM + "use_kl_loss": False,
            _ALGORITHM + "use_kl_in_reward": True,
            _ALGORITHM + "kl_loss_coef": weight,
            _ALGORITHM + "kl_estimator_type": "k1",
        }
    )


def _scheduler(value: Any) -> Becomes:
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    if value not in names:
        return Becomes(refused=f"there is no schedule {value!r}; there are: {', '.join(names)}")
    return Becomes(writes={_OPTIMIZER + "scheduler": names[value]})


def _betas(index: int) -> Callable[[Any], Becomes]:
    return lambda value: Becomes(writes={f"{_OPTIMIZER}adam_betas.{index}": number(value)})


def _warmup(value: Any) -> Becomes:
    if number(value) == 0:
        return Becomes(writes={_OPTIMIZER + "num_warmup_steps": 0})
    return Becomes(not_yet=f"warm-up as a share of the steps: give the steps in {_OPTIMIZER}num_warmup_steps")


def _top_k(value: Any) -> Becomes:
    return Becomes(
        writes={_SAMPLING + "top_k": -1 if value is None or (isinstance(value, int) and value >= 100_000) else value}
    )


def _greedy(value: Any) -> Becomes:
    return Becomes(writes={_SAMPLING + "temperature": 0.0}) if value else Becomes(needless="samples are drawn")


def _least_new(value: Any) -> Becomes:
    if not value:
        return Becomes(needless="there is no least length")
    return Becomes(writes={_SAMPLING + "additional_kwargs.min_tokens": value})


def _recovery(value: Any) -> Becomes:
    modes = {"off": "disabled", "on": "auto"} | {mode: mode for mode in ("disabled", "auto", "fault", "resume")}
    if value is False or value is True:  # YAML 1.1 reads `off` and `on` so
        value = "on" if value else "off"
    if value not in modes:
        return Becomes(refused=f"there is no way {value!r} to go on; there are: {', '.join(modes)}")
    return Becomes(writes={"trainer.recover_mode": modes[value]})


def _wandb(value: Any) -> Becomes:
    return Becomes(writes={"trainer.logger": "wandb" if value == "online" else "console"})


def _steps(path: str) -> Callable[[Any], Becomes]:
    return lambda value: Becomes(writes={path: -1 if value is None else value})


def _batch_of_one_source(path: str) -> Callable[[Any], Becomes]:
    return lambda value: Becomes(writes={path: value if isinstance(value, list) else [value]})


def _std(value: Any) -> Becomes:
    if value in ("group", "none", None):
        return Becomes(writes={_ALGORITHM + "grpo_norm_by_std": value == "group"})
    return Becomes(not_yet="group means with deviations of the batch")


def _dynamic(value: Any) -> Becomes:
    return Becomes(
        writes={_ALGORITHM + "dynamic_sampling.type": "filter"} if value else {}, needless="" if value else "off"
    )


_INTERVALS = "intervals in epochs or seconds"
_HOST = "shares of the host's memory and cores for each process"
_SGLANG = "options of SGLang: engines here are vLLM's, see generator.inference_engine"
_FOLDERS = "folders are in one place: trainer.run_path, ckpt_path and export_path"
_NAMES = "names of the run are in one place: trainer.project_name and trainer.run_name"
_LEGACY = "settings of AReaL's older system"
_SHAPING = "shaping of rewards: let the environment do it"
_ASYNC = "asynchronous training"
_DECOUPLED = "the decoupled objective"
_SFT = "supervised fine-tuning"
_REAL = only(False, does="the weights are loaded", otherwise="training from random weights")

KEYS: dict[str, Entry] = {
    "experiment_name": goes_to("trainer.project_name"),
    "trial_name": goes_to("trainer.run_name"),
    "*.experiment_name": lambda value: Becomes(needless=_NAMES),
    "*.trial_name": lambda value: Becomes(needless=_NAMES),
    "*.fileroot": lambda value: Becomes(needless=_FOLDERS),
    "cluster.fileroot": goes_to("trainer.ckpt_path", convert=lambda value: f"{str(value).rstrip('/')}/checkpoints"),
    "seed": goes_to("trainer.seed"),
    "total_train_epochs": goes_to("trainer.epochs"),
    "exp_ctrl.total_train_epochs": goes_to("trainer.epochs"),
    "total_train_steps": goes_to("trainer.max_training_steps"),
    "total_train_n_seqs": later("a length of the run in samples"),
    "tokenizer_path": later("a tokenizer other than the model's", ""),
    "async_training": later(_ASYNC, False),
    "max_turns": goes_to("generator.max_turns"),
    # models
    "actor.path": goes_to("trainer.policy.model.path"),
    "ref.path": goes_to("trainer.ref.model.path"),
    "critic.path": goes_to("trainer.critic.model.path"),
    "*.init_from_scratch": _REAL,
    "*.disable_dropout": only(True, does="dropout is always off", otherwise="training with dropout"),
    "actor.gradient_checkpointing": goes_to("trainer.gradient_checkpointing"),
    "*.gradient_checkpointing": lambda value: Becomes(needless="one field for all: trainer.gradient_checkpointing"),
    "actor.dtype": goes_to("trainer.bf16", convert=lambda value: value in ("bfloat16", "bf16")),
    "actor.bf16": goes_to("trainer.bf16"),
    "ref.dtype": lambda value: Becomes(needless="one field for all models: trainer.bf16"),
    "ref.bf16": lambda value: Becomes(needless="one field for all models: trainer.bf16"),
    "*.backend": lambda value: Becomes(needless="allocation_mode decides, here as there"),
    "*.mb_spec.max_tokens_per_mb": later("micro-batches by their number of tokens: see micro_train_batch_size_per_gpu"),
    "*.mb_spec.*": later("micro-batches by their number of tokens"),
    "*.pad_to_maximum": only(True, False, does="results do not depend on padding", otherwise="padding"),
    "*.type._class": lambda value: Becomes(needless="the model says what it is"),
    "actor.attn_impl": goes_to("trainer.attention"),
    # optimizer
    "actor.optimizer.type": only("adam", "adamw", does="AdamW is the optimizer", otherwise="other optimizers"),
    "actor.optimizer.lr": goes_to(_OPTIMIZER + "lr", convert=number),
    "actor.optimizer.weight_decay": goes_to(_OPTIMIZER + "weight_decay", convert=number),
    "actor.optimizer.beta1": _betas(0),
    "actor.optimizer.beta2": _betas(1),
    "actor.optimizer.eps": later("the epsilon of AdamW", "1e-8", 1e-8),
    "actor.optimizer.lr_scheduler_type": _scheduler,
    "actor.optimizer.gradient_clipping": goes_to(_OPTIMIZER + "max_grad_norm", convert=number),
    "actor.optimizer.warmup_steps_proportion": _warmup,
    "actor.optimizer.offload": goes_to("trainer.policy.fsdp_config.cpu_offload"),
    "actor.optimizer.min_lr_ratio": later("a least learning rate", 0.0),
    "actor.optimizer.*": lambda value: Becomes(needless="scaling of a loss in float16, which is not used"),
    "actor.megatron.ddp.grad_reduce_in_fp32": goes_to("trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32"),
    "actor.megatron.ddp.overlap_grad_reduce": goes_to("trainer.policy.megatron_config.ddp_config.overlap_grad_reduce"),
    "actor.megatron.ddp.use_distributed_optimizer": only(True, does="always on", otherwise="one on every rank"),
    "ref.optimizer": only(None, does="the reference has none", otherwise="an optimizer of the reference"),
    # objective
    "actor.eps_clip": goes_to(_ALGORITHM + "eps_clip_low", _ALGORITHM + "eps_clip_high", convert=number),
    "ppo.eps_clip": goes_to(_ALGORITHM + "eps_clip_low", _ALGORITHM + "eps_clip_high", convert=number),
    "actor.eps_clip_higher": goes_to(_ALGORITHM + "eps_clip_high", convert=number),
    "actor.c_clip": goes_to(_ALGORITHM + "clip_ratio_c", convert=number),
    "ppo.c_clip": goes_to(_ALGORITHM + "clip_ratio_c", convert=number),
    "actor.temperature": goes_to(_ALGORITHM + "temperature", convert=number),
    "actor.kl_ctl": _kl,
    "ppo.kl_ctl": _kl,
    "actor.discount": goes_to(_ALGORITHM + "gamma", convert=number),
    "ppo.discount": goes_to(_ALGORITHM + "gamma", convert=number),
    "actor.gae_lambda": goes_to(_ALGORITHM + "lambd", convert=number),
    "ppo.gae_lambda": goes_to(_ALGORITHM + "lambd", convert=number),
    "ppo.value_eps_clip": goes_to(_ALGORITHM + "value_clip", convert=number),
    "ppo.disable_value": only(True, does="no model is given to a critic", otherwise="a critic without a path"),
    "ppo.use_adaptive_kl_ctl": goes_to(_ALGORITHM + "kl_ctrl.type", convert=lambda on: "adaptive" if on else "fixed"),
    "ppo.adv_norm": goes_to(_ALGORITHM + "advantage_batch_normalize"),
    "group_adv_norm": later("normalising advantages twice", False),
    "actor.adv_norm.mean_level": only("group", does="means are taken over a group", otherwise="means over the batch"),
    "actor.adv_norm.std_level": _std,
    "actor.adv_norm.group_size": lambda value: Becomes(needless="a group is generator.n_samples_per_prompt samples"),
    "actor.group_size": lambda value: Becomes(needless="a group is generator.n_samples_per_prompt samples"),
    "group_size": goes_to("generator.n_samples_per_prompt"),
    "*.reward_scaling": later(_SHAPING, 1.0, 1),
    "*.reward_bias": later(_SHAPING, 0.0, 0),
    "ppo.reward_output_scaling": later(_SHAPING, 1.0, 1),
    "ppo.reward_output_bias": later(_SHAPING, 0.0, 0),
    "ppo.max_reward_clip": later(_SHAPING),
    "*.recompute_logprob": only(True, does="it always is", otherwise="the engine's log-probabilities as the old ones"),
    "*.use_decoupled_loss": later(_DECOUPLED, False),
    "*.behav_imp_weight_cap": later(_DECOUPLED),
    "actor.dynamic_sampling": _dynamic,
    "actor.overlong_*": later("a penalty for long answers", False),
    "actor.max_new_tokens": lambda value: Becomes(needless="as generator.sampling_params.max_generate_length"),
    "actor.log_agent_stats*": later("statistics of agents", False),
    "mask_too_long": goes_to("generator.apply_overlong_filtering"),
    # sampling
    "gconfig.n_samples": goes_to("generator.n_samples_per_prompt"),
    "gconfig.max_new_tokens": goes_to(_SAMPLING + "max_generate_length"),
    "ppo.gen.max_new_tokens": goes_to(_SAMPLING + "max_generate_length"),
    "*.min_new_tokens": _least_new,
    "*.greedy": _greedy,
    "gconfig.temperature": goes_to(_SAMPLING + "temperature", convert=number),
    "ppo.gen.temperature": goes_to(_SAMPLING + "temperature", convert=number),
    "*.top_p": goes_to(_SAMPLING + "top_p", convert=number),
    "*.top_k": _top_k,
    "gconfig.stop": goes_to(_SAMPLING + "stop"),
    "ppo.gen.n": only(1, does="group_size counts the samples", otherwise="samples within samples"),
    # data
    "train_dataset.path": _batch_of_one_source("data.train_data"),
    "dataset.path": _batch_of_one_source("data.train_data"),
    "valid_dataset.path": _batch_of_one_source("data.val_data"),
    "train_dataset.batch_size": goes_to("trainer.train_batch_size"),
    "dataset.train_bs_n_seqs": goes_to("trainer.train_batch_size"),
    "valid_dataset.batch_size": goes_to("trainer.eval_batch_size"),
    "train_dataset.max_length": goes_to("trainer.max_prompt_length"),
    "dataset.max_prompt_len": goes_to("trainer.max_prompt_length"),
    "train_dataset.shuffle": only(True, does="training prompts are always shuffled", otherwise="training in order"),
    "shuffle_dataset": only(True, does="training prompts are always shuffled", otherwise="training in order"),
    "valid_dataset.shuffle": lambda value: Becomes(needless="evaluation takes every prompt; its order does not matter"),
    "*_dataset.pin_memory": lambda value: Becomes(needless="prompts are text: there is no memory to pin"),
    "*_dataset.num_workers": lambda value: Becomes(needless="prompts are read by one process"),
    "*_dataset.type": only("rl", does="prompts", otherwise=_SFT),
    "success_rate_*": later("leaving prompts out by their success rate"),
    # engines
    "rollout.max_head_offpolicyness": goes_to("trainer.fully_async.max_staleness_steps"),
    "max_head_offpolicyness": goes_to("trainer.fully_async.max_staleness_steps"),
    "rollout.max_concurrent_rollouts": goes_to("trainer.fully_async.num_parallel_generation_workers"),
    "rollout.consumer_batch_size": lambda value: Becomes(needless="follows from trainer.train_batch_size"),
    "rollout.queue_size": later("a bound on waiting samples"),
    "rollout.enable_rollout_tracing": later("tracing of rollouts", False),
    "*sglang.model_path": lambda value: Becomes(needless="the engines serve the policy"),
    "*sglang.random_seed": lambda value: Becomes(needless="seeds of samples follow from trainer.seed"),
    "*sglang.skip_tokenizer_init": lambda value: Becomes(needless="engines are given tokens"),
    "*sglang.dtype": goes_to(_ENGINE + "model_dtype"),
    "*sglang.max_running_requests": goes_to(_ENGINE + "max_num_seqs"),
    "*sglang.context_length": goes_to(_ENGINE + "engine_init_kwargs.max_model_len"),
    "*sglang.mem_fraction_static": goes_to(_ENGINE + "gpu_memory_utilization", convert=number),
    "*sglang.disable_cuda_graph": goes_to(_ENGINE + "enforce_eager"),
    "*sglang.disable_radix_cache": goes_to(_ENGINE + "enable_prefix_caching", convert=lambda off: not off),
    "*sglang.max_prefill_tokens": goes_to(_ENGINE + "max_num_batched_tokens"),
    "*sglang.*": later(_SGLANG, False, ""),
    # keeping and watching
    "saver.freq_steps": _steps("trainer.hf_save_interval"),
    "recover.freq_steps": _steps("trainer.ckpt_interval"),
    "evaluator.freq_steps": _steps("trainer.eval_interval"),
    "*.freq_epochs": later(_INTERVALS),
    "*.freq_secs": later(_INTERVALS),
    "exp_ctrl.save_freq_steps": _steps("trainer.hf_save_interval"),
    "exp_ctrl.ckpt_freq_steps": _steps("trainer.ckpt_interval"),
    "exp_ctrl.eval_freq_steps": _steps("trainer.eval_interval"),
    "exp_ctrl.*": later(_INTERVALS),
    "recover.mode": _recovery,
    "recover_mode": _recovery,
    "recover.retries": goes_to("trainer.recover_retries"),
    "recover_retries": goes_to("trainer.recover_retries"),
    "recover_after": later("starting a failed run again by itself"),
    "stats_logger.wandb.mode": _wandb,
    "wandb.mode": _wandb,
    "*wandb.*": later("settings of W&B beyond project and run"),
    "tensorboard.path": later("a folder of TensorBoard's own"),
    # machines
    "cluster.name_resolve.*": lambda value: Becomes(needless="processes find each other through Ray"),
    "launcher.*": later(_HOST),
    "cpus_per_*": later(_HOST),
    "mem_per_*": later(_HOST),
    "mode": only("ray", "local", does="Ray starts what one process cannot hold", otherwise="launchers other than Ray"),
    "metric_discovery_port": later("metrics over a port", 0),
    "ray_temp_path": later("a temporary folder of Ray's"),
    # AReaL's older system
    "actor_train.*": later(_LEGACY),
    "actor_inf.*": later(_LEGACY),
    "ref_inf.*": later(_LEGACY),
    "ppo.actor_sample_reuse": goes_to("trainer.update_epochs_per_batch"),
    "ppo.critic_sample_reuse": later(_LEGACY, 1),
    "ppo.early_stop_imp_ratio": later("stopping an update early"),
    "ppo.fuse_rew_ref": lambda value: Becomes(needless="how its older system overlaps two passes"),
    "rw_type": later("types of rewards: environment.env_class", "sparse"),
    "cache_clear_freq": lambda value: Becomes(needless="memory is given back where models take turns"),
    "torch_cache_mysophobia": goes_to("trainer.policy.megatron_config.empty_cuda_cache"),
    "flush_request_timeout": goes_to("trainer.placement.call_timeout_seconds", convert=number),
    "n_rollout_workers": later("processes for rollouts"),
    # supervised fine-tuning
    "model.*": later(_SFT),
}  # fmt: skip
"""The first pattern that fits counts, an exact key before any pattern."""

"""The meaning of each of AReaL's settings in our tree.

Keys are patterns: `*` matches one or more names. An entry is a path of ours, or a function from the value to its
conversion: see `interop/translation.py`. Single values come first, then settings of rollouts (agents, evaluation
samples, engines, data, traces, and what no table of 2025 has), then the others.

In a conversion that keeps SGLang (`skyrl config convert --keep-engine`), an option of it with a field of ours becomes
that field, as for vLLM. The others go to `engine_init_kwargs` under their own names, which are those of SGLang's
server.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from attrs import evolve

from skyrl.interop.areal.machines import LINES_OF_BASH, without_own_folder
from skyrl.interop.areal.objective import FUNCTION
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    EVALUATION,
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
    unsupported,
    when_on,
    word,
)
from skyrl.interop.values import Read, read_environment
from skyrl.tree.types import display_value

LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Fields of an optimizer table that count only in float16, in both systems."""


def switch(path: str, *, off: str) -> Entry:
    """Entry of a switch that is off by default in both systems; `off` describes that state."""
    usual = fixed(False, None, does=off, otherwise=off)
    return lambda value: Translation(writes={path: True}) if value is True else usual(value)


def kl(value: object, estimator: object = "k1") -> Translation:
    """Convert `kl_ctl`. AReaL subtracts it times the divergence, estimated by `kl_estimator`, from the rewards."""
    weight = number(value)
    writes: dict[str, Any] = {ALGORITHM + "use_kl_loss": False, ALGORITHM + "use_kl_in_reward": weight != 0}
    if weight != 0:
        writes |= {ALGORITHM + "kl_loss_coef": weight, ALGORITHM + "kl_estimator_type": estimator}
    return Translation(writes=writes)


def optimizer_keys(source: str, target: str, cpu_offload: str) -> dict[str, Entry]:
    """Entries for the optimizer table `source`, which corresponds to ours at `target`; both prefixes end with a dot."""
    usual = fixed("adam", "adamw", does="AdamW is the default optimizer", otherwise="other optimizers")

    def scheduler(value: object) -> Translation:
        names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
        if word(value, names) not in names:
            return refused(f"unknown schedule {display_value(value)}; AReaL supports: {', '.join(names)}")
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


def recovery(path: str, value: object) -> Translation:
    """Convert the way to resume after a failure, to our setting at the path."""
    modes = {"off": "disabled", "on": "auto"} | {mode: mode for mode in ("disabled", "auto", "fault", "resume")}
    if isinstance(value, bool):  # YAML 1.1 reads `off` and `on` as booleans
        value = "on" if value else "off"
    if not isinstance(value, str) or value not in modes:
        return refused(f"unknown recovery mode {display_value(value)}; AReaL supports: {', '.join(modes)}")
    return Translation(writes={path: modes[value]})


def _success_rate(bound: str, everything: float, value: object) -> Translation:
    """Convert a bound on the share of good samples in a group; the value `everything` keeps all groups."""
    if number(value) in (None, everything):
        return redundant("every group is kept")
    table = ALGORITHM + "dynamic_sampling."
    note = "groups whose rewards are all equal are dropped, too"
    return Translation(writes={f"{table}type": "filter", f"{table}{bound}": number(value)}, note=note)


def checkpoints(path: str, key: str, value: object, values: Values) -> Translation:
    """Convert the folder of all experiments to our setting at the path. Each experiment has its own folder for
    checkpoints, so that none continues from another.
    """
    names = [read_environment(values.get(name), name).value for name in ("experiment_name", "trial_name")]
    if any(not isinstance(name, str) or not name or name.startswith("env:") or "$" in name for name in names):
        return redundant("checkpoints are kept in the run's folder, since the file does not name its trial")
    return Translation(writes={path: "/".join([str(value).rstrip("/"), "checkpoints", *names])})


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


_VLLM_KWARGS = ENGINE + "engine_init_kwargs."
_SAVED = "every sample is saved in trajectories.jsonl of the run folder: see skyrl view"
_TUNING = "affects SGLang's speed, not its output; vLLM tunes itself, and --keep-engine keeps SGLang with this option"
_ADAPTERS = "adapter transfer and naming are derived from trainer.policy.model.lora"
_REPLAYED = "with trainer.policy.moe_enable_routing_replay, the learner uses the same experts"
_TRACED = "the duration of every phase is a metric of each step; trainer.profile_steps traces the listed steps"
_OF_SERVICES = "used by AReaL's rollout services, which are separate processes; here the run calls its engines directly"


def _count_from_one(steps: object) -> object:
    """Steps counted from 1, from AReaL's steps counted from 0."""
    return [step + 1 for step in steps if isinstance(step, int)] if isinstance(steps, list) else steps


def _sampling(source: str, target: str) -> dict[str, Entry]:
    """Entries for one table of AReaL's `GenerationHyperparameters`."""
    return {
        f"{source}.max_new_tokens": f"{target}max_generate_length",
        f"{source}.min_new_tokens": f"{target}min_new_tokens",
        f"{source}.max_tokens": f"{target}max_tokens",
        f"{source}.greedy": f"{target}greedy",
        f"{source}.temperature": numeric(f"{target}temperature"),
        f"{source}.top_p": numeric(f"{target}top_p"),
        f"{source}.top_k": top_k(f"{target}top_k"),
        f"{source}.stop": f"{target}stop",
        f"{source}.stop_token_ids": f"{target}stop_token_ids",
        f"{source}.frequency_penalty": numeric(f"{target}frequency_penalty"),
        f"{source}.ignore_eos": when_on(f"{target}additional_kwargs", {"ignore_eos": True}),
        f"{source}.skip_special_tokens": missing("special tokens in response texts", True),
        f"{source}.use_beam_search": missing("beam search", False),
        f"{source}.lora_name": redundant(_ADAPTERS),
        f"{source}.seed": missing("one sampling seed for all requests"),
        f"{source}.drop_incomplete_group": missing("dropping the groups of prompts with a failed sample", False),
        f"{source}.reward_normalization": missing("rewards normalized within the rollout of a group", False),
        f"{source}._OPENAI_UNSUPPORTED_ARGS": missing("an internal constant of AReaL"),
    }


_EXPERTS = when_on(ENGINE + "enable_return_routed_experts", True, note=_REPLAYED)
"""The return of routed experts. AReaL stores the experts that engines return; its learners ignore them."""


def agent(key: str, value: object, values: Values) -> Translation | None:
    """Convert a setting of agents that has AReaL's default, in a file that names no agent; None for any other one."""
    defaults = peer_trees("areal", "GRPOConfig")[-1].defaults
    names_one = values.get(_AGENT_CLASS) not in (None, "", defaults[_AGENT_CLASS])
    return None if names_one or value != defaults.get(key, _AGENT_CLASS) else redundant("AReaL's default, for agents")


_AGENT_CLASS = "rollout.agent.agent_cls_path"
_AGENT: dict[str, Entry] = {
    "agent_cls_path": lambda value: (
        Translation(
            writes={"environment.agent.function": ":".join(str(value).rsplit(".", 1))},
            note="called with a task and an address: see docs/agents.md",
        )
        if value
        else redundant("not set")
    ),
    "mode": fixed(
        *("inline", "subproc"),
        does="environment.agent runs a function or a command",
        otherwise="user sessions as training data",
    ),
    "subproc_max_workers": "environment.agent.max_concurrent",
    "session_timeout_seconds": numeric("environment.agent.timeout_seconds"),
    "turn_discount": fixed(
        *(1.0, 1), does="all rows of an agent share its reward", otherwise="rewards discounted by turn"
    ),
    "export_style": redundant("every token sampled from the policy is trained on once: see docs/agents.md"),
    "tool_call_parser": fixed(
        *("qwen", "qwen25", "hermes"),
        does="tool calls are parsed in the format of Hermes, Qwen2.5 and Qwen3",
        otherwise="other tool-call formats",
    ),
    "reasoning_parser": fixed(
        "qwen3", "", None, does="reasoning is parsed from <think> tags", otherwise="other reasoning formats"
    ),
    "chat_template_type": fixed(
        "hf", does="the tokenizer's chat template is used", otherwise="turns without a chat template"
    ),
    "engine_max_tokens": f"{SAMPLING}max_tokens",
    "message_preprocessors": missing("preprocessors of an agent's requests", []),
    "prefix_matcher": missing("a function that compares an agent's messages"),
    "drop_retry_orphans": missing("dropping the answers to an agent's requests that it sent again", False),
    "set_reward_finish_timeout": missing("rewards that arrive after an agent has ended", 0, 0.0),
    "admin_api_key": redundant("each trajectory has its own key, which expires with it"),
    "*": missing("agent settings beyond those of environment.agent"),
}  # fmt: skip

_SGLANG_KEYS: dict[str, Entry] = {
    **{name: redundant(_TUNING) for name in (
        "disable_cuda_graph_padding", "enable_nccl_nvls", "disable_outlines_disk_cache", "disable_overlap_schedule",
        "enable_mixed_chunk", "enable_torch_compile", "torch_compile_max_bs", "cuda_graph_max_bs", "cuda_graph_bs",
        "enable_p2p_check", "enable_memory_saver", "enable_multithread_load", "attention_backend",
        "triton_attention_num_kv_splits", "num_continuous_decode_steps", "schedule_policy", "schedule_conservativeness",
        "sampling_backend",
    )},
    "triton_attention_reduce_in_fp32": missing("attention reductions in float32", False),
    "disable_custom_all_reduce": f"{ENGINE}engine_init_kwargs.disable_custom_all_reduce",
    "dp_size": fixed(1, does="replicas are derived from the backend", otherwise="data parallelism within an engine"),
    "ep_size": f"{ENGINE}expert_parallel_size",
    "enable_ep_moe": missing("expert parallelism without ep_size", False),
    "enable_dp_attention": missing("data-parallel attention", False),
    "torchao_config": missing("torchao quantization of engines", ""),
    "enable_nan_detection": missing("NaN detection in engines", False),
    "allow_auto_truncate": missing("prompts truncated by the engine", False),
    "enable_metrics": f"{ENGINE}enable_ray_prometheus_stats",
    "enable_return_routed_experts": _EXPERTS,
    "enable_deterministic_inference": missing("deterministic inference in SGLang", False),
    "load_format": fixed("auto", does="weights are files of safetensors", otherwise="other formats of weights"),
    **{name: redundant(_ADAPTERS) for name in (
        "enable_lora", "max_lora_rank", "max_loaded_loras", "lora_paths", "lora_backend",
    )},
}  # fmt: skip

ROLLOUT_KEYS: dict[str, Entry] = {
    **_sampling("gconfig", SAMPLING),
    **_sampling("eval_gconfig", EVALUATION),
    "eval_gconfig.n_samples": "generator.eval_n_samples_per_prompt",
    **{table: missing("a value for a whole table; set its fields instead") for table in (
        "eval_gconfig", "ref", "critic", "valid_dataset",
    )},
    **{f"rollout.agent.{name}": entry for name, entry in _AGENT.items()},
    **{f"sglang.{name}": entry for name, entry in _SGLANG_KEYS.items()},
    **{f"actor.sglang.{name}": entry for name, entry in _SGLANG_KEYS.items()},
    "rollout.dump_to_file": redundant(_SAVED),
    "rollout.enable_rollout_tracing": redundant(_SAVED),
    "rollout.use_lora": redundant(_ADAPTERS),
    "rollout.lora_name": redundant(_ADAPTERS),
    "rollout.deterministic_sampling": redundant("sampling seeds are derived from trainer.seed"),
    "rollout.serialize_group_samples": redundant("the samples of a prompt do not affect each other"),
    "rollout.workers_ready_timeout": redundant("one limit for all processes: trainer.placement.start_timeout_seconds"),
    "rollout.request_retries": fixed(
        3,
        does="samples of a failed engine are generated again by another one",
        otherwise="another number of request retries",
    ),
    "rollout.pause_grace_period": missing("a grace period before weights are sent", 0, 0.0),
    "rollout.return_routed_experts": _EXPERTS,
    "rollout._version": redundant(_OF_SERVICES),
    "rollout.admin_api_key": redundant(_OF_SERVICES),
    "rollout.model": redundant("agents receive the policy's model name"),
    "rollout.routing_strategy": fixed(
        "round_robin", does="samples are distributed evenly", otherwise="other routing strategies"
    ),
    "rollout.poll_interval": redundant(
        "unresponsive processes are detected by trainer.placement.heartbeat_timeout_seconds"
    ),
    "rollout.api_url": missing("training on responses from another provider", ""),
    "rollout.provider_api_key": missing("training on responses from another provider", ""),
    # data
    "*_dataset.split": redundant("appended to the data source; a file has no splits"),
    **{f"*_dataset.{name}": redundant("rows are read once, when the run starts, by its main process") for name in (
        "num_workers", "num_dataset_workers", "setup_timeout", "scheduling_spec*",
    )},
    "*_dataset.dataset_kwargs": missing("arguments of AReaL's data-loading functions", {}),
    "*_dataset.dataset_kwargs.*": missing("arguments of AReaL's data-loading functions"),
    # keeping and watching
    "evaluator.eval_before_train": "trainer.eval_before_train",
    "saver.mode": redundant("affects how files are written, not their content"),
    "recover.no_save_optim": missing("checkpoints without optimizer state", False),
    "recover.no_load_optim": missing("resuming without optimizer state", False),
    "perf_tracer.profile_steps": maps_to("trainer.profile_steps", convert=_count_from_one),
    "perf_tracer.session_tracer.*": redundant(_SAVED),
    "perf_tracer*": redundant(_TRACED),
    "memory_profiler.profile_steps": lambda value: Translation(
        writes={"trainer.profile_steps": _count_from_one(value), "trainer.policy.record_memory": True}
    ),
    "memory_profiler*": redundant("up to a million allocations are recorded per profiled step"),
    # vLLM
    "vllm.model": redundant("engines always serve the policy"),
    "vllm.seed": redundant("sampling seeds are derived from trainer.seed"),
    "vllm.skip_tokenizer_init": redundant("engines receive token IDs"),
    "vllm.enforce_eager": ENGINE + "enforce_eager",
    "vllm.dtype": ENGINE + "model_dtype",
    "vllm.distributed_executor_backend": ENGINE + "distributed_executor_backend",
    "vllm.max_num_seqs": ENGINE + "max_num_seqs",
    "vllm.gpu_memory_utilization": numeric(ENGINE + "gpu_memory_utilization"),
    "vllm.no_enable_chunked_prefill": maps_to(ENGINE + "enable_chunked_prefill", convert=lambda off: not off),
    "vllm.no_enable_prefix_caching": maps_to(ENGINE + "enable_prefix_caching", convert=lambda off: not off),
    **{f"vllm.{name}": _VLLM_KWARGS + name for name in (
        "max_model_len", "block_size", "cpu_offload_gb", "disable_sliding_window", "gdn_prefill_backend",
    )},
    "vllm.enable_sleep_mode": redundant("engines sleep when models take turns on GPUs"),
    "vllm.worker_extension_cls": redundant("weight transfer needs no worker extension"),
    "vllm.uvicorn_log_level": redundant("each engine has a log file under trainer.log_path"),
    **{f"vllm.{name}": redundant(_ADAPTERS) for name in ("max_lora_rank", "max_loras", "lora_modules", "enable_lora")},
    # others
    "teacher": redundant("set by its settings"),
    "dynamic_bs": missing("dynamic batches, which end once enough samples were seen", False),
    "ref.optimizer.*": redundant("the reference model has no optimizer"),
    "post_exit_hook": missing("a command that runs after the run", ""),
    "*.scheduling_spec[[]*": missing("scheduling settings beyond those in docs/launching.md"),
    "rollout.tokenizer_path": redundant("the policy's tokenizer is used"),
    "stats_logger.trackio.*": missing("the Trackio tracker", "disabled"),
}  # fmt: skip
"""Keys in the form of `KEYS`, looked up before them."""


KEPT = "sglang"
"""The value of `backend` for engines that remain SGLang."""

OTHERS: Mapping[str, tuple[Any, str, Any]] = {
    "sglang.disable_cuda_graph": (False, ENGINE + "enforce_eager", False),
    "sglang.mem_fraction_static": (0.9, ENGINE + "gpu_memory_utilization", 0.9),
    "sglang.chunked_prefill_size": (-1, ENGINE + "enable_chunked_prefill", False),
    **{f"sglang.{name}": (default, f"{ENGINE}engine_init_kwargs.{name}", default) for name, default in (
        ("attention_backend", "fa3"), ("max_prefill_tokens", 32768), ("schedule_policy", "lpm"),
    )},
}  # fmt: skip
"""Defaults in the form of `areal.defaults.OTHERS`, for engines that remain SGLang."""

_AS_FOR_VLLM = (
    "model_path", "random_seed", "skip_tokenizer_init", "dtype", "max_running_requests", "mem_fraction_static",
    "disable_cuda_graph", "disable_radix_cache", "chunked_prefill_size", "dp_size", "enable_multimodal", "enable_lora",
    "max_lora_rank", "lora_paths",
)  # fmt: skip
_OF_THE_RUN = ("host", "port", "device", "tp_size", "enable_deterministic_inference")


def for_sglang(dependent: Mapping[str, Dependent]) -> dict[str, Dependent]:
    """The table of dependent settings, changed for engines that remain SGLang."""
    options = dict.fromkeys(("sglang.*", "actor.sglang.*", "rollout.return_routed_experts"), _option)
    allocations = {key: partial(_single_stage, dependent[key]) for key in ("allocation_mode", "*.backend")}
    return {**dependent, **options, **allocations}


def _option(key: str, value: object, values: Values) -> Translation | None:
    """Convert `sglang.NAME` or `actor.sglang.NAME`; None for an option that has the same meaning for vLLM."""
    table, _, name = key.rpartition(".")
    if name in ("enable_return_routed_experts", "return_routed_experts") and value:
        return unsupported("routed experts from SGLang engines; vLLM engines return them")
    if table not in ("sglang", "actor.sglang") or name in _AS_FOR_VLLM:
        return None
    if name == "context_length":
        return redundant("derived from the run's longest prompt and response")
    if name in _OF_THE_RUN:
        return refused("derived from the run's other settings")
    if name == "enable_multithread_load" and value:  # AReaL passes it to the loader, too
        return Translation(writes={f"{_VLLM_KWARGS}model_loader_extra_config.{name}": value})
    if name != "enable_metrics" and (value is None or value is False or value in ("", [])):
        return redundant("no effect: AReaL does not pass this value to SGLang")
    return Translation(writes={f"{ENGINE}engine_init_kwargs.{name}": value})


def _single_stage(convert: Dependent, key: str, value: object, values: Values) -> Translation | None:
    """Convert an allocation for SGLang engines: they have one pipeline stage here, and more are refused."""
    translation = convert(key, value, values)
    if translation is None:
        return None
    writes = dict(translation.writes)
    if writes.pop(ENGINE + "pipeline_parallel_size", 1) != 1:
        return unsupported("pipeline parallelism in SGLang engines")
    return evolve(translation, writes=writes)


_INTERVALS = "intervals other than those of exports, checkpoints and evaluation"
_SGLANG = "SGLang options, because the engines become vLLM; --keep-engine keeps SGLang and its options"
_LOGS = "each engine has a log file under trainer.log_path"
_TOKENS = "one setting for all models: trainer.max_tokens_per_microbatch; it does not affect results"
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
    "*.fileroot": redundant("folders are set once: trainer.run_path, ckpt_path and export_path"),
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
    "*.mb_spec.n_mbs": redundant("one setting for all models: trainer.min_microbatches; it does not affect results"),
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
    "success_rate_lb": partial(_success_rate, "min_success_rate", 0.0),
    "success_rate_ub": partial(_success_rate, "max_success_rate", 1.0),
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
    "recover.mode": partial(recovery, "trainer.recover_mode"),
    "recover_mode": partial(recovery, "trainer.recover_mode"),
    "recover.retries": "trainer.recover_retries",
    "recover_retries": "trainer.recover_retries",
    "recover_after": missing("a delay before a failed run is restarted"),
    # machines
    "cluster.cluster_name": redundant("only a label"),
    "scheduler.*": missing("settings of AReaL's services other than their addresses"),
    "launcher.*": missing("launcher settings beyond those in docs/launching.md"),
    "metric_discovery_port": missing("metrics served on a port", 0),
    # AReaL's older system
    **dict.fromkeys(("actor_train.*", "actor_inf.*", "ref_inf.*"), missing(_LEGACY)),
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

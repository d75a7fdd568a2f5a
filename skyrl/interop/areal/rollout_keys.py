"""AReaL's settings of rollouts: agents, evaluation samples, engines, data, traces, and what no table of 2025 has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.interop.areal.keys import top_k
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.translation import (
    ENGINE,
    SAMPLING,
    Dependent,
    Entry,
    Translation,
    Values,
    fixed,
    maps_to,
    missing,
    numeric,
    redundant,
    refused,
    unsupported,
    when_on,
)

_VLLM = ENGINE + "engine_init_kwargs."
_EVALUATION = "generator.eval_sampling_params."
_KEPT = "every sample is saved in trajectories.jsonl of the run folder: see skyrl view"
_READ_ONCE = "rows are read once, when the run starts, by its main process"
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

_SGLANG: dict[str, Entry] = {
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
    **_sampling("eval_gconfig", _EVALUATION),
    "eval_gconfig.n_samples": "generator.eval_n_samples_per_prompt",
    **{table: missing("a value for a whole table; set its fields instead") for table in (
        "eval_gconfig", "ref", "critic", "valid_dataset",
    )},
    **{f"rollout.agent.{name}": entry for name, entry in _AGENT.items()},
    **{f"sglang.{name}": entry for name, entry in _SGLANG.items()},
    **{f"actor.sglang.{name}": entry for name, entry in _SGLANG.items()},
    "rollout.dump_to_file": redundant(_KEPT),
    "rollout.enable_rollout_tracing": redundant(_KEPT),
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
    "*_dataset.num_workers": redundant(_READ_ONCE),
    "*_dataset.num_dataset_workers": redundant(_READ_ONCE),
    "*_dataset.setup_timeout": redundant(_READ_ONCE),
    "*_dataset.scheduling_spec*": redundant(_READ_ONCE),
    "*_dataset.dataset_kwargs": missing("arguments of AReaL's data-loading functions", {}),
    "*_dataset.dataset_kwargs.*": missing("arguments of AReaL's data-loading functions"),
    # keeping and watching
    "evaluator.eval_before_train": "trainer.eval_before_train",
    "saver.mode": redundant("affects how files are written, not their content"),
    "recover.no_save_optim": missing("checkpoints without optimizer state", False),
    "recover.no_load_optim": missing("resuming without optimizer state", False),
    "perf_tracer.profile_steps": maps_to("trainer.profile_steps", convert=_count_from_one),
    "perf_tracer.session_tracer.*": redundant(_KEPT),
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
    **{f"vllm.{name}": _VLLM + name for name in (
        "max_model_len", "block_size", "cpu_offload_gb", "disable_sliding_window", "gdn_prefill_backend",
    )},
    "vllm.enable_sleep_mode": redundant("engines sleep when models take turns on GPUs"),
    "vllm.worker_extension_cls": redundant("weight transfer needs no worker extension"),
    "vllm.uvicorn_log_level": redundant("each engine has a log file under trainer.log_path"),
    "vllm.max_lora_rank": redundant(_ADAPTERS),
    "vllm.max_loras": redundant(_ADAPTERS),
    "vllm.lora_modules": redundant(_ADAPTERS),
    "vllm.enable_lora": redundant(_ADAPTERS),
    # others
    "teacher": redundant("set by its settings"),
    "dynamic_bs": missing("dynamic batches, which end once enough samples were seen", False),
    "ref.optimizer.*": redundant("the reference model has no optimizer"),
    "post_exit_hook": missing("a command that runs after the run", ""),
    "*.scheduling_spec[[]*": missing("scheduling settings beyond those in docs/launching.md"),
    "rollout.tokenizer_path": redundant("the policy's tokenizer is used"),
    "stats_logger.trackio.*": missing("the Trackio tracker", "disabled"),
}  # fmt: skip
"""Keys in the form of `areal.keys.KEYS`, looked up before them."""


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
    return {**dependent, **options, **{key: _single_stage(dependent[key]) for key in ("allocation_mode", "*.backend")}}


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
        return Translation(writes={f"{_VLLM}model_loader_extra_config.{name}": value})
    if name != "enable_metrics" and (value is None or value is False or value in ("", [])):
        return redundant("no effect: AReaL does not pass this value to SGLang")
    return Translation(writes={f"{ENGINE}engine_init_kwargs.{name}": value})


def _single_stage(convert: Dependent) -> Dependent:
    """The conversion of an allocation, for SGLang engines: they have one pipeline stage here, and more are refused."""

    def become(key: str, value: object, values: Values) -> Translation | None:
        translation = convert(key, value, values)
        if translation is None:
            return None
        writes = dict(translation.writes)
        if writes.pop(ENGINE + "pipeline_parallel_size", 1) != 1:
            return unsupported("pipeline parallelism in SGLang engines")
        return evolve(translation, writes=writes)

    return become

"""AReaL's settings of rollouts: agents, evaluation samples, engines, data and traces."""

from __future__ import annotations

from skyrl.interop.conversions import (
    ENGINE,
    SAMPLING,
    Becomes,
    Entry,
    goes_to,
    later,
    not_there,
    number,
    only,
    top_k_at,
)

_EVALUATION = "generator.eval_sampling_params."
_KEPT = "every sample is saved in trajectories.jsonl of the run folder: see skyrl view"
_READ_ONCE = "rows are read once, when the run starts, by its main process"
_TUNING = "affects SGLang's speed, not its output; vLLM tunes itself, and --keep-engine keeps SGLang with this option"
_ADAPTERS = "adapter transfer and naming are derived from trainer.policy.model.lora"
_REPLAYED = "with trainer.policy.moe_enable_routing_replay, the learner uses the same experts"
_TRACED = "the duration of every phase is a metric of each step; trainer.profile_steps traces the listed steps"
_OF_SERVICES = "used by AReaL's rollout services, which are separate processes; here the run calls its engines directly"


def _from_one(steps: object) -> object:
    """Steps counted from 1, from AReaL's steps counted from 0."""
    return [step + 1 for step in steps if isinstance(step, int)] if isinstance(steps, list) else steps


def _experts(returned: object) -> Becomes:
    """Convert the return of routed experts. AReaL stores the experts that engines return; its learners ignore them."""
    if not returned:
        return Becomes(needless="off")
    return Becomes(writes={f"{ENGINE}enable_return_routed_experts": True}, note=_REPLAYED)


def _sampling(theirs: str, ours: str) -> dict[str, Entry]:
    """Entries for one table of AReaL's `GenerationHyperparameters`."""
    return {
        f"{theirs}.max_new_tokens": goes_to(f"{ours}max_generate_length"),
        f"{theirs}.min_new_tokens": goes_to(f"{ours}min_new_tokens"),
        f"{theirs}.max_tokens": goes_to(f"{ours}max_tokens"),
        f"{theirs}.greedy": goes_to(f"{ours}greedy"),
        f"{theirs}.temperature": goes_to(f"{ours}temperature", convert=number),
        f"{theirs}.top_p": goes_to(f"{ours}top_p", convert=number),
        f"{theirs}.top_k": top_k_at(f"{ours}top_k"),
        f"{theirs}.stop": goes_to(f"{ours}stop"),
        f"{theirs}.stop_token_ids": goes_to(f"{ours}stop_token_ids"),
        f"{theirs}.frequency_penalty": goes_to(f"{ours}frequency_penalty", convert=number),
        f"{theirs}.ignore_eos": lambda on: (
            Becomes(writes={f"{ours}additional_kwargs": {"ignore_eos": True}}) if on else Becomes(needless="off")
        ),
        f"{theirs}.skip_special_tokens": later("special tokens in response texts", True),
        f"{theirs}.use_beam_search": later("beam search", False),
        f"{theirs}.lora_name": not_there(_ADAPTERS),
        f"{theirs}._OPENAI_UNSUPPORTED_ARGS": later("an internal constant of AReaL"),
    }


_AGENT: dict[str, Entry] = {
    "agent_cls_path": lambda value: (
        Becomes(
            writes={"environment.agent.function": ":".join(str(value).rsplit(".", 1))},
            note="called with a task and an address: see docs/agents.md",
        )
        if value
        else Becomes(needless="not set")
    ),
    "mode": only(
        *("inline", "subproc"),
        does="environment.agent runs a function or a command",
        otherwise="user sessions as training data",
    ),
    "subproc_max_workers": goes_to("environment.agent.max_concurrent"),
    "session_timeout_seconds": goes_to("environment.agent.timeout_seconds", convert=number),
    "turn_discount": only(1.0, 1, does="all rows of an agent share its reward", otherwise="rewards discounted by turn"),
    "export_style": not_there("every token sampled from the policy is trained on once: see docs/agents.md"),
    "tool_call_parser": only(
        *("qwen", "qwen25", "hermes"),
        does="tool calls are parsed in the format of Hermes, Qwen2.5 and Qwen3",
        otherwise="other tool-call formats",
    ),
    "reasoning_parser": only(
        "qwen3", "", None, does="reasoning is parsed from <think> tags", otherwise="other reasoning formats"
    ),
    "chat_template_type": only(
        "hf", does="the tokenizer's chat template is used", otherwise="turns without a chat template"
    ),
    "engine_max_tokens": goes_to(f"{SAMPLING}max_tokens"),
    "set_reward_finish_timeout": later("rewards that arrive after an agent has ended", 0, 0.0),
    "admin_api_key": not_there("each trajectory has its own key, which expires with it"),
    "*": later("agent settings beyond those of environment.agent"),
}  # fmt: skip

_SGLANG: dict[str, Entry] = {
    **{name: not_there(_TUNING) for name in (
        "disable_cuda_graph_padding", "enable_nccl_nvls", "disable_outlines_disk_cache", "disable_overlap_schedule",
        "enable_mixed_chunk", "enable_torch_compile", "torch_compile_max_bs", "cuda_graph_max_bs", "cuda_graph_bs",
        "enable_p2p_check", "enable_memory_saver", "enable_multithread_load", "attention_backend",
        "triton_attention_num_kv_splits", "num_continuous_decode_steps", "schedule_policy", "schedule_conservativeness",
        "sampling_backend",
    )},
    "triton_attention_reduce_in_fp32": later("attention reductions in float32", False),
    "disable_custom_all_reduce": goes_to(f"{ENGINE}engine_init_kwargs.disable_custom_all_reduce"),
    "dp_size": only(1, does="replicas are derived from the backend", otherwise="data parallelism within an engine"),
    "ep_size": goes_to(f"{ENGINE}expert_parallel_size"),
    "enable_ep_moe": later("expert parallelism without ep_size", False),
    "enable_dp_attention": later("data-parallel attention", False),
    "torchao_config": later("torchao quantization of engines", ""),
    "enable_nan_detection": later("NaN detection in engines", False),
    "allow_auto_truncate": later("prompts truncated by the engine", False),
    "enable_metrics": goes_to(f"{ENGINE}enable_ray_prometheus_stats"),
    "enable_return_routed_experts": _experts,
    **{name: not_there(_ADAPTERS) for name in (
        "enable_lora", "max_lora_rank", "max_loaded_loras", "lora_paths", "lora_backend",
    )},
}  # fmt: skip

ROLLOUT_KEYS: dict[str, Entry] = {
    **_sampling("gconfig", SAMPLING),
    **_sampling("eval_gconfig", _EVALUATION),
    "eval_gconfig.n_samples": goes_to("generator.eval_n_samples_per_prompt"),
    "eval_gconfig": later("a value for a whole table; set its fields instead"),
    **{f"rollout.agent.{name}": entry for name, entry in _AGENT.items()},
    **{f"sglang.{name}": entry for name, entry in _SGLANG.items()},
    **{f"actor.sglang.{name}": entry for name, entry in _SGLANG.items()},
    "rollout.dump_to_file": not_there(_KEPT),
    "rollout.enable_rollout_tracing": not_there(_KEPT),
    "rollout.use_lora": not_there(_ADAPTERS),
    "rollout.request_retries": only(
        3,
        does="samples of a failed engine are generated again by another one",
        otherwise="another number of request retries",
    ),
    "rollout.pause_grace_period": later("a grace period before weights are sent", 0, 0.0),
    "rollout.return_routed_experts": _experts,
    "rollout._version": not_there(_OF_SERVICES),
    "rollout.admin_api_key": not_there(_OF_SERVICES),
    "rollout.model": not_there("agents receive the policy's model name"),
    "rollout.routing_strategy": only(
        "round_robin", does="samples are distributed evenly", otherwise="other routing strategies"
    ),
    "rollout.poll_interval": not_there(
        "unresponsive processes are detected by trainer.placement.heartbeat_timeout_seconds"
    ),
    "rollout.api_url": later("training on responses from another provider", ""),
    "rollout.provider_api_key": later("training on responses from another provider", ""),
    # data
    "*_dataset.split": not_there("appended to the data source; a file has no splits"),
    "*_dataset.num_workers": not_there(_READ_ONCE),
    "*_dataset.num_dataset_workers": not_there(_READ_ONCE),
    "*_dataset.setup_timeout": not_there(_READ_ONCE),
    "*_dataset.scheduling_spec*": not_there(_READ_ONCE),
    "*_dataset.dataset_kwargs": later("arguments of AReaL's data-loading functions", {}),
    "*_dataset.dataset_kwargs.*": later("arguments of AReaL's data-loading functions"),
    # keeping and watching
    "evaluator.eval_before_train": goes_to("trainer.eval_before_train"),
    "saver.mode": not_there("affects how files are written, not their content"),
    "recover.no_save_optim": later("checkpoints without optimizer state", False),
    "recover.no_load_optim": later("resuming without optimizer state", False),
    "perf_tracer.profile_steps": goes_to("trainer.profile_steps", convert=_from_one),
    "perf_tracer.session_tracer.*": not_there(_KEPT),
    "perf_tracer*": not_there(_TRACED),
    "memory_profiler.profile_steps": lambda value: Becomes(
        writes={"trainer.profile_steps": _from_one(value), "trainer.policy.record_memory": True}
    ),
    "memory_profiler*": not_there("up to a million allocations are recorded per profiled step"),
}
"""Keys in the form of `areal_keys.KEYS`, looked up before them."""

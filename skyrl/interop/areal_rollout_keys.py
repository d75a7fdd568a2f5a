"""AReaL's settings of rollouts: agents, evaluation samples, engines, data and traces."""

from __future__ import annotations

from skyrl.interop.areal_values import (
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
_KEPT = "every sample is in trajectories.jsonl of the run's folder: skyrl view"
_READ_ONCE = "rows are read once, when the run starts, by its own process"
_TUNING = (
    "how fast SGLang is, not what it answers; vLLM's engines tune themselves, and --keep-engine keeps SGLang's with it"
)
_ADAPTERS = "whether an adapter travels alone, and under which name, follows from trainer.policy.model.lora"
_REPLAYED = "trainer.policy.moe_enable_routing_replay lets the learner take the same experts"
_TRACED = "seconds of every phase are metrics of each step; trainer.profile_steps traces the steps that it names"
_OF_SERVICES = "AReaL's rollout services are processes of their own; engines here are called by the run itself"


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
        f"{theirs}.skip_special_tokens": later("special tokens in the texts of answers", True),
        f"{theirs}.use_beam_search": later("beam search", False),
        f"{theirs}.lora_name": not_there(_ADAPTERS),
        f"{theirs}._OPENAI_UNSUPPORTED_ARGS": later("a constant of AReaL's own class"),
    }


_AGENT: dict[str, Entry] = {
    "agent_cls_path": lambda value: (
        Becomes(
            writes={"environment.agent.function": ":".join(str(value).rsplit(".", 1))},
            note="it is called with a task and an address: docs/agents.md",
        )
        if value
        else Becomes(needless="no agent is named")
    ),
    "mode": only(
        "inline", "subproc", does="environment.agent has a function or a command", otherwise="sessions of users as data"
    ),
    "subproc_max_workers": goes_to("environment.agent.max_concurrent"),
    "session_timeout_seconds": goes_to("environment.agent.timeout_seconds", convert=number),
    "turn_discount": only(1.0, 1, does="all rows of an agent share its reward", otherwise="rewards that fade by turn"),
    "export_style": not_there("every token that the policy sampled is trained on once: docs/agents.md"),
    "tool_call_parser": only(
        *("qwen", "qwen25", "hermes"),
        does="calls are read as Hermes, Qwen2.5 and Qwen3 write them",
        otherwise="tool calls in other forms",
    ),
    "reasoning_parser": only(
        "qwen3", "", None, does="thoughts are what stands in <think>", otherwise="thoughts in other forms"
    ),
    "chat_template_type": only("hf", does="the tokenizer's template is used", otherwise="turns without a template"),
    "engine_max_tokens": goes_to(f"{SAMPLING}max_tokens"),
    "set_reward_finish_timeout": later("rewards that arrive after an agent's end", 0, 0.0),
    "admin_api_key": not_there("each trajectory has a key of its own, which ends with it"),
    "*": later("settings of agents beside environment.agent"),
}  # fmt: skip

_SGLANG: dict[str, Entry] = {
    **{name: not_there(_TUNING) for name in (
        "disable_cuda_graph_padding", "enable_nccl_nvls", "disable_outlines_disk_cache", "disable_overlap_schedule",
        "enable_mixed_chunk", "enable_torch_compile", "torch_compile_max_bs", "cuda_graph_max_bs", "cuda_graph_bs",
        "enable_p2p_check", "enable_memory_saver", "enable_multithread_load", "attention_backend",
        "triton_attention_num_kv_splits", "num_continuous_decode_steps", "schedule_policy", "schedule_conservativeness",
        "sampling_backend",
    )},
    "triton_attention_reduce_in_fp32": later("sums of attention in float32", False),
    "disable_custom_all_reduce": goes_to(f"{ENGINE}engine_init_kwargs.disable_custom_all_reduce"),
    "dp_size": only(1, does="replicas follow from the backend", otherwise="replicas inside of an engine"),
    "ep_size": goes_to(f"{ENGINE}expert_parallel_size"),
    "enable_ep_moe": later("experts spread over an engine's GPUs without ep_size", False),
    "enable_dp_attention": later("attention by data parallelism", False),
    "torchao_config": later("engines whose weights torchao quantizes", ""),
    "enable_nan_detection": later("engines that look for numbers that are not finite", False),
    "allow_auto_truncate": later("prompts that an engine cuts off", False),
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
    "eval_gconfig": later("settings of a table as a whole"),
    **{f"rollout.agent.{name}": entry for name, entry in _AGENT.items()},
    **{f"sglang.{name}": entry for name, entry in _SGLANG.items()},
    **{f"actor.sglang.{name}": entry for name, entry in _SGLANG.items()},
    "rollout.dump_to_file": not_there(_KEPT),
    "rollout.enable_rollout_tracing": not_there(_KEPT),
    "rollout.use_lora": not_there(_ADAPTERS),
    "rollout.request_retries": only(
        3,
        does="samples of an engine that fails are drawn by another one",
        otherwise="a number of attempts for a request",
    ),
    "rollout.pause_grace_period": later("a pause before weights are sent", 0, 0.0),
    "rollout.return_routed_experts": _experts,
    "rollout._version": not_there(_OF_SERVICES),
    "rollout.admin_api_key": not_there(_OF_SERVICES),
    "rollout.model": not_there("agents are told the policy's name"),
    "rollout.routing_strategy": only("round_robin", does="samples are dealt out evenly", otherwise="another order"),
    "rollout.poll_interval": not_there(
        "processes that give no sign of life: trainer.placement.heartbeat_timeout_seconds"
    ),
    "rollout.api_url": later("training on the answers of another provider", ""),
    "rollout.provider_api_key": later("training on the answers of another provider", ""),
    # data
    "*_dataset.split": not_there("part of the source's name: NAME:SPLIT"),
    "*_dataset.num_workers": not_there(_READ_ONCE),
    "*_dataset.num_dataset_workers": not_there(_READ_ONCE),
    "*_dataset.setup_timeout": not_there(_READ_ONCE),
    "*_dataset.scheduling_spec*": not_there(_READ_ONCE),
    "*_dataset.dataset_kwargs": later("arguments of AReaL's own functions for data", {}),
    "*_dataset.dataset_kwargs.*": later("arguments of AReaL's own functions for data"),
    # keeping and watching
    "evaluator.eval_before_train": goes_to("trainer.eval_before_train"),
    "saver.mode": not_there("how a file is written, and not what is in it"),
    "recover.no_save_optim": later("checkpoints without the optimizer", False),
    "recover.no_load_optim": later("resuming without the optimizer", False),
    "perf_tracer.profile_steps": goes_to("trainer.profile_steps", convert=_from_one),
    "perf_tracer.session_tracer.*": not_there(_KEPT),
    "perf_tracer*": not_there(_TRACED),
    "memory_profiler.profile_steps": lambda value: Becomes(
        writes={"trainer.profile_steps": _from_one(value), "trainer.policy.record_memory": True}
    ),
    "memory_profiler*": not_there("of a profiled step a million allocations are kept"),
}
"""Keys in the form of `areal_keys.KEYS`, looked up before them."""

"""Tables of `InferenceEngineConfig`: which fields are arguments of vLLM, which are not, and which arguments cannot be
set.
"""

from __future__ import annotations

TABLE = "generator.inference_engine"
"""Dotted path of the table that the fields belong to."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Our short spellings, in vLLM's."""

SAME_NAME = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_return_routed_experts",
    "language_model_only",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
)
"""Fields that vLLM has under our name and with our meaning."""

OTHER_NAME = {
    "model_dtype": "dtype",
    "expert_parallel_size": "enable_expert_parallel",
    "distributed_executor_backend": "distributed_executor_backend",
    "served_model_name": "served_model_name",
    "enable_ray_prometheus_stats": "disable_log_stats",
}
"""Fields that reach vLLM translated, and the arguments they become."""

NOT_ARGUMENTS = {
    "backend": "chooses vLLM",
    "async_engine": "chooses the class: AsyncLLM or LLMEngine",
    "vllm_v1_disable_multiproc": "is the variable VLLM_ENABLE_V1_MULTIPROCESSING",
    "rollout_dtype": "is the torch engine's, vLLM has model_dtype",
    "deterministic": "is the variable VLLM_BATCH_INVARIANT",
    "engine_init_kwargs": "is more arguments, each under its own name",
    "fully_sharded_loras": "belongs to adapters, and is an argument where there is one",
    "num_engines": "is how many such engines are started",
    "min_engines": "is how few may be left",
    "max_engines": "is how many there may be",
    "max_engine_restarts": "is how often one is started again",
    "engine_restart_backoff_seconds": "is when",
    "run_engines_locally": "says that they are started here",
    "remote_urls": "names engines that others started",
    "external_proxy_url": "names engines that others started",
    "external_server_urls": "names engines that others started",
    "external_token": "belongs to engines that others started",
    "weight_sync_backend": "is the transport of weights to the engine",
    "weight_sync_path": "is the transport of weights to the engine",
    "weight_transfer_threshold_cuda_ipc_GB": "is the transport of weights to the engine",
    "logprob_parity_bound": "is what the learner holds the engine to",
    "logprob_parity_interval": "is how often the learner does so",
    "override_existing_update_group": "is the transport of weights to the engine",
    "enable_http_endpoint": "is the run's own endpoint",
    "http_endpoint_host": "is the run's own endpoint",
    "http_endpoint_port": "is the run's own endpoint",
}
"""Fields that are no argument of vLLM, and what they are instead."""

OURS = {
    "model": "trainer.policy.model.path",
    "tokenizer": "trainer.tokenizer_path",
    "seed": "trainer.seed",
    "max_model_len": "the lengths of prompts and completions",
    **{argument: f"{TABLE}.{field}" for field, argument in OTHER_NAME.items()},
    **{name: f"{TABLE}.{name}" for name in SAME_NAME},
    "fully_sharded_loras": f"{TABLE}.fully_sharded_loras",
    "enable_lora": "trainer.policy.model.lora",
}
"""Arguments that have a setting of our own, and where it is."""

FIXED = {
    "logprobs_mode": "log-probabilities are always those of the tempered distribution",
    "worker_extension_cls": "skyrl's own receives the weights",
    "generation_config": "sampling settings come from the run alone",
    "skip_tokenizer_init": "stop texts need the tokenizer",
    "worker_cls": "skyrl's extension is written for vLLM's own workers",
    "speculative_config": "drafted tokens come without the log-probabilities that training needs",
    "spec_method": "drafted tokens come without the log-probabilities that training needs",
    "spec_model": "drafted tokens come without the log-probabilities that training needs",
    "spec_tokens": "drafted tokens come without the log-probabilities that training needs",
    "weight_transfer_config": "generator.inference_engine.weight_sync_backend chooses the transport",
    "enable_sleep_mode": "trainer.placement decides whether engines share their GPUs",
}
"""Arguments that users cannot set, each with the reason."""

"""prime-rl's settings that convert independently: those of `rl.toml` of August 2026
(packages/prime-rl-configs/src/prime_rl/configs).
"""

from __future__ import annotations

from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    OPTIMIZER,
    SAMPLING,
    Entry,
    Translation,
    fixed,
    missing,
    number,
    redundant,
    refused,
    unsupported,
    when_on,
    word,
)

POLICY = "trainer.policy."
LORA = POLICY + "model.lora."
EVALUATION = "generator.eval_sampling_params."

_LOGS = "logs and metrics are written to the run's folder"
_KERNELS = "affects speed, not results; learners choose their own kernels"
_OF_LAUNCHING = "how processes are started: `skyrl launch` and docs/launching.md"
_RENDERER = "the chat template of the model renders prompts"
_VERIFIERS = (
    "an environment of verifiers: set environment.env_class to a task, an environment or a reward function, and "
    "data.train_data to its rows (docs/environments.md)"
)


def _optimizer(value: object) -> Translation:
    if word(value, ("adamw", "sgd", "muon")) in ("adamw", "muon"):
        return Translation(writes={OPTIMIZER + "optimizer": value})
    return unsupported("SGD with momentum" if value == "sgd" else f"the optimizer {value}")


def _algorithm(value: object) -> Translation:
    """Convert the algorithm of all sources. `convert.py` converts those of a teacher."""
    if value == "grpo":
        return Translation(writes={ALGORITHM + "advantage_estimator": "grpo", ALGORITHM + "grpo_norm_by_std": False})
    if value == "max_rl":
        return Translation(writes={ALGORITHM + "advantage_estimator": "maxrl"})
    reasons = {
        "rae": "baselines of each agent of a game (rae)",
        "echo": "learning from tokens of tools (echo)",
        "hierarchical_grpo": "environments of proposers and solvers",
        "sft": 'a teacher\'s own answers: `skyrl generate` writes them, and kind = "sft" learns from them',
    }
    return unsupported(reasons.get(str(value), f"the algorithm {value!r}"))


def _loss(value: object) -> Translation:
    if value == "default":
        return Translation(writes={ALGORITHM + "policy_loss_type": "dppo", ALGORITHM + "dppo.dppo_type": "binary_tv"})
    return unsupported(
        "the loss ipo" if value == "ipo" else "a loss of your own: set policy_loss_type to its import path"
    )


def _transfer(value: object) -> Translation:
    backend = {"filesystem": "disk", "nccl": "nccl"}.get(str(value))
    if backend is None:
        return unsupported(f"weight transfer by {value}")
    return Translation(writes={ENGINE + "weight_sync_backend": backend})


def _context(value: object) -> Translation:
    if value == 1:
        return redundant("no rows are shared")
    return Translation(writes={POLICY + "sequence_parallel_size": value})


def _experts(value: object) -> Translation:
    if value == "auto":
        return redundant("experts are on all ranks; trainer.policy.expert_parallel_size spreads them")
    return Translation(writes={POLICY + "expert_parallel_size": value})


def _source(table: str) -> dict[str, Entry]:
    """Settings of the sources in a list of tables."""
    prefix = table + "[[]*]."  # a pattern of keys such as table[0].name
    return {
        prefix + "env.taskset.id": refused(_VERIFIERS),
        prefix + "env.*": redundant("part of the environment of verifiers"),
        prefix + "serve.*": redundant("part of the environment of verifiers"),
        prefix + "name": redundant("the column data_source of rows names their source"),
        prefix + "*": unsupported("a setting of one source"),
    }


_VLLM: dict[str, Entry] = {
    **{name: ENGINE + name for name in (
        "gpu_memory_utilization", "tensor_parallel_size", "data_parallel_size", "enforce_eager",
        "enable_prefix_caching", "enable_return_routed_experts", "max_num_seqs", "max_num_batched_tokens",
    )},
    "dtype": fixed(
        "auto", "bfloat16", does="engines compute in the learner's type", otherwise="another type of engines"
    ),
    "model": redundant("engines sample from the policy"),
    "trust_remote_code": missing("code of a model", False),
    "seed": redundant("samples are drawn from trainer.seed"),
    **{name: f"{ENGINE}engine_init_kwargs.{name}" for name in ("max_model_len", "quantization")},
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules"),
        redundant("follows from the policy's adapter"),
    ),
    **dict.fromkeys(
        ("tool_call_parser", "reasoning_parser"), redundant("replies are read as the environment's agent reads them")
    ),
    "*": unsupported("this argument of vLLM: set it in generator.inference_engine.engine_init_kwargs"),
}  # fmt: skip

KEYS: dict[str, Entry] = {
    "model.name": POLICY + "model.path",
    "trainer.model.name": POLICY + "model.path",
    "orchestrator.model.name": redundant("the policy is model.name"),
    **dict.fromkeys(("model.vlm*", "trainer.model.vlm*"), unsupported("models of images")),
    "max_steps": "trainer.max_training_steps",
    **dict.fromkeys(("trainer.max_steps", "orchestrator.max_steps"), redundant("max_steps counts")),
    **dict.fromkeys(("trainer.model.seq_len", "orchestrator.seq_len"), redundant("seq_len counts")),
    **dict.fromkeys(("trainer", "orchestrator"), redundant("nothing is set")),
    # the policy
    **{f"trainer.model.lora.{name}": LORA + name for name in ("rank", "alpha", "dropout", "target_modules")},
    "trainer.model.lora.modules_to_save": missing("layers that learn whole beside an adapter", []),
    "trainer.model.cp": _context,
    "trainer.model.cp_style": redundant("rows are shared by Ulysses; trainer.policy.context_parallel_size shares keys"),
    "trainer.model.ep": _experts,
    "trainer.model.fsdp_cpu_offload": POLICY + "fsdp_config.cpu_offload",
    "trainer.model.reshard_after_forward": POLICY + "fsdp_config.reshard_after_forward",
    "trainer.model.dp_replicate": missing("copies of the sharded model: set trainer.policy.fsdp_config.fsdp_size", 1),
    "trainer.model.ac*": redundant("activations are recomputed by default: trainer.gradient_checkpointing"),
    "trainer.model.optim_cpu_offload": redundant("the optimizer's state leaves the GPU where others need its memory"),
    "trainer.model.full_offload*": missing("an optimizer on the host: trainer.policy.fsdp_config.cpu_offload", False),
    "trainer.model.optimization_dtype": fixed("float32", does="weights are float32", otherwise="weights in bfloat16"),
    "trainer.model.reduce_dtype": fixed(
        "float32", does="gradients are summed in float32", otherwise="sums in bfloat16"
    ),
    **dict.fromkeys(
        (
            "trainer.model.attn",
            "trainer.model.compile*",
            "trainer.model.impl",
            "trainer.matmul_precision",
            "trainer.model.fused_lm_head_token_chunk_size",
            "trainer.model.moe_*",
            "trainer.gc*",
            "trainer.model.ep_comm_backend",
            "trainer.model.deepep_*",
        ),
        redundant(_KERNELS),
    ),
    "trainer.enable_router_replay": POLICY + "moe_enable_routing_replay",
    "trainer.optim.type": _optimizer,
    "trainer.optim.lr": OPTIMIZER + "lr",
    "trainer.optim.weight_decay": OPTIMIZER + "weight_decay",
    "trainer.optim.max_norm": lambda value: Translation(writes={OPTIMIZER + "max_grad_norm": value or 0.0}),
    "trainer.optim.mu": OPTIMIZER + "muon_momentum",
    "trainer.loss.type": _loss,
    "trainer.loss.dppo_mask_low": ALGORITHM + "dppo.delta_low",
    "trainer.loss.dppo_mask_high": ALGORITHM + "dppo.delta_high",
    "trainer.loss.adv_tau": fixed(1, 1.0, does="advantages are taken as they are", otherwise="a factor of advantages"),
    "trainer.loss.kl_tau": fixed(0, 0.0, does="off", otherwise="the square of the log-ratio to the engine in the loss"),
    "trainer.loss.*": unsupported("a setting of another loss"),
    # samples
    "orchestrator.group_size": "generator.n_samples_per_prompt",
    "orchestrator.token_batch_size": unsupported("batches counted in tokens: set trainer.train_batch_size"),
    "orchestrator.algo.type": _algorithm,
    "orchestrator.algo.sampling.source": fixed(
        "policy", does="the policy samples", otherwise="samples of another model"
    ),
    "orchestrator.algo.sampling.source.*": unsupported("samples of another model"),
    "orchestrator.model.lora.*": redundant("the adapter is that of trainer.model.lora"),
    "orchestrator.algo.length_penalty*": missing("a penalty for long answers; see trainer.algorithm.reward_shaping"),
    "orchestrator.algo.*": unsupported("a setting of an algorithm that is not converted"),
    "orchestrator.max_off_policy_steps": "trainer.fully_async.max_staleness_steps",
    "orchestrator.train.sampling.temperature": SAMPLING + "temperature",
    "orchestrator.train.sampling.max_completion_tokens": SAMPLING + "max_generate_length",
    "orchestrator.train.filter_zero_advantages": redundant("tokens without an advantage add nothing to the loss"),
    **_source("orchestrator.train.source"),
    "orchestrator.eval.interval": "trainer.eval_interval",
    "orchestrator.eval.group_size": "generator.eval_n_samples_per_prompt",
    "orchestrator.eval.skip_first_step": lambda value: Translation(writes={"trainer.eval_before_train": not value}),
    "orchestrator.eval.num_examples": missing("a part of the evaluation rows: cut the file of data.val_data", -1),
    "orchestrator.eval.retrigger_on_resume": redundant("evaluations are not repeated on resume"),
    **{f"orchestrator.eval.sampling.{name}": EVALUATION + name for name in ("temperature", "top_p", "top_k", "min_p")},
    "orchestrator.eval.sampling.max_completion_tokens": EVALUATION + "max_generate_length",
    **_source("orchestrator.eval.source"),
    "orchestrator.concurrency.*": redundant("requests are admitted as engines have room"),
    **dict.fromkeys(("orchestrator.renderer.*", "orchestrator.tokenizer.*", "tokenizer.*"), redundant(_RENDERER)),
    **{f"inference.vllm.{name}": entry for name, entry in _VLLM.items()},
    "inference": redundant("engines are started by the run"),
    **dict.fromkeys(
        ("inference.server.*", "inference.router*", "inference.log.*"), redundant("engines belong to the run")
    ),
    "weight_broadcast.type": _transfer,
    "weight_broadcast.*": redundant("addresses follow from the layout"),
    # the run
    "ckpt": redundant("a checkpoint is saved at the end"),
    "ckpt.interval": "trainer.ckpt_interval",
    "ckpt.keep_last": "trainer.max_ckpts_to_keep",
    "ckpt.output_dir": "trainer.ckpt_path",
    "resume": when_on("trainer.resume_mode", "latest"),
    "resume.*": refused("checkpoints of prime-rl cannot be resumed here: start from a model that they export"),
    "run.name": "trainer.run_name",
    "output_dir": "trainer.run_path",
    "monitors.wandb.project": lambda value: Translation(
        writes={"trainer.project_name": value, "trainer.logger": ["console", "wandb"]}
    ),
    "monitors.wandb.name": "trainer.run_name",
    **dict.fromkeys(("monitors.file*", "log.*", "orchestrator.log.*", "trainer.log.*"), redundant(_LOGS)),
    **dict.fromkeys(
        ("slurm*", "env_vars*", "*.env_vars*", "run.dir", "clean", "dry_run", "trainer.dist_timeout_seconds"),
        redundant(_OF_LAUNCHING),
    ),
    "monitors.prime*": unsupported("a platform of prime-rl's authors"),
    "deployment.type": fixed("single_node", "multi_node", does="follows from the sizes", otherwise="this deployment"),
}
"""Settings that convert independently."""


def url_of(value: object) -> str:
    """The address of a server as it is named here, without the version of its protocol."""
    return str(value).rstrip("/").removesuffix("/v1")


def rate(value: object, of: object) -> float:
    """A learning rate as a share of another one."""
    part, total = number(value), number(of)
    return part / total if isinstance(part, int | float) and isinstance(total, int | float) and total else 0.0

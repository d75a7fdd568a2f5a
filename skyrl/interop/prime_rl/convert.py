"""Converts prime-rl's `rl.toml` of August 2026 (packages/prime-rl-configs/src/prime_rl/configs). Tasks are environments
of verifiers, which have no counterpart that could be written: their lines are refused, with what to set in their place.

Distillation is `opd`, the reverse KL from a served teacher, or `opsd`, from the policy with an example. Both are the
advantage log nu - log pi of each sampled token, alone (src/prime_rl/trainer/rl/loss.py, `ref_kl_loss_fn`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from attrs import evolve

from skyrl.interop import not_converted
from skyrl.interop.report import Conversion
from skyrl.interop.systems import System, convert_settings
from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    EVALUATION,
    OPTIMIZER,
    SAMPLING,
    Dependent,
    Entry,
    Translation,
    Values,
    count,
    fixed,
    missing,
    number,
    redundant,
    refused,
    unsupported,
    when_on,
    word,
)
from skyrl.interop.values import flat_file, is_script
from skyrl.interop.writing import Writing
from skyrl.tree.types import display_value

POLICY = "trainer.policy."
LORA = POLICY + "model.lora."

_LOGS = "logs and metrics are written to the run's folder"
_RENDERER = "the chat template of the model renders prompts"
_VERIFIERS = (
    "an environment of verifiers: set environment.env_class to a task, an environment or a reward function, and "
    "data.train_data to its rows (docs/environments.md)"
)


def _optimizer(value: object) -> Translation:
    if word(value, ("adamw", "sgd", "muon")) in ("adamw", "muon"):
        return Translation(writes={OPTIMIZER + "optimizer": value})
    return unsupported("SGD with momentum" if value == "sgd" else f"the optimizer {display_value(value)}")


def _algorithm(value: object) -> Translation:
    """Convert the algorithm of all sources, if it is none of a teacher."""
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
    return unsupported(reasons.get(str(value), f"the algorithm {display_value(value)}"))


def _loss(value: object) -> Translation:
    if value == "default":
        return Translation(writes={ALGORITHM + "policy_loss_type": "dppo", ALGORITHM + "dppo.dppo_type": "binary_tv"})
    return unsupported(
        "the loss ipo" if value == "ipo" else "a loss of your own: set policy_loss_type to its import path"
    )


def _transfer(value: object) -> Translation:
    backend = {"filesystem": "disk", "nccl": "nccl"}.get(str(value))
    if backend is None:
        return unsupported(f"weight transfer by {display_value(value)}")
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
    **{f"trainer.{name}": redundant("affects speed, not results; learners choose their own kernels") for name in (
        "model.attn", "model.compile*", "model.impl", "matmul_precision", "model.fused_lm_head_token_chunk_size",
        "model.moe_*", "gc*", "model.ep_comm_backend", "model.deepep_*",
    )},
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
        redundant("how processes are started: `skyrl launch` and docs/launching.md"),
    ),
    "monitors.prime*": unsupported("a platform of prime-rl's authors"),
    "deployment.type": fixed("single_node", "multi_node", does="follows from the sizes", otherwise="this deployment"),
}  # fmt: skip
"""Settings that convert independently."""


def url_of(value: object) -> str:
    """The address of a server as it is named here, without the version of its protocol."""
    return str(value).rstrip("/").removesuffix("/v1")


def rate(value: object, of: object) -> float:
    """A learning rate as a share of another one."""
    part, total = number(value), number(of)
    return part / total if isinstance(part, int | float) and isinstance(total, int | float) and total else 0.0


_DEFAULTS: dict[str, Any] = {
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.algo.type": "grpo",
    "trainer.optim.type": "adamw",
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.max_norm": 1.0,
    "trainer.scheduler.type": "constant",
    "trainer.loss.type": "default",
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.dppo_mask_high": 0.2,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "seq_len": 2048,
}
"""Settings that change what is learned or where, with prime-rl's defaults."""

_DRIFT = (
    "prime-rl adds trainer.loss.kl_tau (1e-3 by default) x the square of each token's log-ratio to the engine to the "
    "loss; here there is no such term."
)
_TASK = "The rows of a data source need its name in their column data_source, by which its teacher is found."


def convert_prime_rl(name: str) -> Conversion:
    """Convert a TOML file of prime-rl's `rl`. Raises `ConfigError` if it cannot be read or is another one."""
    if is_script(name):
        raise not_converted(name, "is a script, which is not read", "convert the TOML file that it names after @")
    keys = flat_file(name, of="prime-rl")
    if not any(key.startswith("orchestrator") for key in keys):
        raise not_converted(name, "has no table orchestrator", "only files of prime-rl's `rl` are converted")
    return convert_keys(keys, name)


def convert_keys(keys: Values, where: str = "arguments") -> Conversion:
    """Convert prime-rl's settings, given by their dotted keys."""
    system = System(
        keys=KEYS,
        dependent=(TEACHERS, _DEPENDENT),
        unknown=lambda key, writing: "not a setting of prime-rl's rl.toml of August 2026",
        defaults=_left_out,
        implied=_implied,
    )
    converted = convert_settings(system, keys, Writing(where))
    remarks = [_TASK] if teachers_by_source(keys) else []
    if keys.get("orchestrator.algo.type", "grpo") in ("grpo", "max_rl"):
        remarks.append(_DRIFT)
    return evolve(converted, remarks=tuple(remarks))


def _left_out(values: Values) -> Values:
    defaults = {**_DEFAULTS}
    if "orchestrator.token_batch_size" in values:
        del defaults["orchestrator.batch_size"]
    if values.get(_ALGO + "type") == "opsd":
        defaults |= {_ALGO + "demo_key": "demonstration", _ALGO + "template": _TEMPLATE}
    return {key: value for key, value in defaults.items() if key not in values}


def _samples(key: str, value: object, values: Values) -> Translation:
    """Convert the batch, which prime-rl counts in samples."""
    group = count(values.get("orchestrator.group_size"))
    if not isinstance(value, int) or value % group:
        return refused(f"{value} samples are no whole number of groups of {group}")
    prompts = value // group
    return Translation(
        writes={"trainer.train_batch_size": prompts, "trainer.policy_mini_batch_size": prompts},
        note=f"{prompts} prompts with {group} samples each",
    )


def _length(key: str, value: object, values: Values) -> Translation:
    """Convert the length of prompt and answer together."""
    answer = values.get("orchestrator.train.sampling.max_completion_tokens")
    if not isinstance(answer, int) or not isinstance(value, int) or answer >= value:
        return unsupported(
            "a bound of prompt and answer together: set trainer.max_prompt_length and "
            "generator.sampling_params.max_generate_length"
        )
    return Translation(writes={"trainer.max_prompt_length": value - answer}, note=f"without the {answer} of an answer")


def _betas(key: str, value: object, values: Values) -> Translation:
    second = 0.95 if values.get("trainer.optim.type") == "muon" else 0.999
    betas = [number(values.get(f"trainer.optim.betas{n}", default)) for n, default in ((1, 0.9), (2, second))]
    return Translation(writes={OPTIMIZER + "adam_betas": betas})


def _schedule(key: str, value: object, values: Values) -> Translation:
    kind = values.get("trainer.scheduler.type")
    match key.removeprefix("trainer.scheduler."):
        case "type":
            names = {"constant": "constant", "linear": "warmup_stable_decay", "cosine": "cosine"}
            if str(value) not in names:
                return unsupported(f"the schedule {display_value(value)}")
            writes: dict[str, Any] = {OPTIMIZER + "scheduler": names[str(value)]}
            if value != "constant":
                writes[OPTIMIZER + "num_warmup_steps"] = values.get("trainer.scheduler.warmup_steps", 10)
            if value == "linear":
                writes[OPTIMIZER + "num_decay_steps"] = values.get("trainer.scheduler.decay_steps", 10) or None
            return Translation(writes=writes)
        case "warmup_steps" | "decay_steps":
            return redundant("written with the schedule" if kind != "constant" else "no effect on a constant rate")
        case "min_lr":
            share = rate(value, values.get("trainer.optim.lr"))
            return Translation(writes={OPTIMIZER + "min_lr_ratio": share})
    return unsupported("this setting of a schedule")


def _gpus(key: str, value: object, values: Values) -> Translation:
    degrees = ("inference.vllm.tensor_parallel_size", "inference.vllm.data_parallel_size")
    tensor = prod(count(values.get(name)) for name in degrees)
    several = values.get("deployment.type") == "multi_node"
    match key.removeprefix("deployment."), several:
        case ("num_train_gpus", False) | ("gpus_per_node", True):
            return Translation(writes={"trainer.placement.policy_num_gpus_per_node": value})
        case "num_infer_gpus", False:
            return Translation(writes={ENGINE + "num_engines": max(1, count(value) // tensor)})
        case ("num_train_gpus" | "num_infer_gpus", True) | ("gpus_per_node", False):
            return redundant("not read in this deployment")
        case "num_train_nodes", _:
            return Translation(writes={"trainer.placement.policy_num_nodes": value})
        case "num_infer_nodes" | "num_infer_replicas", _:
            nodes = count(values.get("deployment.num_infer_nodes")) * count(values.get("deployment.num_infer_replicas"))
            engines = nodes * count(values.get("deployment.gpus_per_node"), default=8) // tensor
            return Translation(writes={ENGINE + "num_engines": max(1, engines)})
    return unsupported("this setting of a deployment")


_OURS = ALGORITHM + "distillation."
_SERVER = "trainer.teacher.endpoint."
_OF_SOURCE = re.compile(r"orchestrator\.train\.source\[(\d+)\]\.algo\.(.+)")
_ALGO = "orchestrator.algo."
_TEMPLATE = "Here is an example of an expert response:\n<demonstration>\n{demonstration}\n</demonstration>"
_DRIFT_OF_TEACHERS = (
    "prime-rl adds 1e-3 x the square of the log-ratio to the engine, and keeps tokens that the teacher prefers "
    "whatever their probability has become; here the loss of the policy decides"
)
_ALONE: dict[str, Any] = {_OURS + "type": "advantage", _OURS + "task_coef": 0.0}


def teacher(key: str, value: object, values: Values) -> Translation | None:
    """Convert a setting of the algorithm of all sources, if it is one of a teacher."""
    kind, setting = values.get(_ALGO + "type"), key.removeprefix(_ALGO)
    match kind, setting:
        case (("opd" | "opsd"), "type"):
            hint = {_OURS + "self_teacher": True, _OURS + "hint.source": "column"} if kind == "opsd" else {}
            return Translation(writes={**_ALONE, **hint}, note=_DRIFT_OF_TEACHERS)
        case "opd", "teacher.base_url":
            return Translation(writes={_SERVER + "url": url_of(value)})
        case "opd", _ if setting.startswith("teacher."):
            return _server_setting(setting.removeprefix("teacher."), value)
        case "opsd", "demo_key":
            return Translation(writes={_OURS + "hint.column": value})
        case "opsd", "template":
            text = str(value)
            if text.count("{demonstration}") != 1:
                return refused("a text with {demonstration}, once")
            template = text.replace("{demonstration}", "{hint}") + "\n\n{prompt}"
            note = "before the question, in the user's message; there in a system message"
            return Translation(writes={_OURS + "hint.template": template}, note=note)
        case "opsd", _ if setting.startswith("renderer"):
            return redundant("the chat template of the policy renders the demonstration")
    return None


def of_source(key: str, value: object, values: Values) -> Translation | None:
    """Convert a setting of the algorithm of one source."""
    match = _OF_SOURCE.fullmatch(key)
    if match is None:
        return None
    if not has_teachers(values):
        return unsupported("an algorithm for each source, other than a teacher for each of them (opd)")
    if match[2] == "type":
        return Translation(writes=_ALONE, note=_DRIFT_OF_TEACHERS)
    if match[2] == "teacher.base_url":
        return redundant("written as trainer.teacher.endpoint.sources")
    return _server_setting(match[2].removeprefix("teacher."), value)


def has_teachers(values: Values) -> bool:
    """Whether every source has a teacher of its own."""
    numbers = {match[1] for key in values if (match := re.match(r"orchestrator\.train\.source\[(\d+)\]", key))}
    return bool(numbers) and all(
        values.get(f"orchestrator.train.source[{number}].algo.type") == "opd" for number in numbers
    )


def teachers_by_source(values: Values) -> dict[str, str]:
    """Name of each source with a teacher of its own -> address of the teacher's server."""
    result = {}
    for key, value in values.items():
        match = _OF_SOURCE.fullmatch(key)
        if match and match[2] == "teacher.base_url":
            source = f"orchestrator.train.source[{match[1]}]."
            name = values.get(source + "name") or values.get(source + "env.taskset.id")
            result[str(name)] = url_of(value)
    return result


def _server_setting(setting: str, value: object) -> Translation:
    match setting:
        case "name":
            return redundant("the server is asked for its model")
        case "api_key_var":
            return redundant("the variable SKYRL_TEACHER_TOKEN holds the server's token")
        case "wait_for_ready_timeout":
            return Translation(writes={_SERVER + "timeout": value})
        case "skip_model_check":
            return redundant("only the address is needed")
    return unsupported(f"the setting {setting} of a teacher's server")


TEACHERS: dict[str, Dependent] = {"orchestrator.algo.*": teacher, "orchestrator.train.source[[]*": of_source}
"""Settings of teachers."""


def _implied(values: Values) -> Iterator[tuple[str, str, Any]]:
    yield "prime-rl", "trainer.placement.colocate_all", False
    yield "prime-rl", "trainer.fully_async.enabled", True
    yield "prime-rl", "trainer.algorithm.loss_reduction", "token_mean"
    yield "prime-rl", "trainer.algorithm.use_kl_loss", False
    yield "prime-rl", SAMPLING + "top_p", 1.0
    if isinstance(values.get("max_steps"), int):
        yield "max_steps", "trainer.epochs", values["max_steps"]
    if sources := teachers_by_source(values):
        yield "orchestrator.train.source", "trainer.teacher.endpoint.sources", sources


_DEPENDENT: dict[str, Dependent] = {
    "orchestrator.batch_size": _samples,
    "seq_len": _length,
    **dict.fromkeys(("trainer.optim.betas1", "trainer.optim.betas2"), _betas),
    "trainer.scheduler.*": _schedule,
    **{f"deployment.{name}": _gpus for name in (
        "num_train_gpus", "num_infer_gpus", "gpus_per_node", "num_train_nodes", "num_infer_nodes", "num_infer_replicas",
    )},
}  # fmt: skip
"""Settings whose meaning depends on others."""

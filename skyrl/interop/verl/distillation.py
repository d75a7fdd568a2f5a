"""verl's distillation from a teacher: `distillation.*` of verl 0.9.1. Its teacher is a server; ours computes in a
learner's ranks, so that settings of its engine have no equivalent and its placement is ours to choose.
"""

from __future__ import annotations

import re
from typing import Any

from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.translation import (
    ALGORITHM,
    Dependent,
    Translation,
    UnexpectedValue,
    Values,
    is_off,
    number,
    redundant,
    unsupported,
)

_LOSS = "distillation.distillation_loss."
_TEACHER = re.compile(r"distillation\.teacher_models\.([^.]+)\.(.+)")
_OURS = ALGORITHM + "distillation."
_SCORES = "the teacher is scored by ranks of its own (trainer.teacher, trainer.placement.teacher_*), not by an engine"


def distillation(key: str, value: object, values: Values) -> Translation:
    """Convert a setting of distillation, which `distillation.enabled` turns on."""
    if key == "distillation.enabled":
        if is_off(value):
            return redundant("off")
        if value is not True:
            raise UnexpectedValue("expected true or false")
        mode = _LOSS + "loss_mode"
        unwritten = Translation() if mode in values else _loss("k3", values)  # verl's default
        return unwritten if unwritten.unsupported else redundant("there is a teacher where its path is set")
    teacher_match = _TEACHER.fullmatch(key)
    if teacher_match is not None:
        return _convert_teacher(key, teacher_match[1], teacher_match[2], value, values)
    of_distributions = values.get(_LOSS + "loss_mode") == "forward_kl_topk"
    match key.removeprefix(_LOSS):
        case "loss_mode":
            return _loss(value, values)
        case "distillation_loss_coef":
            return Translation(writes={_OURS + "coef": number(value)})
        case "use_task_rewards":
            return Translation(writes={_OURS + "task_coef": 1.0 if value else 0.0})
        case "loss_max_clamp":
            if is_off(value):
                return redundant("not set")
            bounded = Translation(writes={_OURS + "max_divergence": value})
            return bounded if of_distributions else unsupported("a bound of the teacher's part in an advantage")
        case "use_policy_gradient":
            return redundant("part of the choice by loss_mode")
        case "topk":
            return redundant(
                "written with loss_mode" if of_distributions else "no effect: the loss reads the sampled tokens alone"
            )
        case "log_prob_min_clamp":
            if value is None:
                return redundant("not set")
            lowest = Translation(writes={_OURS + "min_logprob": number(value)})
            return lowest if of_distributions else redundant("no effect: the loss reads no tokens but the sampled one")
        case "policy_loss_mode":
            usual = redundant("the loss of the policy is that of trainer.algorithm")
            return usual if value == "vanilla" else unsupported(f"the loss {value} of a teacher's advantages")
        case "clip_ratio" | "clip_ratio_low" | "clip_ratio_high":
            return redundant("tokens that a teacher rewards are clipped as all others: trainer.algorithm.eps_clip_*")
    match key.removeprefix("distillation."):
        case "teacher_key":
            usual = redundant("the column data_source of a row selects its teacher, if there are several")
            return usual if value in (None, "data_source") else unsupported(f"the choice of a teacher by {value}")
        case "nnodes" | "n_gpus_per_node":
            return redundant("size of a pool of engines; trainer.placement.teacher_* give the teacher its GPUs")
    return unsupported("this setting of distillation")


def _convert_teacher(key: str, name: str, setting: str, value: object, values: Values) -> Translation:
    paths = {m[1]: v for k, v in values.items() if (m := _TEACHER.fullmatch(k)) and m[2] == "model_path" and v}
    if setting == "model_path":
        if not value:
            return redundant("not set")
        if len(paths) == 1:
            return Translation(writes={"trainer.teacher.model.path": value})
        sources = {values.get(f"distillation.teacher_models.{teacher}.key"): path for teacher, path in paths.items()}
        if None in sources or len(sources) < len(paths):
            return unsupported("several teachers without a key of its own for each")
        return Translation(writes={"trainer.teacher.sources": sources})
    if setting == "key":
        return redundant("written with model_path" if len(paths) > 1 else "there is one teacher")
    if setting == "num_replicas":
        return redundant(_SCORES)
    if setting == "inference.temperature":
        of_policy = values.get("actor_rollout_ref.rollout.temperature", 1.0)
        same = value == of_policy or str(value).startswith("${")
        return redundant("scored at the policy's temperature") if same else unsupported("a temperature of the teacher")
    default = key.replace(f".{name}.", ".teacher_model.")
    of_verl = peer_trees("verl", "fsdp")[-1].defaults.get(default)
    if setting.startswith("inference.") and (value == of_verl or setting.removeprefix("inference.") in _OF_ENGINES):
        return redundant(_SCORES)
    return unsupported(f"the teacher's {setting}")


_OF_ENGINES = (
    "cudagraph_capture_sizes", "data_parallel_size", "disable_log_stats", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "free_cache_engine", "gpu_memory_utilization", "load_format",
    "max_model_len", "max_num_batched_tokens", "max_num_seqs", "name", "prompt_length", "response_length",
    "skip_tokenizer_init", "tensor_model_parallel_size", "expert_parallel_size", "dtype",
)  # fmt: skip


def _loss(value: object, values: Values) -> Translation:
    """k1 in the policy gradient is our advantage; forward_kl_topk is our forward KL. The other estimates are losses of
    the sampled token whose gradients are others.
    """
    by_gradient = bool(values.get(_LOSS + "use_policy_gradient"))
    if value == "k1" and by_gradient:
        return Translation(writes={_OURS + "type": "advantage"})
    if value == "forward_kl_topk" and not by_gradient:
        writes: dict[str, Any] = {"type": "loss", "beta": 0.0, "top_k": values.get(_LOSS + "topk", 32), "tail": False}
        return Translation(writes={_OURS + name: setting for name, setting in writes.items()})
    suffix = " in the policy gradient" if by_gradient else ""
    return unsupported(
        f"distillation by the estimate {value}{suffix}: k1 with use_policy_gradient and forward_kl_topk without it are "
        "converted"
    )


DISTILLATION: dict[str, Dependent] = {"distillation.*": distillation}
"""Settings of distillation."""

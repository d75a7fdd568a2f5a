"""TRL's settings that depend on one another: engines, data, rewards, adapters, and those of `trl_batches` and
`trl_objective`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.interop.conversions import ENGINE, OPTIMIZER, Becomes, number
from skyrl.interop.foreign import Together, Values, needless, off, whole
from skyrl.interop.trl.batches import BATCHES, processes
from skyrl.interop.trl.objective import OBJECTIVE

_BUILT_IN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab")
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash_attention_2"}
_GPUS_OF_A_NODE = 8


def _engine(key: str, value: object, values: Values) -> Becomes:
    return Becomes(writes={ENGINE + "backend": "vllm" if value else "torch"})


def _mode(key: str, value: object, values: Values) -> Becomes:
    if not values.get("use_vllm") or value == "colocate":
        return needless("engines share the learners' GPUs")
    return Becomes(
        not_yet="servers of `trl vllm-serve`; the run starts its own engines or uses vLLM servers (docs/servers.md)"
    )


def _of_vllm(path: str) -> Together:
    return lambda key, value, values: (
        Becomes(writes={path: number(value)})
        if values.get("use_vllm") and value is not None
        else needless("use_vllm is off" if value is not None else "not set")
    )


def _warm_up(key: str, value: object, values: Values) -> Becomes:
    """Convert the warmup: a number below 1 is a share of all steps."""
    amount = number(value)
    if off(amount):
        return needless("no effect at this value")
    name = "warmup_steps_proportion" if amount < 1 else "num_warmup_steps"
    return Becomes(writes={OPTIMIZER + name: amount})


def _rewards(key: str, value: object, values: Values) -> Becomes:
    if off(value):
        return needless("not set: environment.env_class decides")
    names = value if isinstance(value, list) else [value]
    if len(names) != 1:
        return Becomes(not_yet="several reward functions; write one that adds them up (docs/environments.md)")
    name = str(names[0]).removeprefix("trl.rewards.")
    if name in _BUILT_IN_REWARDS:
        return Becomes(writes={"environment.env_class": f"trl.rewards:{name}"}, note="requires the package trl")
    module, _, function = name.rpartition(".")
    if not module or "/" in name:
        return Becomes(not_yet=f"reward {name}; set environment.env_class to FILE.py:NAME or reward_model")
    return Becomes(writes={"environment.env_class": f"{module}:{function}"})


def _dataset(key: str, value: object, values: Values) -> Becomes:
    """Convert a dataset to our source: NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT."""
    path = "data.val_data" if key.startswith("eval_") else "data.train_data"
    if value is None:
        return needless("not set")
    if key == "eval_dataset_name" or ":" in str(value):
        return Becomes(writes={path: [value]})
    config = values.get("dataset_config")
    source = ":".join(filter(None, (str(value), config)))
    writes = {path: [f"{source}:{values.get('dataset_train_split', 'train')}"]}
    if values.get("eval_strategy", "no") != "no":
        writes["data.val_data"] = [f"{source}:{values.get('dataset_test_split', 'test')}"]
    return Becomes(writes=writes)


def _trackers(key: str, value: object, values: Values) -> Becomes:
    asked = [name for name in (value if isinstance(value, list) else [value]) if name not in ("none", None)]
    missing = [name for name in asked if name not in _TRACKERS]
    if missing:
        return Becomes(not_yet=f"tracker {', '.join(map(str, missing))}; supported: {', '.join(_TRACKERS)}")
    return Becomes(writes={"trainer.logger": ["console", *asked]})


def _attention(key: str, value: object, values: Values) -> Becomes:
    if value is None:
        return needless("not set: trainer.attention decides")
    name = "flash_attention_2" if str(value).startswith("kernels-community/flash-attn2") else value
    if name not in _ATTENTION:
        return Becomes(not_yet=f"attention {value!r}; supported: {', '.join(_ATTENTION)}")
    return Becomes(writes={"trainer.attention": name})


def _adapter(path: str) -> Together:
    return lambda key, value, values: (
        needless("use_peft is off") if not values.get("use_peft") or value is None else Becomes(writes={path: value})
    )


def _targets(key: str, value: object, values: Values) -> Becomes:
    whole_model = value in ("all-linear", ["all-linear"])
    return _adapter("trainer.policy.model.lora.target_modules")(key, "all-linear" if whole_model else value, values)


def _chat(key: str, value: Any, values: Values) -> Becomes:
    return Becomes(writes={f"generator.chat_template_kwargs.{name}": each for name, each in (value or {}).items()})


_LORA = "trainer.policy.model.lora."

TOGETHER: Mapping[str, Together] = {
    **BATCHES,
    **OBJECTIVE,
    "use_vllm": _engine,
    "vllm_mode": _mode,
    "vllm_gpu_memory_utilization": _of_vllm(ENGINE + "gpu_memory_utilization"),
    "vllm_tensor_parallel_size": _of_vllm(ENGINE + "tensor_parallel_size"),
    "vllm_max_model_length": _of_vllm(ENGINE + "engine_init_kwargs.max_model_len"),
    "warmup_steps": _warm_up,
    "warmup_ratio": _warm_up,
    "reward_funcs": _rewards,
    "dataset_name": _dataset,
    "eval_dataset_name": _dataset,
    "report_to": _trackers,
    "attn_implementation": _attention,
    "lora_r": _adapter(_LORA + "rank"),
    "lora_alpha": _adapter(_LORA + "alpha"),
    "lora_dropout": _adapter(_LORA + "dropout"),
    "lora_target_modules": _targets,
    "lora_exclude_modules": _adapter(_LORA + "exclude_modules"),
    "chat_template_kwargs": _chat,
}  # fmt: skip


def implied(values: Values) -> Mapping[str, Any]:
    """Our paths that follow from processes and evaluation settings together."""
    if "model_name_or_path" not in values:
        return {}
    count = processes(values)
    nodes = -(-count // _GPUS_OF_A_NODE)
    found: dict[str, Any] = {"trainer.device": "cuda", "trainer.placement.colocate_all": True}
    for model in ("policy", "ref") if values.get("beta") else ("policy",):
        found[f"trainer.placement.{model}_num_nodes"] = nodes
        found[f"trainer.placement.{model}_num_gpus_per_node"] = -(-count // nodes)
    if values.get("use_vllm"):
        found[ENGINE + "num_engines"] = max(count // whole(values.get("vllm_tensor_parallel_size")), 1)
    if values.get("weight_decay"):
        found[OPTIMIZER + "weight_decay_on"] = "matrices"
    if values.get("eval_strategy", "no") != "no":
        samples = values.get("num_generations_eval") or values.get("num_generations", 8)
        found["generator.eval_n_samples_per_prompt"] = samples
        found["generator.eval_sampling_params.temperature"] = values.get("temperature", 1.0)
        found["generator.eval_sampling_params.top_p"] = values.get("top_p", 1.0)
    return found

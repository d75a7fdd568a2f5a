"""TRL's settings that depend on one another: the objective (loss, clipping, divergence, corrections), batches, engines,
data, rewards, and what RLOO does in another way than GRPO.

TRL counts batches and intervals in samples and optimizer steps, we in prompts and training steps. Settings below a
switch that is off (`SWITCHES` of `convert.py`) do not get here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    EVALUATION,
    OPTIMIZER,
    SAMPLING,
    Dependent,
    Entry,
    Translation,
    UnexpectedValue,
    Values,
    count,
    dropout,
    is_off,
    maps_to,
    number,
    numeric,
    real,
    redundant,
    refused,
    table,
    translations,
    unsupported,
    word,
)
from skyrl.tree.types import display_value

SAMPLED: dict[str, Entry] = {
    "temperature": numeric(SAMPLING + "temperature"),
    "top_p": numeric(SAMPLING + "top_p"),
    "top_k": maps_to(SAMPLING + "top_k", convert=lambda value: value or -1),
    "min_p": numeric(SAMPLING + "min_p"),
    "repetition_penalty": numeric(SAMPLING + "repetition_penalty"),
    "generation_kwargs": SAMPLING + "additional_kwargs",
}
"""How completions are drawn, in training and in evaluation (trl/trainer/grpo_trainer.py:1131 and 1162)."""

REDUCTIONS = {
    "grpo": "sequence_mean", "sapo": "sequence_mean", "dapo": "token_mean", "cispo": "token_mean",
    "bnpo": "token_mean_legacy", "dr_grpo": "seq_mean_token_sum_norm",
}  # fmt: skip
"""Types of loss that exist here -> their reduction."""


def loss_of(values: Values) -> str:
    """Our name of the loss."""
    kind = str(values.get("loss_type", "dapo"))
    if kind in ("cispo", "sapo"):
        return kind
    if values.get("importance_sampling_level", "token") == "sequence":
        return "gspo"
    return "dual_clip" if values.get("delta") is not None else "regular"


def _divergence(key: str, value: object, values: Values) -> Translation:
    weight = number(value)
    writes: dict[str, Any] = {ALGORITHM + "use_kl_loss": bool(weight)}
    if weight:
        writes |= {ALGORITHM + "kl_loss_coef": weight, ALGORITHM + "kl_estimator_type": "k3"}
    return Translation(writes=writes)


def _loss(key: str, value: object, values: Values) -> Translation:
    if word(value, REDUCTIONS) not in REDUCTIONS:
        return unsupported(f"loss {display_value(value)}")
    writes = {ALGORITHM + "policy_loss_type": loss_of(values), ALGORITHM + "loss_reduction": REDUCTIONS[str(value)]}
    if value == "dr_grpo":
        writes[ALGORITHM + "max_seq_len"] = values.get("max_completion_length", 512)
    return Translation(writes=writes)


def _level(key: str, value: object, values: Values) -> Translation:
    if value == "token":
        return redundant("ratios are per token by default")
    if value != "sequence" or loss_of(values) != "gspo" or values.get("delta") is not None:
        return unsupported(f"ratios at level {display_value(value)} with this loss")
    return Translation(writes={ALGORITHM + "policy_loss_type": "gspo"})


def _clip(key: str, value: object, values: Values) -> Translation:
    """Convert clipping: `epsilon` is both bounds unless `epsilon_high` is given. CISPO has only an upper bound."""
    if value is None:
        return redundant("not set: epsilon applies")
    kind, bound = loss_of(values), number(value)
    if kind == "sapo":
        return redundant("no effect: the loss sapo does not clip ratios")
    if kind == "cispo":
        if key == "epsilon":
            return redundant("no effect: the loss cispo has no lower bound")
        cispo = {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": bound - 1}
        return Translation(writes={f"{ALGORITHM}cispo.{name}": setting for name, setting in cispo.items()})
    sides = ["high"] if key == "epsilon_high" else ["low", "high"]
    if key == "epsilon" and values.get("epsilon_high") is not None:
        sides = ["low"]
    return Translation(writes={f"{ALGORITHM}eps_clip_{side}": bound for side in sides})


def _delta(key: str, value: object, values: Values) -> Translation:
    """Convert `delta`, the upper bound of the ratios of tokens with negative advantage, as in dual clip."""
    if value is None:
        return redundant("not set")
    if loss_of(values) != "dual_clip":
        return unsupported("two-sided clipping with this loss")
    return Translation(writes={ALGORITHM + "clip_ratio_c": number(value)})


def _convert_sapo(key: str, value: object, values: Values) -> Translation:
    return Translation(writes={f"{ALGORITHM}sapo.tau_{key.rpartition('_')[2]}": number(value)})


def _scale(key: str, value: object, values: Values) -> Translation:
    match {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value:
        case "group":
            return Translation(writes={ALGORITHM + "grpo_norm_by_std": True})
        case "none":
            return Translation(writes={ALGORITHM + "grpo_norm_by_std": False})
        case "batch":
            norm = ALGORITHM + "reward_shaping.norm.std_level"
            return Translation(writes={ALGORITHM + "grpo_norm_by_std": False, norm: "batch"})
    return refused(f"unknown scale_rewards {display_value(value)}; TRL supports: group, batch, none")


def _entropy(key: str, value: object, values: Values) -> Translation:
    if not number(value):
        return redundant("no effect at this value")
    note = "TRL averages the entropy over all tokens, regardless of the loss reduction"
    return Translation(
        writes={ALGORITHM + "use_entropy_loss": True, ALGORITHM + "entropy_loss_coef": number(value)}, note=note
    )


def _correction(key: str, value: object, values: Values) -> Translation:
    """Convert importance sampling against the engine, which TRL supports only for vLLM."""
    if not values.get("use_vllm") or not values.get("vllm_importance_sampling_correction", True):
        return redundant("vllm_importance_sampling_correction or use_vllm is off")
    if key != "vllm_importance_sampling_mode":
        return redundant("converted together with vllm_importance_sampling_mode")
    high = values.get("vllm_importance_sampling_cap")  # the older name of the upper bound
    high = values.get("vllm_importance_sampling_clip_max", 3.0) if high is None else high
    low = values.get("vllm_importance_sampling_clip_min")
    level, _, action = str(value).partition("_")
    if level not in ("token", "sequence") or action not in ("mask", "truncate") or high is None:
        return unsupported(f"correction {display_value(value)} with bounds {low} and {high}")
    writes = {"tis_ratio_type": level, f"{level}_tis_ratio_clip_high": high}
    if action == "truncate" and low is not None:
        return unsupported("a lower bound on truncated weights")
    if action == "mask" and level == "sequence":
        writes |= {"sequence_mask_metric": "product", "product_mask_high": high, "product_mask_low": low or 0.0}
    elif action == "mask":
        writes |= {"token_mask_is_threshold_high": high} | ({"token_mask_is_threshold_low": low} if low else {})
    table_of_ours = ALGORITHM + "off_policy_correction."
    return Translation(writes={table_of_ours + name: setting for name, setting in writes.items()})


_OBJECTIVE: dict[str, Dependent] = {
    "beta": _divergence,
    "loss_type": _loss,
    "importance_sampling_level": _level,
    "epsilon": _clip,
    "epsilon_high": _clip,
    "delta": _delta,
    "sapo_temperature_pos": _convert_sapo,
    "sapo_temperature_neg": _convert_sapo,
    "scale_rewards": _scale,
    "entropy_coef": _entropy,
    "vllm_importance_sampling_*": _correction,
}

_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
_COMPUTED = "a batch size is not a number in the file: replace it with its value"


def are_known(values: Values) -> bool:
    """Whether all batch sizes in the file have known values."""
    names = (*_SIZES, "num_generations", "num_iterations", "num_processes")
    return all(isinstance(values.get(name), int | float | None) for name in names)


def processes(values: Values) -> int:
    """Number of processes of a run, one for each GPU; set by `accelerate launch`, not by TRL's arguments."""
    return count(values.get("num_processes"))


def samples_per_update(values: Values) -> int:
    """Number of samples of an optimizer step, over all processes."""
    rows = count(values.get("per_device_train_batch_size"), default=8)
    return rows * processes(values) * count(values.get("gradient_accumulation_steps"))


def samples_per_batch(values: Values) -> int:
    """Number of samples that are generated at a time."""
    if not is_off(values.get("generation_batch_size")):
        return count(values["generation_batch_size"])
    rows = count(values.get("per_device_train_batch_size"), default=8)
    steps = values.get("steps_per_generation") or values.get("gradient_accumulation_steps", 1)
    return rows * processes(values) * count(steps)


def updates_per_batch(values: Values) -> int:
    """Number of optimizer steps per generated batch."""
    passes = count(values.get("num_iterations"))
    return max(samples_per_batch(values) * passes // samples_per_update(values), 1)


def _batch(key: str, value: object, values: Values) -> Translation:
    """Convert a batch size; all of TRL's batch sizes together determine ours."""
    if value is None:
        return redundant("not set: derived from the other batch sizes")
    if not are_known(values):
        return refused(_COMPUTED)
    group = count(values.get("num_generations"), default=8)
    drawn, used = samples_per_batch(values), samples_per_update(values)
    batch = max(drawn, used)  # an optimizer step may use several generated batches
    if batch % group or used % group:
        reason = f"{drawn} samples per generation and {used} per optimizer step are not whole groups of {group}"
        return refused(f"{reason}; here both are counted in prompts")
    if key == "per_device_train_batch_size":
        prompts = {"trainer.train_batch_size": batch // group, "trainer.policy_mini_batch_size": used // group}
        return Translation(writes={**prompts, "trainer.micro_train_batch_size_per_gpu": value})
    return redundant("trainer.train_batch_size and trainer.policy_mini_batch_size are derived from it")


def _steps(path: str, key: str, value: object, values: Values) -> Translation:
    """Convert a number of optimizer steps to training steps, each of which may have several optimizer steps."""
    if is_off(value) or value == -1:
        return redundant("no effect at this value")
    if not are_known(values):
        return refused(_COMPUTED)
    updates, steps = updates_per_batch(values), real(value)
    if not float(steps).is_integer():
        return unsupported("a fraction of all steps")
    note = f"in training steps of {updates} optimizer steps" if updates > 1 else ""
    return Translation(writes={path: -(-int(steps) // updates)}, note=note)


def _strategy(path: str, steps: str, key: str, value: object, values: Values) -> Translation:
    match value:
        case "no" | False:
            return Translation(writes={path: -1})
        case "epoch":
            return Translation(writes={path: "1 epoch"})
        case "steps":
            return redundant(f"set by {steps}")
    return unsupported(f"strategy {display_value(value)}")


def _steps_only(switch: str, value_there: str, path: str, key: str, value: object, values: Values) -> Translation:
    """Convert a number of steps that has an effect only under the strategy `steps`."""
    if values.get(switch, value_there) != "steps":
        return redundant(f"{switch} is not steps")
    return _steps(path, key, value, values)


BATCHES: dict[str, Dependent] = {
    **dict.fromkeys(_SIZES, _batch),
    "max_steps": partial(_steps, "trainer.max_training_steps"),
    "save_strategy": partial(_strategy, "trainer.ckpt_interval", "save_steps"),
    "eval_strategy": partial(_strategy, "trainer.eval_interval", "eval_steps"),
    "save_steps": partial(_steps_only, "save_strategy", "steps", "trainer.ckpt_interval"),
    "eval_steps": partial(_steps_only, "eval_strategy", "no", "trainer.eval_interval"),
}

_BUILT_IN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OPEN_R1_REWARDS = {
    "accuracy": "accuracy_reward", "format": "format_reward", "reasoning_steps": "reasoning_steps_reward",
    "tag_count": "tag_count_reward",
}  # fmt: skip
"""Names of open-r1's rewards that are functions; it makes the others from further settings."""

_SPLIT_OFF = "splitting off rows for evaluation; see data.val_data"
_OF_A_DATASET = ("path", "id", "name", "config", "split", "columns")
_TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab")
_ATTENTION = ("sdpa", "eager", "flash_attention_2")
GPUS_OF_A_NODE = 8


def _warm_up(key: str, value: object, values: Values) -> Translation:
    """Convert the warmup: a number below 1 is a share of all steps."""
    if is_off(number(value)):
        return redundant("no effect at this value")
    amount = real(value)
    name = "warmup_steps_proportion" if amount < 1 else "num_warmup_steps"
    return Translation(writes={OPTIMIZER + name: amount})


def _reward(name: str) -> str:
    """The import path of a reward; empty for one that only the program itself can make."""
    name = name.removeprefix("trl.rewards.")
    if name in _BUILT_IN_REWARDS:
        return f"trl.rewards:{name}"
    if name in _OPEN_R1_REWARDS:
        return f"open_r1.rewards:{_OPEN_R1_REWARDS[name]}"
    module, _, function = name.rpartition(".")
    return f"{module}:{function}" if module and "/" not in name else ""


def _rewards(key: str, value: object, values: Values) -> Translation:
    """Convert reward functions; several, or one with a weight, become a list."""
    if is_off(value):
        return redundant("not set: environment.env_class decides")
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    paths = {name: _reward(name) for name in names}
    if unnamed := [name for name, path in paths.items() if not path]:
        return unsupported(
            f"reward {', '.join(unnamed)}, which has no import path: write it as a function in a file, and set "
            "environment.env_class to FILE.py:NAME, or to reward_model"
        )
    weights = values.get("reward_weights")
    several = len(names) > 1 or (not is_off(weights) and weights != [1.0])
    packages = [package for package in ("trl", "open_r1") if any(path.startswith(package) for path in paths.values())]
    return Translation(
        writes={"environment.env_class": [*paths.values()] if several else paths[names[0]]},
        note=f"requires the package {' and '.join(packages)}" if packages else "",
    )


def _weights(key: str, value: object, values: Values) -> Translation:
    if is_off(value):
        return redundant("not set: each reward has weight 1")
    if is_off(values.get("reward_funcs")):
        return redundant("no effect: there are no reward_funcs in the file; environment.reward_weights are ours")
    if not _rewards(key, values["reward_funcs"], values).writes:
        return unsupported("weights of reward_funcs that are refused")
    if value == [1.0]:
        return redundant("one reward of weight 1")
    return Translation(writes={"environment.reward_weights": value})


def _mixture_of_open_r1(key: str, value: object, values: Values) -> Translation:
    """Convert open-r1's `dataset_mixture`, which shuffles the rows of its datasets by a seed of its own."""
    mixture = table(value)
    if mixture.get("test_split_size") is not None:
        return unsupported(_SPLIT_OFF)
    return _mixture(key, mixture.get("datasets"), values)


def _mixture(key: str, value: object, values: Values) -> Translation:
    """Convert a list of datasets: TRL's `datasets`, or open-r1's `dataset_mixture.datasets`."""
    if is_off(value):
        return redundant("not set")
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise UnexpectedValue("expected a list of tables")
    datasets = []
    for item in value:
        rest = {name for name, setting in item.items() if setting is not None} - {*_OF_A_DATASET}
        rest -= {"weight"} if item.get("weight") in (1, 1.0) else set()
        names = [item.get("path") or item.get("id"), item.get("name") or item.get("config"), item.get("split", "train")]
        if rest or not names[0]:
            return unsupported(f"{', '.join(sorted(map(str, rest))) or 'no path'} of a dataset in a mixture")
        datasets.append(":".join(str(name) for name in names if name))
    return Translation(writes={"data.train_data": datasets})


def _dataset(key: str, value: object, values: Values) -> Translation:
    """Convert a dataset to our source: NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT."""
    path = "data.val_data" if key.startswith("eval_") else "data.train_data"
    if value is None:
        return redundant("not set")
    if not is_off(values.get("datasets")) or not is_off(values.get("dataset_mixture")):
        return redundant("no effect: the list of datasets takes its place")
    if key == "eval_dataset_name" or ":" in str(value):
        return Translation(writes={path: [value]})
    config = values.get("dataset_config")
    if config is not None and not isinstance(config, str):
        raise UnexpectedValue("expected a text as dataset_config")
    source = ":".join(filter(None, (str(value), config)))
    writes = {path: [f"{source}:{values.get('dataset_train_split', 'train')}"]}
    if values.get("eval_strategy", "no") != "no":
        writes["data.val_data"] = [f"{source}:{values.get('dataset_test_split', 'test')}"]
    return Translation(writes=writes)


def _trackers(key: str, value: object, values: Values) -> Translation:
    trackers = [name for name in (value if isinstance(value, list) else [value]) if name not in ("none", None)]
    missing = [name for name in trackers if name not in _TRACKERS]
    if missing:
        return unsupported(f"tracker {', '.join(map(str, missing))}; supported: {', '.join(_TRACKERS)}")
    return Translation(writes={"trainer.logger": ["console", *trackers]})


def _attention(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant("not set: trainer.attention decides")
    name = "flash_attention_2" if str(value).startswith("kernels-community/flash-attn2") else value
    if name not in _ATTENTION:
        return unsupported(f"attention {display_value(value)}; supported: {', '.join(_ATTENTION)}")
    return Translation(writes={"trainer.attention": name})


def _precision(key: str, value: object, values: Values) -> Translation:
    """Convert bf16, without which a model that is loaded in bfloat16 computes in it all the same."""
    if value is False and "bfloat16" in (values.get("dtype"), values.get("torch_dtype")):
        return Translation(writes={"trainer.bf16": True}, note="the model is loaded in bfloat16")
    return redundant("not set") if value is None else Translation(writes={"trainer.bf16": value})


DEPENDENT: dict[str, Dependent] = {
    **BATCHES,
    **_OBJECTIVE,
    "disable_dropout": partial(dropout, "trainer.policy.use_dropout", "model_name_or_path"),
    "use_vllm": lambda key, value, values: Translation(writes={ENGINE + "backend": "vllm" if value else "torch"}),
    "bf16": _precision,
    "warmup_steps": _warm_up,
    "warmup_ratio": _warm_up,
    "reward_funcs": _rewards,
    "reward_weights": _weights,
    "datasets": _mixture,
    "dataset_mixture": _mixture_of_open_r1,
    "test_split_size": lambda key, value, values: redundant("not set") if value is None else unsupported(_SPLIT_OFF),
    "dataset_name": _dataset,
    "eval_dataset_name": _dataset,
    "report_to": _trackers,
    "attn_implementation": _attention,
    "chat_template_kwargs": lambda key, value, values: Translation(
        writes={f"generator.chat_template_kwargs.{name}": setting for name, setting in table(value).items()}
    ),
}  # fmt: skip


def implied(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that follow from processes and evaluation settings together."""
    if "model_name_or_path" not in values:
        return
    ranks = processes(values)
    nodes = -(-ranks // GPUS_OF_A_NODE)
    device = "cpu" if values.get("use_cpu") or values.get("no_cuda") else "cuda"
    paths: dict[str, Any] = {"trainer.device": device, "trainer.placement.colocate_all": True}
    for model in ("policy", "ref") if values.get("beta") else ("policy",):
        paths[f"trainer.placement.{model}_num_nodes"] = nodes
        paths[f"trainer.placement.{model}_num_gpus_per_node"] = -(-ranks // nodes)
    if values.get("use_vllm"):
        paths[ENGINE + "num_engines"] = max(ranks // count(values.get("vllm_tensor_parallel_size")), 1)
    if values.get("weight_decay"):
        paths[OPTIMIZER + "weight_decay_on"] = "matrices"
    if values.get("eval_strategy", "no") != "no":
        samples = values.get("num_generations_eval") or values.get("num_generations", 8)
        paths["generator.eval_n_samples_per_prompt"] = samples
        of_training = translations({"temperature": 1.0, "top_p": 1.0, **values}, SAMPLED)
        paths |= {path.replace(SAMPLING, EVALUATION): value for path, value in of_training.items()}
    yield from (("implied", path, value) for path, value in paths.items())


# RLOO (trl/trainer/rloo_trainer.py of TRL 1.16.0): advantages are rewards less the mean of the others' (line 1690), and
# the KL penalty is part of the reward (line 1673). The loss clips one ratio for a whole answer, the product of its
# tokens' (lines 1824-1832). skyrl has no such ratio, but it is 1 where a batch has a single optimizer step: the loss is
# then the sum over an answer's tokens, averaged over answers.


def _divergence_of_rloo(key: str, value: object, values: Values) -> Translation:
    weight = number(value)
    writes: dict[str, Any] = {ALGORITHM + "use_kl_loss": False}
    if weight:
        writes |= {f"{ALGORITHM}use_kl_in_reward": True, f"{ALGORITHM}kl_loss_coef": weight}
        writes[ALGORITHM + "kl_estimator_type"] = "k1"
    return Translation(writes=writes)


def _several_updates(key: str, value: object, values: Values) -> Translation | None:
    if value is None or updates_per_batch(values) == 1:
        return None
    return unsupported(
        "clipped ratios of whole answers, the product of their tokens'; with one optimizer step per batch there are "
        "none"
    )


OF_RLOO: dict[str, Dependent] = {
    "beta": _divergence_of_rloo,
    **dict.fromkeys(
        ("epsilon", "epsilon_high"),
        lambda key, value, values: redundant("no effect: each batch has one optimizer step, so all ratios are 1"),
    ),
    **dict.fromkeys(("num_iterations", "steps_per_generation", "generation_batch_size"), _several_updates),
}


def implied_by_rloo(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that RLOO implies."""
    yield from implied(values)
    yield "rloo", ALGORITHM + "advantage_estimator", "rloo"
    yield "rloo", ALGORITHM + "policy_loss_type", "regular"
    yield "rloo", ALGORITHM + "loss_reduction", "seq_mean_token_sum_norm"
    yield "rloo", ALGORITHM + "max_seq_len", 1  # a sum: the mean over sequences of each one's sum divided by this

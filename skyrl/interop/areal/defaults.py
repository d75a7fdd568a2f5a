"""AReaL's defaults, for settings that an experiment file omits.

Defaults that change what is learned are written into the converted file. Others are listed if they differ from ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.interop.report import OtherDefault
from skyrl.interop.translation import ENGINE, Values
from skyrl.tree import get_at

MINI_BATCHES = 4
"""AReaL's default number of mini-batches per batch."""

_OPTIMIZERS = {
    2025: {"lr": 2e-5, "weight_decay": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5},
    2026: {"lr": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
}
_OPTIMIZER = {"warmup_steps_proportion": 0.001, "lr_scheduler_type": "constant", "gradient_clipping": 1.0}

_LEARNING: dict[int, dict[str, Any]] = {2025: {"async_training": True}, 2026: {}}
_MAX_TOKENS = {2025: 65536, 2026: 32768}
_CONTEXT = 32768
"""Default context length of AReaL's engines, in tokens of prompt and answer together."""

_LEARNING_ALWAYS: dict[str, Any] = {
    "seed": 1,
    "total_train_epochs": 1,
    "train_dataset.batch_size": 1,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "gconfig.temperature": 1.0,
    "rollout.max_head_offpolicyness": 0,
    "actor.ppo_n_minibatches": MINI_BATCHES,
    "actor.reward_clip": 20.0,
    "actor.kl_ctl": 0.1,
    "actor.recompute_logprob": False,
    "actor.disable_dropout": False,
}
_CRITIC: dict[str, Any] = {
    "critic.eps_clip": 0.5,
    "critic.ppo_n_minibatches": MINI_BATCHES,
    "critic.disable_dropout": False,
}
_TRACKERS = ("stats_logger.", "wandb.", "swanlab.", "tensorboard.")
_SAMPLED_ALIKE = (
    "temperature", "top_p", "top_k", "greedy", "min_new_tokens", "frequency_penalty", "stop", "stop_token_ids",
)  # fmt: skip
_NORM = {2025: {"std_unbiased": False}, 2026: {"std_unbiased": True}}
_NORM_ALWAYS: dict[str, Any] = {"mean_level": "batch", "std_level": "batch", "eps": 1e-5}

_INSTEAD = {
    "total_train_epochs": ("total_train_steps", "total_train_n_seqs"),
    "gconfig.n_samples": ("group_size",),
    "actor.optimizer.warmup_steps_proportion": ("actor.optimizer.warmup_steps",),
    "critic.optimizer.warmup_steps_proportion": ("critic.optimizer.warmup_steps",),
    "train_dataset.batch_size": ("dataset.train_bs_n_seqs",),
}
"""Alternative names of settings, of which a file needs only one."""

NO_REFERENCE = (
    "without ref in the file, AReaL subtracts this weight times each token's log-probability from its reward, which "
    "rewards entropy: set it to 0, or set ref.path"
)
"""Reason for refusing a KL weight without a reference."""

OTHERS: dict[str, tuple[Any, str, Any]] = {
    "recover.freq_steps": (None, "trainer.ckpt_interval", -1),
    "evaluator.eval_before_train": (False, "trainer.eval_before_train", False),
    "recover.mode": ("disabled", "trainer.resume_mode", None),
    "evaluator.freq_steps": (None, "trainer.eval_interval", -1),
    "sglang.disable_radix_cache": (True, ENGINE + "enable_prefix_caching", False),
}
"""Defaults that change no training: AReaL's key -> its default of 2026, our path, and our value that means the same."""


def age(values: Values) -> int:
    """Year of the AReaL version for which a file is written. Since 2026 each engine names its backend."""
    return 2026 if any(key.endswith(".backend") and value for key, value in values.items()) else 2025


def has_critic(values: Values) -> bool:
    """Whether a critic is configured."""
    return values.get("critic.path") is not None


def is_whole(values: Values) -> bool:
    """Whether the file describes a complete run, rather than some settings or a run of AReaL's older system."""
    return ("actor.path" in values or has_critic(values)) and not any(key.startswith("ppo.") for key in values)


def has_reference(values: Values) -> bool:
    """Whether the file configures a reference model."""
    return has_table(values, "ref")


def has_table(values: Values, name: str) -> bool:
    """Whether the file has settings of a table that is absent by default."""
    return any(key.startswith(f"{name}.") for key in values)


def left_out(values: Values) -> dict[str, Any]:
    """Settings that a complete experiment omits and that change what is learned, with its AReaL version's defaults."""
    if not is_whole(values):
        return {}
    year = age(values)
    optimizer = _OPTIMIZERS[year] | _OPTIMIZER
    defaults = (
        _LEARNING_ALWAYS | _LEARNING[year] | {f"actor.optimizer.{name}": default for name, default in optimizer.items()}
    )
    defaults |= _evaluation(values) | _lengths({**defaults, **values}, _MAX_TOKENS[year])
    if not any(key.startswith(_TRACKERS) for key in values):  # nothing goes to a service that the file does not name
        defaults["stats_logger.wandb.mode"] = "disabled"
    if has_critic(values):
        defaults |= _CRITIC | {f"critic.optimizer.{name}": default for name, default in optimizer.items()}
    for norm in ("actor.adv_norm", "actor.reward_norm"):
        if has_table(values, norm):
            defaults |= {f"{norm}.{name}": default for name, default in (_NORM_ALWAYS | _NORM[year]).items()}
    if has_table(values, "actor.rejection_sampling") and "actor.rejection_sampling.lower" not in values:
        defaults["actor.rejection_sampling.upper"] = 5.0
    if not splits_evenly(values):
        defaults = {key: value for key, value in defaults.items() if not key.endswith(".ppo_n_minibatches")}
    return {
        key: value
        for key, value in defaults.items()
        if not any(name in values for name in (key, *_INSTEAD.get(key, ())))
    }


def _evaluation(values: Values) -> dict[str, Any]:
    """Defaults of evaluation sampling, which copies training's settings unless the file has separate ones."""
    if any(key.startswith("eval_gconfig.") for key in values):
        return {"eval_gconfig.temperature": 1.0, "eval_gconfig.max_new_tokens": 16384}
    alike = {f"eval_gconfig.{name}": values.get(f"gconfig.{name}") for name in _SAMPLED_ALIKE}
    default = {} if values.get("gconfig.greedy") else {"eval_gconfig.temperature": 1.0}
    return default | {key: value for key, value in alike.items() if value is not None}


def _lengths(values: Values, max_tokens: int) -> dict[str, Any]:
    """Default length limits. Without a prompt limit, a prompt may fill the engine's context except for a whole answer;
    with one, a prompt and its answer have `max_tokens` together.
    """
    answer, longest = values["gconfig.max_new_tokens"], values.get("train_dataset.max_length")
    if not isinstance(answer, int):
        return {}
    if isinstance(longest, int):
        return {"gconfig.max_tokens": max_tokens} if longest + answer > max_tokens else {}
    limits = (values.get(key) for key in ("gconfig.max_tokens", "sglang.context_length", "vllm.max_model_len"))
    context_length = min([_CONTEXT, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    return {"train_dataset.max_length": context_length - answer} if context_length > answer else {}


def splits_evenly(values: Values) -> bool:
    """Whether AReaL's default of 4 mini-batches divides the batch into whole prompts."""
    batch = values.get("train_dataset.batch_size", values.get("dataset.train_bs_n_seqs", 1))
    return isinstance(batch, int) and batch % MINI_BATCHES == 0


def other_defaults(values: Values, run: Any, more: Mapping[str, tuple[Any, str, Any]]) -> Iterator[OtherDefault]:
    """Settings from `OTHERS` and `more` that a complete experiment omits, that do not change training, and whose
    default differs here.
    """
    for key, (default, path, same) in {**OTHERS, **more}.items() if is_whole(values) else ():
        group = key.removesuffix("steps")
        ours = get_at(run, path)
        if not any(name.startswith(group) for name in values) and ours != same:
            yield OtherDefault(source=key, source_default=default, path=path, skyrl_default=ours)
    key, path = "actor.ppo_n_minibatches", "trainer.policy_mini_batch_size"
    if is_whole(values) and key not in values and not splits_evenly(values):
        yield OtherDefault(source=key, source_default=MINI_BATCHES, path=path, skyrl_default=get_at(run, path))

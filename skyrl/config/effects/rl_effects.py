"""Conditions under which fields have an effect. A written value without effect in this run is a warning.

Real configurations often contain such values (a KL coefficient with KL off), so they stop a run only under `--strict`.
"""

from __future__ import annotations

from skyrl.config.derive.engine_backends import backend_of, engine_dtype
from skyrl.config.derive.every_kind import EVERY_KIND_EFFECTS, may_resume, saves
from skyrl.config.derive.sizes import on_ray
from skyrl.config.effects.algorithm import ALGORITHM_EFFECTS, CRITIC, REFERENCE
from skyrl.config.effects.learners import LEARNER_EFFECTS
from skyrl.config.effects.rollouts import EVALUATES, ROLLOUT_EFFECTS
from skyrl.config.settings.fully_async import FullyAsyncConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of
from skyrl.tree.classes import fields_of
from skyrl.tree.rules import Condition, Effect, condition, effects, fields_in, is_one

_ASYNCHRONOUS = Condition("trainer.fully_async.enabled is on", lambda run: run.trainer.fully_async.enabled)
_RESUMES = Condition("the run may resume (resume_mode is not none)", lambda run: may_resume(run.trainer))
_BOUNDS_TOKENS = Condition(
    "max_tokens_per_microbatch bounds a pass", lambda run: run.trainer.max_tokens_per_microbatch != -1
)
_NOT_MEGATRON = Condition(
    "the strategy is not megatron, whose recomputation is in megatron_config.transformer_config_kwargs",
    lambda run: not _has_own_modules(run),
)


def _has_own_modules(run: SkyRLTrainConfig) -> bool:
    return facts_of(run.trainer).own_modules


@condition(
    "trainer.fully_async.enabled is on, and engines keep their weights while learners work (which vllm does not under "
    "colocate_all)"
)
def _keeps_weights(run: SkyRLTrainConfig) -> bool:
    gives_up = run.trainer.placement.colocate_all and backend_of(run.generator.inference_engine).sleeps
    return run.trainer.fully_async.enabled and not gives_up


@condition("the learner or its engines compute in 16 bits")
def _computes_in_16_bits(run: SkyRLTrainConfig) -> bool:
    learner = run.trainer.compute_dtype or "float32"
    return not learner == engine_dtype(run.generator.inference_engine, learner) == "float32"


_IS_INTERRUPTED = Condition(
    "asynchronous samples are interrupted",
    lambda run: run.trainer.fully_async.enabled and run.trainer.fully_async.interrupt_generation,
)
_WAITS_FOR_OTHERS = Condition(
    "the run is on Ray, or its engines are servers over HTTP",
    lambda run: on_ray(run) or bool(backend_of(run.generator.inference_engine).server_api),
)
_SHARES_PROMPTS = Condition(
    "use_sample_packing is on, and attention is sdpa or the strategy is megatron",
    lambda run: run.trainer.use_sample_packing and (_has_own_modules(run) or run.trainer.attention in (None, "sdpa")),
)
_CHOOSES_ATTENTION = Condition(
    "the strategy is not megatron, which has an attention of its own, or the engine is torch",
    lambda run: not _has_own_modules(run) or backend_of(run.generator.inference_engine).is_embedded,
)
_RECOMPUTES = Condition(
    "activations are recomputed, and not by Megatron",
    lambda run: bool(run.trainer.recompute_activations) and not _has_own_modules(run),
)
_SAVES = Condition("checkpoints are saved (ckpt_interval)", lambda run: saves(run.trainer))
_FORGETS_CHECKPOINTS = Condition(
    "old checkpoints are deleted (max_ckpts_to_keep is not -1)",
    lambda run: _SAVES.holds(run) and run.trainer.max_ckpts_to_keep != -1,
)
_KEEPS_THE_BEST = Condition(
    "the best checkpoints are kept (ckpt_keep_best)",
    lambda run: _FORGETS_CHECKPOINTS.holds(run) and run.trainer.ckpt_keep_best > 0,
)
_COUNTS_ROWS = is_one("trainer.max_tokens_per_microbatch", -1)

_WAITS = {f"placement.{name}_timeout_seconds" for name in ("start", "call", "heartbeat")}
"""Fields that also bound what a run waits for from servers."""

EFFECTS: tuple[Effect, ...] = (
    *(effect.below("trainer") for effect in EVERY_KIND_EFFECTS if effect.path not in _WAITS),
    *effects(_WAITS_FOR_OTHERS, *(f"trainer.{path}" for path in sorted(_WAITS))),
    *LEARNER_EFFECTS,
    Effect("trainer.update_ref_every_epoch", REFERENCE),
    Effect("trainer.critic_mini_batch_size", CRITIC),
    *ALGORITHM_EFFECTS,
    Effect("trainer.async_ckpt_save", _SAVES),
    Effect("trainer.resume_with_changes", _RESUMES),
    *effects(_FORGETS_CHECKPOINTS, "trainer.ckpt_keep_every", "trainer.ckpt_keep_best"),
    *effects(_KEEPS_THE_BEST, "trainer.ckpt_best_metric", "trainer.ckpt_best_is"),
    Effect("trainer.min_microbatches", _BOUNDS_TOKENS),
    Effect("trainer.micro_forward_batch_size_per_gpu", _COUNTS_ROWS),
    Effect(
        "trainer.micro_train_batch_size_per_gpu",
        _COUNTS_ROWS | is_one("trainer.algorithm.loss_reduction", "token_mean_legacy"),
    ),
    Effect("trainer.share_group_prompts", _SHARES_PROMPTS),
    Effect("trainer.fp32_lm_head", _computes_in_16_bits),
    Effect("trainer.attention", _CHOOSES_ATTENTION),
    Effect("trainer.recompute_activations", _NOT_MEGATRON),
    Effect("trainer.gradient_checkpointing_use_reentrant", _RECOMPUTES),
    Effect("trainer.eval_batch_size", EVALUATES),
    Effect("trainer.faults.max_skipped_steps", is_one("trainer.faults.on_non_finite", "skip")),
    Effect("trainer.faults.max_roll_backs", is_one("trainer.faults.on_non_finite", "roll_back")),
    *(
        Effect(f"trainer.fully_async.{name}", _ASYNCHRONOUS)
        for name in fields_of(FullyAsyncConfig)
        if name not in ("enabled", "steps_per_sync", "clear_kv_cache_on_weight_sync", "mask_older_tokens")
    ),
    Effect("trainer.fully_async.steps_per_sync", _keeps_weights),
    *effects(_IS_INTERRUPTED, *fields_in("trainer.fully_async", "clear_kv_cache_on_weight_sync mask_older_tokens")),
    *ROLLOUT_EFFECTS,
)

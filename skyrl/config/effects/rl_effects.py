"""Conditions under which fields have an effect. A written value without effect in this run is a warning.

Real configurations often contain such values (a KL coefficient with KL off), so they stop a run only under `--strict`.
"""

from __future__ import annotations

from collections.abc import Callable

from skyrl.config.derive.engine_backends import backend_of, engine_dtype, kind_of_engine
from skyrl.config.derive.every_kind import EVERY_KIND_EFFECTS, saves
from skyrl.config.derive.rl_models import has_critic, has_reference
from skyrl.config.derive.sizes import evaluates, on_ray
from skyrl.config.effects.algorithm import ALGORITHM_EFFECTS
from skyrl.config.effects.learners import LEARNER_EFFECTS
from skyrl.config.effects.rollouts import ROLLOUT_EFFECTS
from skyrl.config.settings.fully_async import FullyAsyncConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of
from skyrl.tree.classes import fields_of
from skyrl.tree.rules import Effect


def _is_asynchronous(run: SkyRLTrainConfig) -> bool:
    return run.trainer.fully_async.enabled


def _keeps_weights(run: SkyRLTrainConfig) -> bool:
    gives_up = run.trainer.placement.colocate_all and backend_of(run.generator.inference_engine).sleeps
    return run.trainer.fully_async.enabled and not gives_up


def _is_interrupted(run: SkyRLTrainConfig) -> bool:
    return run.trainer.fully_async.enabled and run.trainer.fully_async.interrupt_generation


def _non_finite(policy: str) -> Callable[[SkyRLTrainConfig], bool]:
    return lambda run: run.trainer.faults.on_non_finite == policy


def _counts_rows(run: SkyRLTrainConfig) -> bool:
    return run.trainer.max_tokens_per_microbatch == -1


def _computes_in_16_bits(run: SkyRLTrainConfig) -> bool:
    learner = run.trainer.compute_dtype or "float32"
    return not learner == engine_dtype(run.generator.inference_engine, learner) == "float32"


_WAITS = {f"placement.{name}_timeout_seconds" for name in ("start", "call", "heartbeat")}
"""Fields that also bound what a run waits for from servers."""


def _waits_for_others(run: SkyRLTrainConfig) -> bool:
    return on_ray(run) or kind_of_engine(run.generator.inference_engine) in ("http", "sglang")


def _has_own_modules(run: SkyRLTrainConfig) -> bool:
    return facts_of(run.trainer).own_modules


def _packs_by_itself(run: SkyRLTrainConfig) -> bool:
    return _has_own_modules(run) or run.trainer.attention in (None, "sdpa")


def _saves(run: SkyRLTrainConfig) -> bool:
    return saves(run.trainer)


def _resumes(run: SkyRLTrainConfig) -> bool:
    trainer = run.trainer
    return trainer.recover_mode != "disabled" and (trainer.resume_mode != "none" or trainer.recover_mode is not None)


def _forgets_checkpoints(run: SkyRLTrainConfig) -> bool:
    return _saves(run) and run.trainer.max_ckpts_to_keep != -1


def _keeps_the_best(run: SkyRLTrainConfig) -> bool:
    return _forgets_checkpoints(run) and run.trainer.ckpt_keep_best > 0


EFFECTS: tuple[Effect, ...] = (
    *(effect.below("trainer") for effect in EVERY_KIND_EFFECTS if effect.path not in _WAITS),
    *(
        Effect(f"trainer.{path}", "the run is on Ray, or its engines are servers over HTTP", _waits_for_others)
        for path in sorted(_WAITS)
    ),
    *LEARNER_EFFECTS,
    Effect("trainer.update_ref_every_epoch", "a KL term is on", has_reference),
    Effect("trainer.critic_mini_batch_size", "there is a critic", has_critic),
    *ALGORITHM_EFFECTS,
    Effect("trainer.async_ckpt_save", "checkpoints are saved (ckpt_interval)", _saves),
    Effect("trainer.ckpt_path", "checkpoints are saved or resumed from", lambda run: _saves(run) or _resumes(run)),
    Effect("trainer.resume_with_changes", "the run may resume (resume_mode is not none)", _resumes),
    *(
        Effect(f"trainer.{name}", "old checkpoints are deleted (max_ckpts_to_keep is not -1)", _forgets_checkpoints)
        for name in ("ckpt_keep_every", "ckpt_keep_best")
    ),
    *(
        Effect(f"trainer.{name}", "the best checkpoints are kept (ckpt_keep_best)", _keeps_the_best)
        for name in ("ckpt_best_metric", "ckpt_best_is")
    ),
    Effect("trainer.min_microbatches", "max_tokens_per_microbatch bounds a pass", lambda run: not _counts_rows(run)),
    Effect("trainer.micro_forward_batch_size_per_gpu", "max_tokens_per_microbatch is -1", _counts_rows),
    Effect(
        "trainer.micro_train_batch_size_per_gpu",
        "max_tokens_per_microbatch is -1, or loss_reduction is token_mean_legacy",
        lambda run: _counts_rows(run) or run.trainer.algorithm.loss_reduction == "token_mean_legacy",
    ),
    Effect(
        "trainer.share_group_prompts",
        "use_sample_packing is on, and attention is sdpa or the strategy is megatron",
        lambda run: run.trainer.use_sample_packing and _packs_by_itself(run),
    ),
    Effect("trainer.fp32_lm_head", "the learner or its engines compute in 16 bits", _computes_in_16_bits),
    Effect(
        "trainer.attention",
        "the strategy is not megatron, which has an attention of its own, or the engine is torch",
        lambda run: not _has_own_modules(run) or backend_of(run.generator.inference_engine).is_embedded,
    ),
    Effect(
        "trainer.recompute_activations",
        "the strategy is not megatron, whose recomputation is in megatron_config.transformer_config_kwargs",
        lambda run: not _has_own_modules(run),
    ),
    Effect(
        "trainer.gradient_checkpointing_use_reentrant",
        "activations are recomputed, and not by Megatron",
        lambda run: bool(run.trainer.recompute_activations) and not _has_own_modules(run),
    ),
    Effect("trainer.eval_batch_size", "evaluation is on", evaluates),
    Effect("trainer.faults.max_skipped_steps", "on_non_finite is skip", _non_finite("skip")),
    Effect("trainer.faults.max_roll_backs", "on_non_finite is roll_back", _non_finite("roll_back")),
    *(
        Effect(f"trainer.fully_async.{name}", "trainer.fully_async.enabled is on", _is_asynchronous)
        for name in fields_of(FullyAsyncConfig)
        if name not in ("enabled", "steps_per_sync", "clear_kv_cache_on_weight_sync", "mask_older_tokens")
    ),
    Effect(
        "trainer.fully_async.steps_per_sync",
        "trainer.fully_async.enabled is on, and engines keep their weights while learners work (which vllm does not "
        "under colocate_all)",
        _keeps_weights,
    ),
    *(
        Effect(f"trainer.fully_async.{name}", "asynchronous samples are interrupted", _is_interrupted)
        for name in ("clear_kv_cache_on_weight_sync", "mask_older_tokens")
    ),
    *ROLLOUT_EFFECTS,
)

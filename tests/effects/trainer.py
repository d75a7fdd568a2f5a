"""Probes of the trainer's own fields, of `trainer.fully_async` and of `trainer.faults`."""

from __future__ import annotations

from typing import Any

from tests.effects.algorithm import CRITIC
from tests.effects.checkpoints import kept, start, start_after_a_change, verified, waits
from tests.effects.course import attempts, course, course_with_nan, grace, stall, stop
from tests.effects.observables import alarms, callbacks, placement, planned_steps, ray_arguments, run, samples, trackers
from tests.effects.passes import (
    compiled_functions,
    derived,
    evaluated,
    fused_layers,
    old_logprobs,
    optimizer_steps,
    passes,
    prompts,
    rounding,
    strategy,
    tokenizer,
    waiting_activations,
)
from tests.effects.probe import Observable, Probe
from tests.effects.services import IN_WANDB, PROBED, asked
from tests.effects.streams import ahead, first_batch, interruption, versions_sent

T = "trainer."


def on(seen_in: Observable, context: dict[str, Any], **fields: Any) -> list[Probe]:
    """Probes of fields of `trainer` that one observable shows in one context; `__` stands for a dot."""
    where = {path if "." in path else T + path.replace("__", "."): value for path, value in context.items()}
    return [Probe(T + path.replace("__", "."), value, seen_in, where) for path, value in fields.items()]


CUDA = {"device": "cuda"}
ASYNC = {"fully_async__enabled": True, "algorithm__policy_loss_type": "decoupled"}
SOME = {"max_ckpts_to_keep": 1}
NAMED = {"resume_mode": "from_path", "resume_path": "out/checkpoints/global_step_1"}
NO_EVALUATION = {"eval_before_train": False, "eval_interval": -1}
BEST = {**SOME, "ckpt_keep_best": 1, "ckpt_best_metric": "eval/all/avg_score"}

COURSE: tuple[Probe, ...] = (
    Probe(f"{T}seed", 1, run, quick=True),
    *on(planned_steps, {}, epochs=0, max_training_steps=1, max_training_prompts=4, train_batch_size=24),
    *on(planned_steps, {}, num_dummy_steps=1),
    *on(optimizer_steps, {}, policy_mini_batch_size=2, update_epochs_per_batch=2),
    *on(optimizer_steps, {}, policy_mini_batch_size_in_samples=2),
    *on(old_logprobs, {}, algorithm__old_logprobs="engine"),
    *on(optimizer_steps, {"update_epochs_per_batch": 2}, algorithm__max_importance_ratio=1.0),
    *on(optimizer_steps, CRITIC, critic_mini_batch_size=2, critic_mini_batch_size_in_samples=2),
    *on(course, {}, eval_before_train=False, eval_interval=2, ckpt_interval=3, hf_save_interval=2),
    *on(course, {"algorithm__use_kl_loss": True}, update_ref_every_epoch=True),
    *on(prompts, {}, max_prompt_length=1),
    *on(evaluated, {}, eval_batch_size=4),
    Probe("generator.inference_engine.logprob_parity_interval", 2, run),
)

LEARNER: tuple[Probe, ...] = (
    *on(strategy, {}, strategy="deepspeed"),
    *on(derived, {}, device="cuda"),
    *on(fused_layers, {**CUDA, "attention": "sdpa"}, use_liger_kernel=True),
    *on(derived, CUDA, bf16=False, flash_attn=False, gradient_checkpointing=False),
    *on(passes, {}, deterministic=False, compute_dtype="bfloat16", recompute_activations=True),
    *on(rounding, {"compute_dtype": "bfloat16"}, fp32_lm_head=True),
    *on(passes, {"use_sample_packing": False}, attention="eager"),
    *on(waiting_activations, {"recompute_activations": True}, offload_activations=True),
    *on(passes, {"recompute_activations": True}, gradient_checkpointing_use_reentrant=True),
    *on(passes, {}, micro_train_batch_size_per_gpu=2, micro_forward_batch_size_per_gpu=2),
    *on(passes, {}, max_tokens_per_microbatch=12, use_sample_packing=False, share_group_prompts=False),
    *on(passes, {"max_tokens_per_microbatch": 1000}, min_microbatches=2),
    Probe("trainer.policy.use_torch_compile", True, compiled_functions),
    *on(tokenizer, {}, disable_fast_tokenizer=True, tokenizer_path="{nano}/other"),
)

CHECKPOINTS: tuple[Probe, ...] = (
    *on(kept, {}, ckpt_path="elsewhere", max_ckpts_to_keep=2),
    *on(kept, SOME, ckpt_keep_every=2),
    *on(kept, {**SOME, "ckpt_best_metric": "eval/all/avg_score"}, ckpt_keep_best=2),
    *on(kept, BEST, ckpt_best_metric="eval/all/other", ckpt_best_is="min"),
    *on(verified, {}, ckpt_verify="size"),
    *on(waits, {}, async_ckpt_save=False),
    *on(start, {}, resume_mode="none", recover_mode="fault"),
    *on(start, NAMED, resume_path="out/checkpoints/global_step_2"),
    *on(start_after_a_change, {}, resume_with_changes=True),
    *on(attempts, {"recover_mode": "auto"}, recover_retries=1),
)

FILES: tuple[Probe, ...] = (
    *on(run, {}, run_path="elsewhere", export_path="elsewhere", dump_eval_results=False, recording="jsonl"),
    *on(run, {}, dump_data_batch=True, profile_steps=[1]),
    *on(run, {"profile_steps": [1]}, policy__record_memory=True),
    *on(samples, {}, samples_per_step_kept=2),
    *on(asked, IN_WANDB, project_name="other"),
    *on(run, {"run_path": None}, run_name="other"),
    *on(trackers, {}, logger="tensorboard"),
    *on(callbacks, {}, callbacks=["tests.effects.own:Heard"]),
    *on(alarms, {}, alarms=[{"metric": "eval/all/avg_score", "when": "stalls"}], default_alarms=False),
    *(Probe(T + path, value, asked, {T + at: of for at, of in where.items()}) for path, value, where in PROBED),
    *on(ray_arguments, {"placement__executor": "ray"}, log_path="elsewhere"),
    *on(placement, NO_EVALUATION, rollouts_from="elsewhere"),
)

FULLY_ASYNC: tuple[Probe, ...] = (
    *on(first_batch, {}, fully_async__enabled=True),
    *on(ahead, ASYNC, fully_async__max_staleness_steps=1, fully_async__num_parallel_generation_workers=2),
    *on(ahead, ASYNC, fully_async__queue_size=5, fully_async__stall_timeout_seconds=60.0),
    *on(interruption, ASYNC, fully_async__interrupt_generation=False),
    *on(interruption, ASYNC, fully_async__clear_kv_cache_on_weight_sync=False),
    *on(first_batch, ASYNC, fully_async__mask_older_tokens=True, fully_async__accept="tests.effects.own:every_second"),
    *on(versions_sent, ASYNC, fully_async__steps_per_sync=2),
)

FAULTS: tuple[Probe, ...] = (
    *on(stop, {}, faults__stop_before="2020-01-01T00:00"),
    *on(grace, {}, faults__grace_period_seconds=60.0),
    *on(stall, {}, faults__stall_timeout_seconds=None, faults__on_stall="stop"),
    *on(course_with_nan, {}, faults__on_non_finite="abort", faults__max_skipped_steps=1),
    *on(course_with_nan, {"faults__on_non_finite": "roll_back"}, faults__max_roll_backs=1),
)

PROBES: tuple[Probe, ...] = (*COURSE, *LEARNER, *CHECKPOINTS, *FILES, *FULLY_ASYNC, *FAULTS)

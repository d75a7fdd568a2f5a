"""Updates of the learner: a batch of short answers beside a plain loop, and single long rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_session.facts import matmul_rate
from benchmarks.gpu_session.shapes import (
    DATASHEET_FLOPS,
    dtype_of,
    finish,
    flops_as_prime_rl,
    one_row,
    peak_bytes,
    rollouts,
    settings,
    training_flops,
)
from benchmarks.gpu_session.stages import Job, Parts, Result
from skyrl.batch import TrainingBatch
from skyrl.config import SFTConfig, TrainerConfig, compose
from skyrl.config.settings.run_basics import RunBasics
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.learners.workers.objectives import CrossEntropy
from skyrl.learners.workers.roles import PolicyWorker, SFTWorker
from skyrl.training.objective import policy_objective
from skyrl.training.trainer import update
from skyrl.tree.classes import fields_of

PROFILED = 25
"""Operators that a profile names."""

PUBLISHED: Mapping[str, tuple[float, float]] = {
    "RL, one row of 16384": (11_900, 0.111),
    "RL, one row of 65536": (10_200, 0.268),
    "SFT, one row of 8192, recomputed": (26_000, 0.168),
    "SFT, one row of 16384, recomputed": (25_500, 0.237),
    "LoRA, one row of 16384": (13_300, 0.109),
}
"""Tokens per second and MFU that prime-rl publishes for Qwen3-0.6B on one H100."""

LAYOUTS: dict[str, Mapping[str, Any]] = {
    "shared prompts": {},
    "packed": {"trainer.share_group_prompts": False},
    "padded": {"trainer.use_sample_packing": False, "trainer.max_tokens_per_microbatch": -1},
}

_KEPT = {"trainer.recompute_activations": False, "trainer.max_tokens_per_microbatch": 32_768}
FASTER: dict[str, Mapping[str, Any]] = {
    "shared prompts, activations kept": _KEPT,
    "shared prompts, activations kept, layers compiled": {**_KEPT, "trainer.policy.use_torch_compile": True},
}
"""Settings for a GPU with memory to spare. On a CPU they would compile something else."""


def batches(job: Job) -> Parts:
    """One update over the batch of a GRPO step in each layout, and the same by a loop in transformers."""
    for name, more in (LAYOUTS | (FASTER if job.device == "cuda" else {})).items():
        yield name, partial(_batch, job, name, more)
    yield "plain loop", partial(_plain_loop, job)


def _batch(job: Job, name: str, more: Mapping[str, Any]) -> Result:
    rows = {"trainer.micro_train_batch_size_per_gpu": job.shape.padded_rows} if name == "padded" else {}
    batch = rollouts(job.shape)
    worker, objective = _policy(job, **more, **rows)
    flops = training_flops(job.shape, batch, shared=name.startswith("shared prompts"))
    result = _measured(job, worker, objective, batch, flops, repeats=3)
    return result | _profiled(
        job.device, lambda: asyncio.run(update(worker, batch, objective)), operators=name.startswith("shared prompts")
    )


def long_rows(job: Job) -> Parts:
    """Updates on one row, of which every token but the first is learned."""
    shape = job.shape
    for tokens in shape.rl_rows:
        yield f"RL, one row of {tokens}", partial(_row, job, tokens, "RL", recompute=True)
    for tokens in shape.sft_rows:
        yield f"SFT, one row of {tokens}, recomputed", partial(_row, job, tokens, "SFT", recompute=True)
        yield f"SFT, one row of {tokens}", partial(_row, job, tokens, "SFT", recompute=False)
    for tokens in shape.lora_rows:
        yield f"LoRA, one row of {tokens}", partial(_row, job, tokens, "LoRA", recompute=True)


def _row(job: Job, tokens: int, kind: str, *, recompute: bool) -> Result:
    shape, batch = job.shape, one_row(job.shape, tokens)
    more: dict[str, Any] = {
        "trainer.max_tokens_per_microbatch": tokens,
        "trainer.recompute_activations": recompute,
    }
    if kind == "LoRA":
        more["trainer.policy.model.lora.rank"] = 16
    worker, objective = _sft(job, **more) if kind == "SFT" else _policy(job, **more)
    result = _measured(job, worker, objective, batch, training_flops(shape, batch, shared=False), repeats=2)
    per_token = flops_as_prime_rl(shape, tokens, lora=kind == "LoRA")
    result["mfu_as_prime_rl"] = result["tokens_per_second"] * per_token / DATASHEET_FLOPS
    name = f"{kind}, one row of {tokens}" + (", recomputed" if kind == "SFT" and recompute else "")
    if name in PUBLISHED:
        result["published_tokens_per_second"], result["published_mfu"] = PUBLISHED[name]
    return result | _profiled(job.device, lambda: asyncio.run(update(worker, batch, objective)), operators=True)


def _policy(job: Job, **more: Any) -> tuple[LearningWorker, Objective]:
    trainer = _trainer(job, more)
    return PolicyWorker(trainer, 100), policy_objective(trainer.algorithm)


def _sft(job: Job, **more: Any) -> tuple[LearningWorker, Objective]:
    trainer = _trainer(job, more)
    other = {"placement", "strategy", "faults", "micro_train_batch_size_per_gpu"}
    same: dict[str, Any] = {name: getattr(trainer, name) for name in fields_of(RunBasics).keys() - other}
    policy = trainer.policy
    return SFTWorker(
        SFTConfig(model=policy.model, optimizer_config=policy.optimizer_config, **same), 100
    ), CrossEntropy()


def _trainer(job: Job, more: Mapping[str, Any]) -> TrainerConfig:
    changes = {**more, **job.changes}
    return compose([], settings(job.shape, job.folder, job.work / "unused", job.device, **changes)).config.trainer


def _measured(
    job: Job, worker: LearningWorker, objective: Objective, batch: TrainingBatch, flops: float, *, repeats: int
) -> Result:
    seconds = timed(job.device, lambda: asyncio.run(update(worker, batch, objective)), repeats)
    return rates(job.device, int(batch.lengths.sum()), flops, seconds)


def rates(device: str, tokens: int, flops: float, seconds: float) -> Result:
    """Tokens per second and MFU of work that takes `flops` operations, and the peak of memory."""
    torch_device = torch.device(device)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": flops / seconds / matmul_rate(torch_device),
        "mfu_of_datasheet": flops / seconds / DATASHEET_FLOPS,
        "peak_bytes": peak_bytes(torch_device),
    }


def timed(device: str, work: Callable[[], object], repeats: int) -> float:
    """Median of seconds, after one run that does not count."""
    work()
    torch_device, seconds = torch.device(device), []
    for _ in range(repeats):
        finish(torch_device)
        start = time.perf_counter()
        work()
        finish(torch_device)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _profiled(device: str, work: Callable[[], object], *, operators: bool) -> Result:
    """Kernels of one more run: their number, their milliseconds and the share of the time in which one ran.

    The profiler slows the host, so that the share is too small where the host is what limits.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    start = time.perf_counter()
    with profile(activities=kinds) as seen:
        work()
        finish(torch.device(device))
    seconds = time.perf_counter() - start
    result: Result = {"profiled_seconds": seconds}
    if on_gpu:
        kernels = [
            event.time_range
            for event in seen.events()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        busy = _covered([(kernel.start, kernel.end) for kernel in kernels]) / 1e6
        result |= {"kernels": len(kernels), "kernel_seconds": busy}
    if operators:
        own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        averages = [event for event in seen.key_averages() if not event.is_user_annotation]
        events = sorted(averages, key=lambda event: -float(getattr(event, own)))[:PROFILED]
        result["profile"] = [
            {"name": event.key[:80], "ms": round(getattr(event, own) / 1000, 3), "calls": event.count}
            for event in events
        ]
    return result


def _covered(ranges: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _plain_loop(job: Job) -> Result:
    """The same update as a script writes it: padded micro-batches through transformers, with the table of logits."""
    from transformers import AutoModelForCausalLM

    shape, device = job.shape, torch.device(job.device)
    loaded: Any = AutoModelForCausalLM.from_pretrained(job.folder / "model", dtype=torch.float32)
    loaded.to(device)
    if device.type == "cuda":
        loaded.gradient_checkpointing_enable()
        loaded.train()
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-6, fused=device.type == "cuda")
    batch = rollouts(shape)

    def update() -> None:
        for micro in batch.split(shape.padded_rows):
            rows = micro.to(device)
            assert rows.advantages is not None
            with torch.autocast(device.type, dtype_of(device), enabled=device.type == "cuda"):
                logits = loaded(input_ids=rows.input_ids, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), -1)
            chosen = logprobs.gather(-1, rows.input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            (-(chosen * rows.advantages[:, 1:]).sum() / int(batch.loss_mask.sum())).backward()
        torch.nn.utils.clip_grad_norm_(loaded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = timed(job.device, update, repeats=3)
    tokens, flops = int(batch.lengths.sum()), training_flops(shape, batch, shared=False)
    return rates(job.device, tokens, flops, seconds) | _profiled(job.device, update, operators=False)

"""Findings of a rehearsal that need no process: whether GPUs and memory suffice, and whether the engine supports the
model's head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl.config import SkyRLTrainConfig
    from skyrl.tools.rehearsal import Finding

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""vLLM 0.32's FlashAttention supports head sizes that are multiples of `HEAD_MULTIPLE`, up to `LARGEST_HEAD`."""


def planned_findings(run: SkyRLTrainConfig, gpus: int | None) -> Iterator[Finding]:
    """Findings on placement, memory and engine of the run as configured."""
    from skyrl.cli.plan import plan_of
    from skyrl.cli.plan_table import taken
    from skyrl.tools.rehearsal import Finding

    plan = plan_of(run)
    text = taken(plan, "machine")
    if gpus is not None and plan["gpus"] > gpus:
        yield Finding("placement", "failed", f"the run needs {text}, but --gpus is {gpus}")
    else:
        yield Finding("placement", "passed", text)
    yield from _memory(plan["memory"])
    yield from _heads(run)


def _memory(memory: dict[str, object]) -> Iterator[Finding]:
    from skyrl.config.estimates.memory_fit import written
    from skyrl.tools.rehearsal import Finding

    if memory["phases"] is None:
        yield Finding("memory", "not tried", str(memory["why"]))
    elif memory["fits"] is None:
        yield Finding("memory", "not tried", "set trainer.placement.gpu_kind")
    elif memory["fits"]:
        yield Finding("memory", "passed", f"each phase is estimated to fit {memory['gpu_kind']}")
    else:
        nearest = memory["nearest"]
        remedy = f"\nclosest change that fits: {written(nearest)}" if isinstance(nearest, dict) else ""
        yield Finding("memory", "failed", f"{memory['why']}{remedy}")


def _heads(run: SkyRLTrainConfig) -> Iterator[Finding]:
    from skyrl.cli.plan_memory import known_shape_of
    from skyrl.config.derive.engine_backends import backend_of
    from skyrl.tools.rehearsal import Finding

    engine, shape = run.generator.inference_engine, known_shape_of(run.trainer.policy.model.path or "")
    if backend_of(engine).package != "vllm" or run.trainer.device != "cuda" or shape is None:
        return
    if shape.head_size % HEAD_MULTIPLE or shape.head_size > LARGEST_HEAD:
        kernels = f"multiples of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
        text = f"vLLM's FlashAttention has no kernels for head size {shape.head_size}, only for {kernels}"
        yield Finding("engine", "failed", text)
    elif shape.heads % engine.tensor_parallel_size:
        text = f"tensor_parallel_size = {engine.tensor_parallel_size} does not divide the model's {shape.heads} heads"
        yield Finding("engine", "failed", text)

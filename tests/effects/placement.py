"""Probes of placement, of every kind of run: where processes are, and what starts them."""

from __future__ import annotations

from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import ProcessLost
from skyrl.experiments.factories import start_processes
from skyrl.planning.layout import Layout
from skyrl.processes.handles import Deadlines
from skyrl.runs import recovery
from tests.effects.models import APART, WITH_CRITIC, WITH_KL, WITH_TEACHER
from tests.effects.observables import placement, problems
from tests.effects.probe import Probe, Scene, observable

P = "trainer.placement."
RAY = {"placement.executor": "ray"}
ON_RAY = {f"{P}executor": "ray"}
ENGINES = {
    "generator.inference_engine.backend": "vllm",
    "generator.inference_engine.deterministic": False,
    "trainer.micro_train_batch_size_per_gpu": 3,
}
"""Engines of the kind that the allocation names, and micro-batches for two ranks."""


@observable("the executor of processes, and what Ray is asked for")
def processes(scene: Scene) -> object:
    options: dict[str, Any] = {}

    def start(layout: object, **arguments: Any) -> None:
        options.update({name: _relative(value) for name, value in arguments.items()}, layout=layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.processes.ray.processes.RayProcesses", start)
        started = start_processes(scene.run)
    return options or type(started).__name__


@observable("the ranks of each attempt at a run that loses one each time, and how long it waits for machines")
def lost_ranks(scene: Scene) -> object:
    attempts: list[tuple[int, float]] = []

    def start(layout: Layout, *, deadlines: Deadlines, **arguments: object) -> None:
        attempts.append((len(layout.placements_of("policy")), deadlines.room))

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()):
        patch.setattr("skyrl.processes.ray.processes.RayProcesses", start)
        patch.setattr(recovery, "PAUSE", 0.0)
        with suppress(ProcessLost):
            for attempt in recovery.attempts(scene.run):
                start_processes(attempt.run, retry=attempt.is_another_try)
                with attempt:
                    raise ProcessLost("policy-1 died", "policy-1")
    return attempts


def _relative(value: object) -> object:
    return str(value.relative_to(Path.cwd())) if isinstance(value, Path) and value.is_relative_to(Path.cwd()) else value


STARTED = {
    "ray_address": "head:6379",
    "start_timeout_seconds": 5.0,
    "call_timeout_seconds": 5.0,
    "heartbeat_timeout_seconds": 5.0,
}

WAITS: dict[str, Any] = {"faults.on_lost_rank": "wait"}
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "on_lost_rank": ("shrink", {"resume_with_changes": True}),
    "max_lost_ranks": (1, WAITS),
    "lost_rank_timeout_seconds": (5.0, WAITS),
}
"""Field of `faults` -> another value, and where it matters."""

PROBES: tuple[Probe, ...] = (
    *(
        Probe(
            f"trainer.faults.{name}",
            value,
            lost_ranks,
            {**ON_RAY, **APART, f"{P}policy_num_gpus_per_node": 2, **{f"trainer.{at}": of for at, of in where.items()}},
        )
        for name, (value, where) in LOSSES.items()
    ),
    Probe(f"{P}executor", "ray", processes),
    *(Probe(P + name, value, processes, ON_RAY) for name, value in STARTED.items()),
    Probe(f"{P}gpu_kind", "L40S", problems, {"trainer.device": "cuda", "trainer.policy.model.path": "Qwen/Qwen3-8B"}),
    Probe(f"{P}allocation", "vllm:d2|fsdp:d2", placement, ON_RAY | ENGINES),
    Probe(f"{P}colocate_all", False, placement, ON_RAY),
    Probe(f"{P}colocate_policy_ref", False, placement, {**ON_RAY, **WITH_KL, f"{P}colocate_all": False}),
    *(
        Probe(f"{P}{model}_{name}", 2, placement, {**context, **APART})
        for model, context in (("policy", {}), ("critic", WITH_CRITIC), ("ref", WITH_KL), ("teacher", WITH_TEACHER))
        for name in ("num_nodes", "num_gpus_per_node")
    ),
    *(
        probe
        for kind in ("sft", "reward_model", "preference")
        for probe in (
            Probe("placement.executor", "ray", processes, kind=kind),
            *(
                Probe(f"faults.{name}", value, lost_ranks, {"placement.num_gpus_per_node": 2, **where}, kind)
                for name, (value, where) in LOSSES.items()
            ),
            *(Probe(f"placement.{name}", value, processes, RAY, kind) for name, value in STARTED.items()),
            *(Probe(f"placement.{name}", 2, placement, kind=kind) for name in ("num_nodes", "num_gpus_per_node")),
        )
    ),
)

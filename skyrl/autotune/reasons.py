"""Reasons for the settings of a proposed layout: the memory or time that a simpler setting would take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.autotune.search import ENGINE, Changes, Proposal, recomputing
from skyrl.config.derive.sizes import models_of, trained_models
from skyrl.config.estimates.memory import ShapeOf
from skyrl.config.estimates.memory_fit import GIB, judged, with_changes
from skyrl.config.estimates.step_time import step_time
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import STRATEGIES

OFFLOAD = "deepspeed_config.zero_optimization.offload_optimizer.device"
PLAIN: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "sequence_parallel_size": 1,
    **{STRATEGIES["megatron"].degrees[name]: 1 for name in ("tensor", "pipeline", "expert")},
    "fsdp_config.fsdp_size": -1,
    "fsdp_config.cpu_offload": False,
    OFFLOAD: "none",
}
"""Setting of a model -> its simplest value, which needs no reason."""


def reasons(
    run: SkyRLTrainConfig, proposal: Proposal, shape_of_model: ShapeOf, mean_answer: float | None = None
) -> list[str]:
    """A sentence for each setting that is not the simplest: without it the run would not fit, or a step would take
    longer.
    """
    lines = []
    for begin, plainer in _plainer(run, proposal):
        changed = with_changes(run, {**proposal.changes, **plainer})
        verdict, seconds = judged(changed, shape_of_model), step_time(changed, shape_of_model, mean_answer)
        if verdict is not None and verdict.over:
            phase = verdict.over[0]
            lines.append(
                f"{begin} the {phase.name} of the {phase.role} would take {phase.bytes / GIB:.1f} GiB of a GPU"
            )
        elif verdict is not None and not verdict.fits:
            lines.append(f"{begin} an engine's cache would not hold one full-length sequence")
        elif seconds is not None and seconds.step > proposal.seconds.step * 1.005:
            lines.append(f"{begin} a step would take {seconds.step:,.0f} s")
    return lines


def _plainer(run: SkyRLTrainConfig, proposal: Proposal) -> Iterator[tuple[str, Changes]]:
    """The beginning of each reason, and the simpler setting."""
    changes = proposal.changes
    if changes.get("trainer.recompute_activations"):
        yield "recompute_activations: without it,", {"trainer.recompute_activations": False}
    own = recomputing(run, changes["trainer.strategy"], True)
    if "trainer.recompute_activations" not in own and own.items() <= changes.items():
        yield "recompute_granularity: with none,", recomputing(run, changes["trainer.strategy"], False)
    for name, plain in PLAIN.items():
        models = trained_models(run) if name == OFFLOAD else models_of(run)
        if changes.get(f"trainer.{models[0]}.{name}", plain) != plain:
            last = name.rpartition(".")[2] if name != OFFLOAD else "offload_optimizer"
            value = str(plain).lower() if isinstance(plain, bool) else plain
            yield f"{last}: with {value},", {f"trainer.{model}.{name}": plain for model in models}
    wide = changes[f"{ENGINE}tensor_parallel_size"]
    if wide > 1:
        halves = {
            f"{ENGINE}tensor_parallel_size": wide // 2,
            f"{ENGINE}num_engines": 2 * changes[f"{ENGINE}num_engines"],
        }
        yield f"engines of {wide} GPUs: with {wide // 2},", halves
    for name in ("micro_train_batch_size_per_gpu", "max_tokens_per_microbatch"):
        size = changes.get(f"trainer.{name}")
        if size is not None:
            yield f"{name}: with {2 * size},", {f"trainer.{name}": 2 * size}

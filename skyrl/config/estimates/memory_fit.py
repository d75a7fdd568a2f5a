"""Whether a run fits its kind of GPU, which phase and setting decide that, and the least costly change that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.sizes import engines_of, models_of
from skyrl.config.estimates.memory import FITS_WITHIN, Phase, ShapeOf, gpu_memory, local_shape, phases_of, serving_of
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of
from skyrl.planning.gpus import GPU_KINDS
from skyrl.tree import evolve_at
from skyrl.tree.rules import itself

GIB = 2**30
LOWEST_UTILIZATION = 0.2

Changes = Mapping[str, Any]
"""Paths -> values that make a run fit."""


@frozen(kw_only=True)
class MemoryVerdict:
    """Whether a run fits its GPUs."""

    memory: int
    """Bytes of one GPU."""

    over: tuple[Phase, ...]
    """Phases that do not fit, the fullest first."""

    cache_holds: int | None
    """Number of full-length sequences that an engine's cache holds at once; None without an engine with such a cache.
    """

    nearest: Changes | None
    """The change that makes the run fit; None if it fits already, or if none was found."""

    @property
    def fits(self) -> bool:
        """Whether every phase fits, and an engine can draw at least one answer of full length."""
        return not self.over and self.cache_holds != 0


def verdict_of(run: SkyRLTrainConfig, shape_of_model: ShapeOf = local_shape) -> MemoryVerdict | None:
    """The verdict on a resolved run; None if it names no kind of GPU, or a model's sizes are unknown."""
    verdict = judged(run, shape_of_model)
    if verdict is None or verdict.fits:
        return verdict
    return evolve(verdict, nearest=_nearest(itself(run), shape_of_model))


def judged(run: SkyRLTrainConfig, shape_of_model: ShapeOf) -> MemoryVerdict | None:
    """The verdict without a search for changes that fit; None in the same cases as `verdict_of`."""
    memory, phases = gpu_memory(run), phases_of(run, shape_of_model)
    if memory is None or phases is None or run.trainer.device != "cuda":
        return None
    over = sorted((phase for phase in phases if phase.bytes > memory * FITS_WITHIN), key=lambda phase: -phase.bytes)
    shape = shape_of_model(run.trainer.policy.model.path or "")
    serving = None if shape is None else serving_of(run, shape)
    holds = None if serving is None or serving.budget is None else serving.sequences_of_full_length
    return MemoryVerdict(memory=memory, over=tuple(over), cache_holds=holds, nearest=None)


def with_changes(run: SkyRLTrainConfig, changes: Changes) -> SkyRLTrainConfig:
    """The run with these values; values derived from the changed ones stay as they are."""
    for path, value in changes.items():
        run = evolve_at(run, path, value)
    return run


def _nearest(run: SkyRLTrainConfig, shape_of_model: ShapeOf) -> Changes | None:
    """The first cheap change that fits by itself; otherwise the least expensive change that fits, alone or combined
    with the mildest cheap changes that it needs.
    """
    singles = list(_changes(run))
    cheap = [change for change in singles if not any("placement" in path for path in change)]
    for change in cheap:
        if _fits(run, change, shape_of_model):
            return change
    least = {path: value for change in reversed(cheap) for path, value in _least(change).items()}
    for dear in (change for change in singles if change not in cheap):
        if _fits(run, dear, shape_of_model):
            return dear
        if _fits(run, {**least, **dear}, shape_of_model):
            return _softened(run, {**least, **dear}, singles, shape_of_model)
    return None


def _softened(run: SkyRLTrainConfig, changes: Changes, singles: Sequence[Changes], shape_of_model: ShapeOf) -> Changes:
    """The changes that are needed to fit, each with its mildest value."""
    kept = dict(changes)
    for path in [item for item in changes if "placement" not in item and "parallel" not in item]:
        fewer = {other: value for other, value in kept.items() if other != path}
        milder = [change[path] for change in singles if change.keys() == {path}]
        if path.endswith("num_engines"):
            continue
        if _fits(run, fewer, shape_of_model):
            kept = fewer
        else:
            fitting = (value for value in milder if _fits(run, {**fewer, path: value}, shape_of_model))
            kept[path] = next(fitting, kept[path])
    return kept


def _least(change: Changes) -> Changes:
    """The change in its strongest form: one row, half of a GPU for an engine."""
    strongest = {"gpu_memory_utilization": 0.5, "size_per_gpu": 1}
    return {
        path: next((value for end, value in strongest.items() if path.endswith(end)), original)
        for path, original in change.items()
        if "parallel" not in path and not path.endswith(("num_engines", "cpu_offload"))
    }


def _fits(run: SkyRLTrainConfig, changes: Changes, shape_of_model: ShapeOf) -> bool:
    verdict = judged(with_changes(run, changes), shape_of_model)
    return verdict is not None and verdict.fits


def _changes(run: SkyRLTrainConfig) -> Iterator[Changes]:
    """Single changes, the cheapest first."""
    trainer, engine = run.trainer, run.generator.inference_engine
    if trainer.recompute_activations is False and facts_of(trainer).recomputation is None:
        yield {"trainer.recompute_activations": True}
    if trainer.max_tokens_per_microbatch > 0:
        yield from ({"trainer.max_tokens_per_microbatch": half} for half in _halves(trainer.max_tokens_per_microbatch))
    else:
        train, forward = "micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"
        for name in (train, forward):
            yield from ({f"trainer.{name}": rows} for rows in _halves(getattr(trainer, name)))
        for halves in zip(_halves(getattr(trainer, train)), _halves(getattr(trainer, forward)), strict=False):
            yield {f"trainer.{train}": halves[0], f"trainer.{forward}": halves[1]}
    if not backend_of(engine).is_embedded:
        steps = range(round(engine.gpu_memory_utilization * 20) - 1, round(LOWEST_UTILIZATION * 20) - 1, -1)
        yield from ({"generator.inference_engine.gpu_memory_utilization": step / 20} for step in steps)
        yield from ({"generator.inference_engine.gpu_memory_utilization": step / 20} for step in (17, 18))
        yield from _wider_engines(run)
    if (facts := facts_of(trainer)).weights_on_host:
        yield {f"trainer.{model}.{name}": value for model in models_of(run) for name, value in facts.on_host.items()}
    yield from _more_gpus(run)
    for name, kind in sorted(GPU_KINDS.items(), key=lambda item: item[1].memory):
        if kind.memory > (gpu_memory(run) or 0):
            yield {"trainer.placement.gpu_kind": name}


def _wider_engines(run: SkyRLTrainConfig) -> Iterator[Changes]:
    """Fewer engines of more GPUs each."""
    engines, path = engines_of(run), "generator.inference_engine."
    if engines is None:
        return
    for times in (2, 4, 8):
        if engines.number % times == 0:
            yield {
                f"{path}tensor_parallel_size": engines.tensor * times,
                f"{path}num_engines": engines.number // times,
            }


def _more_gpus(run: SkyRLTrainConfig) -> Iterator[Changes]:
    """Multiples of the GPUs, on one machine if possible; engines that share them grow in number or width."""
    for times in (2, 4, 8, 16, 32, 64):
        changes: dict[str, Any] = {}
        for model in models_of(run):
            changes |= _grown(run, model, times)
        if not run.trainer.placement.colocate_all:
            yield changes
        for wider in (entry for entry in (1, 2, 4, 8) if entry <= times and run.trainer.placement.colocate_all):
            engine, path = run.generator.inference_engine, "generator.inference_engine."
            wide = {f"{path}tensor_parallel_size": engine.tensor_parallel_size * wider} if wider > 1 else {}
            yield {**changes, f"{path}num_engines": engine.num_engines * times // wider, **wide}


def _grown(run: SkyRLTrainConfig, model: str, times: int) -> Changes:
    """Changes that multiply the GPUs of a model by `times`."""
    placement = run.trainer.placement
    nodes, gpus = (getattr(placement, f"{model}_num_{name}") for name in ("nodes", "gpus_per_node"))
    on_a_node = min(8, gpus * times) if nodes == 1 and gpus <= 8 else gpus
    grown = {"num_gpus_per_node": (gpus, on_a_node), "num_nodes": (nodes, nodes * gpus * times // on_a_node)}
    return {f"trainer.placement.{model}_{name}": new for name, (old, new) in grown.items() if new != old}


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def described(verdict: MemoryVerdict) -> str:
    """Why the run does not fit, in one sentence."""
    if not verdict.over:
        return "the engines' cache cannot hold one full-length sequence in the memory that the weights leave"
    phase = verdict.over[0]
    part, most = max(phase.parts.items(), key=lambda item: item[1])
    return (
        f"{phase.name} of the {phase.role} takes {phase.bytes / GIB:.1f} GiB of each GPU, which has "
        f"{verdict.memory / GIB:.1f}; most of it, {most / GIB:.1f}, are {part}"
    )


def as_arguments(changes: Changes) -> str:
    """The changes as arguments of a command."""
    return " ".join(
        f"{path}={str(value).lower() if isinstance(value, bool) else value}" for path, value in changes.items()
    )

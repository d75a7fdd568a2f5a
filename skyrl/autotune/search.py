"""Layouts of a run that fit a given number of GPUs of one kind, ordered by estimated speed, the fastest first; and the
reasons for their settings: the memory or time that a simpler setting would take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import gcd
from typing import Any

from attrs import frozen

from skyrl.config.derive.sizes import GPUS_OF_A_MACHINE, models_of, trained_models
from skyrl.config.estimates.memory import Phase, ShapeOf, phases_of, shape_in
from skyrl.config.estimates.memory_fit import GIB, judged, with_changes
from skyrl.config.estimates.step_time import StepTime, step_time, training_seconds
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import STRATEGIES
from skyrl.planning.batches import uneven_mini_batch, uneven_scoring
from skyrl.planning.model_shape import ModelShape
from skyrl.planning.topology import Degrees

ENGINE = "generator.inference_engine."
PLACEMENT = "trainer.placement."
UTILIZATIONS = tuple(round(percent / 100, 2) for percent in range(90, 15, -5))
MOST_ROWS = 64
"""Largest micro-batch that is tried."""

Changes = Mapping[str, Any]


@frozen(kw_only=True)
class Proposal:
    """A layout that fits."""

    changes: Changes
    """Paths -> values that turn the run into this layout."""

    seconds: StepTime
    """Estimate of a training step."""

    fullest: Phase
    """Phase that needs the most GPU memory."""

    memory: int
    """Bytes of a GPU."""

    host: int
    """Bytes of host memory used per GPU, in the phase that uses the most."""

    @property
    def arrangement(self) -> tuple[Any, ...]:
        """Colocation, GPUs of engines and strategy of learners; only the best proposal of each is listed."""
        return (self.changes.get(f"{PLACEMENT}colocate_all"), self.engine_gpus, self.changes["trainer.strategy"])

    @property
    def engine_gpus(self) -> int:
        """GPUs of all engines together."""
        return int(self.changes[f"{ENGINE}num_engines"] * self.changes[f"{ENGINE}tensor_parallel_size"])


def proposals(
    run: SkyRLTrainConfig, gpus: int, shape_of_model: ShapeOf, mean_answer: float | None = None
) -> list[Proposal]:
    """The fastest layout of each arrangement that fits, fastest first; empty where none fits.

    `run` is resolved, has passed `check` and names a kind of GPU; `mean_answer` is the mean length of an answer in
    tokens, half of the longest by default. `check` has more rules than this search, so proposals must still pass it.
    """
    search = _Search(run=run, shapes=shape_of_model, mean=mean_answer)
    fastest: dict[tuple[Any, ...], Proposal] = {}
    for proposal in search.of(gpus):
        known = fastest.get(proposal.arrangement)
        if known is None or proposal.seconds.step < known.seconds.step:
            fastest[proposal.arrangement] = proposal
    return sorted(fastest.values(), key=lambda candidate: candidate.seconds.step)


@frozen(kw_only=True)
class _Search:
    """Searches layouts of one run: settings of the learners first, then of the engines beside them."""

    run: SkyRLTrainConfig
    shapes: ShapeOf
    mean: float | None

    def of(self, gpus: int) -> Iterator[Proposal]:
        """Every pair of learners and engines that fits on `gpus` GPUs; nothing if the model's sizes are unknown."""
        shape = shape_in(self.run, "policy", self.shapes)
        if shape is None:
            return
        for placed, of_learners, of_engines in _arrangements(self.run, gpus):
            for degrees in _degrees(self.run, shape, of_learners):
                for learners in self._learners({**placed, **degrees}, of_learners):
                    for engines in _engines(shape, of_engines):
                        proposal = self._fit_engine(learners, engines)
                        if proposal is not None:
                            yield proposal

    def _learners(self, changes: Changes, gpus: int) -> Iterator[Changes]:
        """The best micro-batches that fit with and without recomputation; if none does, with states on the host."""
        strategy = changes["trainer.strategy"]
        tried = [self._rows({**changes, **recomputing(self.run, strategy, on)}, gpus) for on in (False, True)]
        facts = STRATEGIES[strategy]
        if tried == [None, None] and facts.on_host:  # the optimizer's states and, with FSDP, the weights
            models = models_of(self.run) if facts.weights_on_host else trained_models(self.run)
            on_host = {f"trainer.{model}.{name}": value for model in models for name, value in facts.on_host.items()}
            tried = [self._rows({**changes, **recomputing(self.run, strategy, True), **on_host}, gpus)]
        yield from (fitting for fitting in tried if fitting is not None)

    def _rows(self, changes: Changes, gpus: int) -> Changes | None:
        """The changes with the largest micro-batches whose scoring and update fit. With pipeline stages, the fastest
        micro-batches that fit: many small ones keep more stages busy.
        """
        sizes = list(_micro_batches(self.run, changes, gpus))
        for number, micro in enumerate(sizes):
            verdict = judged(with_changes(self.run, {**changes, **micro}), self.shapes)
            if verdict is not None and not any(phase.name in ("scoring", "update") for phase in verdict.over):
                fitting = [{**changes, **size} for size in sizes[number:]]
                if _parts(changes)[1] == 1:
                    return fitting[0]
                return min(
                    fitting, key=lambda layout: training_seconds(with_changes(self.run, layout), self.shapes, self.mean)
                )
        return None

    def _fit_engine(self, learners: Changes, engines: Changes) -> Proposal | None:
        """The proposal with the largest share of memory for an engine that fits beside these learners; None if none
        fits.
        """
        for share in UTILIZATIONS:
            changes = {**learners, **engines, f"{ENGINE}gpu_memory_utilization": share}
            run = with_changes(self.run, changes)
            verdict = judged(run, self.shapes)
            if verdict is not None and verdict.fits:
                seconds, phases = step_time(run, self.shapes, self.mean), phases_of(run, self.shapes)
                if seconds is None:
                    return None
                assert phases is not None, "there is a verdict"
                return Proposal(
                    changes=changes,
                    seconds=seconds,
                    fullest=max(phases, key=lambda phase: phase.bytes),
                    memory=verdict.memory,
                    host=max(phase.host for phase in phases),
                )
            if verdict is not None and verdict.cache_holds == 0:
                return None  # with less memory the cache holds no more
        return None


def _arrangements(run: SkyRLTrainConfig, gpus: int) -> Iterator[tuple[Changes, int, int]]:
    """Changes, GPUs of the learners and GPUs of the engines: everything takes turns on all GPUs, or engines have a
    quarter, a half or three quarters of them, in whole machines if there are several.
    """
    yield {f"{PLACEMENT}colocate_all": True, **_machines(run, gpus)}, gpus, gpus
    unit = GPUS_OF_A_MACHINE if gpus > GPUS_OF_A_MACHINE else 1
    for engines in sorted({max(unit, gpus * quarters // 4 // unit * unit) for quarters in (1, 2, 3)}):
        if engines < gpus:
            changes = {f"{PLACEMENT}colocate_all": False, f"{PLACEMENT}colocate_policy_ref": True}
            yield {**changes, **_machines(run, gpus - engines)}, gpus - engines, engines


def _machines(run: SkyRLTrainConfig, gpus: int) -> dict[str, Any]:
    """Nodes and GPUs of each model."""
    gpus_per_node = min(gpus, GPUS_OF_A_MACHINE)
    return {
        f"{PLACEMENT}{model}_{name}": value
        for model in models_of(run)
        for name, value in (("num_nodes", gpus // gpus_per_node), ("num_gpus_per_node", gpus_per_node))
    }


def _degrees(run: SkyRLTrainConfig, shape: ModelShape, gpus: int) -> Iterator[Changes]:
    """Strategies, and ranks that share sequences or matrices: powers of two on one machine that divide the heads."""
    packs = run.trainer.use_sample_packing
    for strategy, facts in STRATEGIES.items():
        if facts.own_modules:
            yield from _degrees_of_stages(run, strategy, shape, gpus)
    for strategy, facts in STRATEGIES.items():
        if facts.own_modules or facts.same_as is not None:
            continue
        for tensor in _powers(gpus if facts.cuts_shards and not shape.experts else 1):
            for sequence in _powers(gpus // tensor if packs else 1):
                together = tensor * sequence
                divide = gpus % together == 0 and shape.heads % together == 0 and shape.key_heads % tensor == 0
                if together <= GPUS_OF_A_MACHINE and divide and _deals_out(run, gpus // together):
                    sizes = {"tensor_parallel_size": tensor, "sequence_parallel_size": sequence}
                    yield {"trainer.strategy": strategy, **_changes_of_models(run, sizes)}
        if facts.shards_parts is not None and gpus > GPUS_OF_A_MACHINE and _deals_out(run, gpus):
            yield {
                "trainer.strategy": strategy,
                **_changes_of_models(run, {"tensor_parallel_size": 1, "sequence_parallel_size": 1}),
                **_changes_of_models(run, {facts.shards_parts: GPUS_OF_A_MACHINE}),
            }


def _degrees_of_stages(run: SkyRLTrainConfig, strategy: str, shape: ModelShape, gpus: int) -> Iterator[Changes]:
    """Ranks that cut matrices and spread experts on one machine, and pipeline stages: powers of two that divide the
    model; none for a model without a converter.
    """
    if not shape.converts:
        return
    sizes = (_powers(gpus), _powers(gpus), _powers(gpus if shape.experts else 1))
    for tensor, stages, experts in product(*sizes):
        divide = shape.key_heads % tensor == 0 and shape.intermediate % tensor == 0 and shape.layers % stages == 0
        of_a_stage = gpus // stages
        spread = of_a_stage % experts == 0 and shape.experts % experts == 0
        whole = of_a_stage % tensor == 0 and gpus % stages == 0
        if whole and divide and spread and _deals_out(run, of_a_stage // tensor):
            fields = STRATEGIES[strategy].degrees
            values = {fields["tensor"]: tensor, fields["pipeline"]: stages, fields["expert"]: experts}
            whole_experts = {fields["expert_tensor"]: 1} if shape.experts else {}
            yield {"trainer.strategy": strategy, **_changes_of_models(run, {**values, **whole_experts})}


def _parts(changes: Changes) -> tuple[int, int]:
    """Number of ranks of one pipeline stage that share rows, and number of stages."""
    fields = STRATEGIES[changes["trainer.strategy"]].degrees
    degrees = Degrees(**{name: changes.get(f"trainer.policy.{path}", 1) for name, path in fields.items()})
    return degrees.inner, degrees.pipeline


def recomputing(run: SkyRLTrainConfig, strategy: str, recomputes: bool) -> Changes:
    """Changes that turn recomputation of every layer in backward on or off."""
    own = STRATEGIES[strategy].recomputation
    if own is None:
        return {"trainer.recompute_activations": recomputes}
    granularity = "full" if recomputes else "none"
    return {f"trainer.{model}.{own}.recompute_granularity": granularity for model in trained_models(run)}


def _changes_of_models(run: SkyRLTrainConfig, values: Changes) -> Changes:
    """The values for every model of the run."""
    return {f"trainer.{model}.{name}": value for model in models_of(run) for name, value in values.items()}


def _deals_out(run: SkyRLTrainConfig, ranks: int) -> bool:
    """Whether batch and mini-batches divide into equal shares for `ranks` data-parallel ranks."""
    prompts, samples = run.trainer.train_batch_size, run.generator.n_samples_per_prompt
    minis = [getattr(run.trainer, f"{model}_mini_batch_size") for model in trained_models(run)]
    return uneven_scoring(prompts, samples, ranks) is None and not any(
        uneven_mini_batch(prompts, mini, samples, ranks) for mini in minis
    )


def _micro_batches(run: SkyRLTrainConfig, changes: Changes, gpus: int) -> Iterator[Changes]:
    """Sizes of micro-batches, the largest first; in tokens if the run bounds tokens."""
    trainer, generator = run.trainer, run.generator
    if trainer.max_tokens_per_microbatch > 0:
        least = trainer.max_prompt_length + generator.sampling_params.max_generate_length
        yield from ({"trainer.max_tokens_per_microbatch": least * times} for times in (16, 8, 4, 2, 1))
        return
    sharing, stages = _parts(changes)
    minis = [getattr(trainer, f"{model}_mini_batch_size") for model in trained_models(run)]
    rows = gcd(*minis) * generator.n_samples_per_prompt // (gpus // (sharing * stages))
    for size in reversed([size for size in _powers(rows, most=MOST_ROWS) if rows % size == 0]):
        yield {"trainer.micro_train_batch_size_per_gpu": size, "trainer.micro_forward_batch_size_per_gpu": size}


def _engines(shape: ModelShape, gpus: int) -> Iterator[Changes]:
    """Engines of one, two, four or eight GPUs each, which share the heads evenly."""
    for size in _powers(gpus):
        if gpus % size == 0 and shape.heads % size == 0:
            yield {f"{ENGINE}tensor_parallel_size": size, f"{ENGINE}num_engines": gpus // size}


def _powers(number: int, most: int = GPUS_OF_A_MACHINE) -> list[int]:
    """Powers of two up to the smaller of `number` and `most`."""
    return [2**power for power in range(min(number, most).bit_length())]


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
            needed = f"{phase.bytes / GIB:.1f} GiB of a GPU"
            lines.append(f"{begin} the {phase.name} of the {phase.role} would take {needed}")
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

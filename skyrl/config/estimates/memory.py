"""Memory that each GPU of a run needs, phase by phase: the tree's settings as `skyrl.planning.memory` counts them.

The caller provides the sizes of the models; `local_shape` finds those of a folder or of a common model without network
access.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from skyrl.config.derive.engine_backends import backend_of, engine_dtype
from skyrl.config.derive.rl_models import TEACHER, gives_whole_distributions, shares_gpus
from skyrl.config.derive.sizes import (
    Model,
    degrees_of,
    engines_of,
    grid_of,
    longest_row,
    models_of,
    on_ray,
    trained_models,
    work_of,
)
from skyrl.config.settings.deepspeed import ZeroOptimizationConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import StrategyFacts, facts_of, reads
from skyrl.planning.activations import Computing, Pass, Precision
from skyrl.planning.gpus import GPU_KINDS
from skyrl.planning.known_models import known_shape
from skyrl.planning.megatron_memory import stage_memory, stage_resting
from skyrl.planning.memory import (
    Bytes,
    LearnerRank,
    MegatronSharding,
    Serving,
    ZeroSettings,
    added,
    learner_memory,
    on_host,
    resting,
    serving_memory,
    total,
)
from skyrl.planning.model_shape import ModelShape, shape_of
from skyrl.tree import get_at
from skyrl.tree.files import stored_text

ShapeOf = Callable[[str], ModelShape | None]
"""Path or hub name of a model -> its sizes; None if they are unknown."""

CONTEXT = 2**30
"""Bytes that CUDA, cuBLAS and NCCL need on a GPU per process: context, workspaces and buffers."""

ASLEEP = 2 * 2**30
"""Bytes that a sleeping vLLM engine keeps on its GPU: its context, and CUDA graphs where there are any."""

FITS_WITHIN = 0.95
"""Share of a GPU's memory that an estimate may take; the rest is left to fragmentation."""

CUT = 64 * 2**20
"""Bytes of each pack of weights sent between processes."""


@attrs.frozen(kw_only=True)
class Phase:
    """Memory of one GPU in one phase."""

    name: str
    """Name of the phase: generation, scoring, update or transfer."""

    role: str
    """The model that is active in the phase, or `engine`."""

    parts: Bytes
    """Bytes on the GPU, by part."""

    host: int = 0
    """Bytes of models that are kept in host memory during the phase."""

    settings: tuple[str, ...] = ()
    """Fields that the memory of this phase depends on, the most important first."""

    @property
    def bytes(self) -> int:
        """Bytes of all parts on the GPU."""
        return total(self.parts)


def local_shape(path: str) -> ModelShape | None:
    """Sizes from the `config.json` of a folder, or of a common model by its hub name; None for others."""
    file = Path(path).expanduser() / "config.json"
    try:
        values = json.loads(stored_text(file))
    except (OSError, ValueError):
        return known_shape(path)
    return shape_of(values) if isinstance(values, dict) else None


def phases_of(run: SkyRLTrainConfig, shape_of_model: ShapeOf = local_shape) -> tuple[Phase, ...] | None:
    """The phases of a training step, each on the GPU that needs the most memory. The tree must be resolved and have
    passed `check`.

    None if a model's sizes are unknown.
    """
    learners = _learners(run, shape_of_model)
    if learners is None:
        return None
    matrices = _output_matrices(run, shape_of_model) if gives_whole_distributions(run) else 0
    return tuple(_phases(run, learners, matrices))


def paths_of(run: SkyRLTrainConfig, model: Model) -> tuple[str, ...]:
    """Paths or hub names of the model's weights, several for several teachers; those of the policy if it has none of
    its own.
    """
    if model == TEACHER.name:
        return run.trainer.teacher.local_paths
    return (getattr(run.trainer, model).model.path or run.trainer.policy.model.path or "",)


def shape_in(run: SkyRLTrainConfig, model: Model, shape_of_model: ShapeOf) -> ModelShape | None:
    """Sizes of the model, of several teachers those of the largest one; None if those of one are unknown."""
    shapes = [shape_of_model(path) for path in paths_of(run, model)]
    known = [shape for shape in shapes if shape is not None]
    return max(known, key=lambda shape: shape.parameters) if len(known) == len(shapes) else None


def models_without_sizes(run: SkyRLTrainConfig, shape_of_model: ShapeOf = local_shape) -> tuple[str, ...]:
    """Paths of the run's models whose sizes are not known."""
    return tuple(path for path in _paths(run) if shape_of_model(path) is None)


def models_of_estimated_sizes(run: SkyRLTrainConfig, shape_of_model: ShapeOf = local_shape) -> tuple[str, ...]:
    """Paths of the run's models whose layers are others than those that are counted."""
    return tuple(path for path in _paths(run) if (shape := shape_of_model(path)) is not None and shape.is_estimated)


def models_without_packing(run: SkyRLTrainConfig, shape_of_model: ShapeOf = local_shape) -> tuple[str, ...]:
    """Paths of the run's models whose rows should be packed and cannot be."""
    paths = _paths(run) if run.trainer.use_sample_packing else ()
    return tuple(path for path in paths if (shape := shape_of_model(path)) is not None and not shape.packs)


def _paths(run: SkyRLTrainConfig) -> Iterable[str]:
    return dict.fromkeys(path for model in models_of(run) for path in paths_of(run, model))


def gpu_memory(run: SkyRLTrainConfig) -> int | None:
    """Bytes of a GPU of the kind that the configuration names; None if it names none."""
    kind = run.trainer.placement.gpu_kind
    return None if kind is None else GPU_KINDS[kind].memory


def learner_of(run: SkyRLTrainConfig, model: Model, shape: ModelShape, teacher_bytes: int = 0) -> LearnerRank:
    """One rank of a model, as the memory estimate describes it; `teacher_bytes` are those of further teachers there."""
    trainer, section = run.trainer, getattr(run.trainer, model)
    learns, zero = model in trained_models(run), section.deepspeed_config.zero_optimization
    facts, ranks, degrees = facts_of(trainer), grid_of(run, model).ranks, degrees_of(run, model)
    rank = section.model.lora.rank if learns else 0
    work = work_of(run, model)
    return LearnerRank(
        shape=shape,
        computing=Computing(
            precision=_precision(run, model),
            trains_all=not rank,
            tensor=degrees.tensor,
            on_gpu=trainer.device == "cuda",
            gpu_memory=gpu_memory(run) or 0,
        ),
        scoring=_pass(run, model, shape, trainer.micro_forward_batch_size_per_gpu),
        update=_pass(run, model, shape, trainer.micro_train_batch_size_per_gpu) if learns else None,
        shards=_shards(section, facts, ranks),
        expert_parallel=degrees.experts,
        micro_batches=work.micro_batches,
        states=0 if learns and section.optimizer_config.optimizer == "sgd" else 2,
        layer_states=1 if learns and section.optimizer_config.optimizer == "muon" else None,
        adapter_rank=rank,
        recomputes=_recomputes(run, model),
        offloads_activations=trainer.offload_activations,
        rests_on_host=facts.table == "fsdp_config" and section.fsdp_config.cpu_offload and ranks > 1,
        keeps_gathered=section.fsdp_config.reshard_after_forward is False,
        keeps_gradients=not _takes_turns(run),
        beside=teacher_bytes,
        zero=_zero(zero) if facts.table == "deepspeed_config" else None,
        megatron=_megatron(run, model) if facts.table == "megatron_config" else None,
    )


def rest_of(learner: LearnerRank) -> Bytes:
    """Bytes that a learner keeps between two phases, under any strategy."""
    return resting(learner) if learner.megatron is None else stage_resting(learner)


def serving_of(run: SkyRLTrainConfig, shape: ModelShape) -> Serving | None:
    """One GPU of an engine that the run starts, as the memory estimate describes it; None if the run starts none."""
    engines, engine = engines_of(run), run.generator.inference_engine
    if engines is None:
        return None
    memory, embedded = gpu_memory(run), backend_of(engine).is_embedded
    dtype = engine_dtype(engine, run.trainer.compute_dtype or "float32")
    budgeted = memory is not None and not embedded
    samples = run.trainer.train_batch_size * run.generator.n_samples_per_prompt
    return Serving(
        shape=shape,
        gpus=engines.tensor * engines.pipeline,
        copies=max(1, engines.tensor // max(1, shape.key_heads)),
        size=4 if dtype == "float32" else 2,
        sequences=min(engine.max_num_seqs, -(-samples // engines.number)),
        length=sum(longest_row(run)),
        step_tokens=engine.max_num_batched_tokens,
        budget=round(memory * engine.gpu_memory_utilization) if budgeted and memory else None,
    )


def _learners(run: SkyRLTrainConfig, shape_of_model: ShapeOf) -> Mapping[Model, LearnerRank] | None:
    learners = {}
    for model in models_of(run):
        shape = shape_in(run, model, shape_of_model)
        if shape is None:
            return None
        every = [sizes for path in paths_of(run, model) if (sizes := shape_of_model(path)) is not None]
        weights = sum(total(rest_of(learner_of(run, model, table))) for table in every) if len(every) > 1 else 0
        teacher_bytes = weights - total(rest_of(learner_of(run, model, shape))) if weights else 0
        learners[model] = learner_of(run, model, shape, teacher_bytes)
    return learners


def _output_matrices(run: SkyRLTrainConfig, shape_of_model: ShapeOf) -> int:
    """Bytes of the output matrices of the teachers, which the policy's ranks hold."""
    shapes = [shape for path in run.trainer.teacher.local_paths if (shape := shape_of_model(path)) is not None]
    size = 4 if run.trainer.compute_dtype == "float32" else 2
    return sum(size * shape.vocabulary * shape.hidden for shape in shapes)


def _phases(run: SkyRLTrainConfig, learners: Mapping[Model, LearnerRank], matrices: int) -> Iterator[Phase]:
    engine = serving_of(run, learners["policy"].shape)
    if engine is not None:
        yield _generation(run, engine, learners)
    for model, learner in learners.items():
        coresident = added(
            _coresident_bytes(run, model, learners, engine), {"parameters": matrices if model == "policy" else 0}
        )
        waiting = sum(total(rest_of(other)) for name, other in learners.items() if name != model)
        phases = learner_memory(learner) if learner.megatron is None else stage_memory(learner)
        for name, parts in phases.items():
            if name == "transfer" and model != "policy":
                continue
            awake = _awake(run, engine) if name == "transfer" else {}
            parts = _resident_bytes(run, learner, name, added(parts, coresident, awake))
            host = on_host(learner) + (waiting + _resting_teachers(learner) if _takes_turns(run) else 0)
            yield Phase(name=name, role=model, parts=parts, host=host, settings=_settings(run, model, name, parts))


def _generation(run: SkyRLTrainConfig, engine: Serving, learners: Mapping[Model, LearnerRank]) -> Phase:
    own = serving_memory(engine)
    shares = run.trainer.placement.colocate_all and on_ray(run)
    rests = [rest_of(item) for item in learners.values()]
    coresident = [] if shares or on_ray(run) else rests
    contexts = CONTEXT * ((len(rests) if shares else 0) + 1) if run.trainer.device == "cuda" else 0
    return Phase(
        name="generation",
        role="engine",
        parts=added(own, {"overhead": contexts}, *coresident),
        host=sum(map(total, rests)) if shares else 0,
        settings=("generator.inference_engine.gpu_memory_utilization", "generator.inference_engine.max_num_seqs")
        if engine.budget is not None
        else ("generator.inference_engine.max_num_seqs", "generator.sampling_params.max_generate_length"),
    )


def _coresident_bytes(
    run: SkyRLTrainConfig, model: Model, learners: Mapping[Model, LearnerRank], engine: Serving | None
) -> Bytes:
    """Bytes on the same GPU while a model works: contexts of processes, an engine that sleeps or that is embedded."""
    parts: list[Bytes] = []
    placement = run.trainer.placement
    if not on_ray(run) and not _takes_turns(run):
        parts += [rest_of(other) for name, other in learners.items() if name != model]
    if engine is not None and not on_ray(run):
        parts.append({"cache": 0, "parameters": engine.weights})
    if run.trainer.device == "cuda":
        shared = placement.colocate_all or placement.colocate_policy_ref
        processes = len(learners) if on_ray(run) and shared else 1
        sleeping = ASLEEP if engine is not None and on_ray(run) and placement.colocate_all else 0
        parts.append({"overhead": CONTEXT * processes + sleeping})
    return added(*parts)


def _awake(run: SkyRLTrainConfig, engine: Serving | None) -> Bytes:
    """Bytes of the engine on the same GPU during a weight transfer, when it is awake and holds its cache."""
    if engine is None or not (on_ray(run) and run.trainer.placement.colocate_all):
        return {}
    packs = round(run.generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB * 1e9)
    packs = packs if run.trainer.device == "cuda" else CUT
    return {"parameters": engine.weights, "cache": max(0, engine.cache), "transfer": packs}


def _resident_bytes(run: SkyRLTrainConfig, learner: LearnerRank, name: str, parts: Bytes) -> Bytes:
    """Bytes on the GPU, without state kept on the host because models take turns or because the configuration offloads
    it.
    """
    resident = dict(parts)
    state = rest_of(learner)
    if learner.rests_on_host:
        for part, count in state.items():
            resident[part] -= count
    if _takes_turns(run):
        resident["parameters"] -= _resting_teachers(learner)
    zero = learner.zero
    if zero is not None and (zero.offloads_optimizer or (_takes_turns(run) and name != "update")):
        resident["optimizer"] = max(0, resident.get("optimizer", 0) - state.get("optimizer", 0))
    if zero is None and not learner.rests_on_host and _takes_turns(run) and name != "update":
        resident["optimizer"] = max(0, resident.get("optimizer", 0) - state.get("optimizer", 0))
    if zero is not None and zero.stage == 3 and zero.offloads_parameters:
        resident["parameters"] -= state["parameters"]
    return resident


def _resting_teachers(learner: LearnerRank) -> int:
    """Bytes of further teachers that can leave the GPU while one of them scores."""
    return 0 if learner.rests_on_host or learner.zero is not None else learner.beside


def _settings(run: SkyRLTrainConfig, model: Model, name: str, parts: Bytes) -> tuple[str, ...]:
    """Fields that the largest part of this phase depends on; those that should be changed first come first."""
    gpus = f"trainer.placement.{model}_num_gpus_per_node"
    largest = max(parts, key=lambda part: parts[part])
    if name == "transfer" and run.trainer.placement.colocate_all:
        return ("generator.inference_engine.gpu_memory_utilization", gpus)
    if largest not in ("activations", "logits"):
        return (gpus, f"trainer.{model}.model.path")
    rows = "micro_train_batch_size_per_gpu" if name == "update" else "micro_forward_batch_size_per_gpu"
    own = facts_of(run.trainer).recomputation
    field = "trainer.recompute_activations" if own is None else f"trainer.{model}.{own}"
    recomputing = (field,) if name == "update" and largest == "activations" else ()
    bound = "max_tokens_per_microbatch" if run.trainer.max_tokens_per_microbatch > 0 else rows
    return (f"trainer.{bound}", *recomputing, gpus)


def _takes_turns(run: SkyRLTrainConfig) -> bool:
    """Whether models are in host memory while others use the same GPUs."""
    return run.trainer.device == "cuda" and shares_gpus(run)


def _precision(run: SkyRLTrainConfig, model: Model) -> Precision:
    """The type that a model is computed in; float16 takes as many bytes as bfloat16."""
    mixed = getattr(run.trainer, model).fsdp_config.mixed_precision if reads(run.trainer, "fsdp_config") else None
    computed = mixed.param_dtype if mixed else run.trainer.compute_dtype
    return "float32" if computed in (None, "float32", "fp32") else "bfloat16"


def _pass(run: SkyRLTrainConfig, model: Model, shape: ModelShape, rows: int) -> Pass:
    """The largest micro-batch of a rank: all of its rows have the maximum length."""
    trainer = run.trainer
    prompt, answer = longest_row(run)
    packs, shares = trainer.use_sample_packing and shape.packs, trainer.share_group_prompts and shape.shares_prompts
    shares = shares and (trainer.attention == "sdpa" or facts_of(trainer).own_modules)
    degrees = degrees_of(run, model)
    by_tokens = trainer.max_tokens_per_microbatch > 0
    if by_tokens:
        rows = max(1, trainer.max_tokens_per_microbatch // (prompt + answer))
    return Pass(
        rows=rows,
        prompt=prompt,
        answer=answer,
        packed=packs,
        shares_prompts=shares and not by_tokens,
        samples=run.generator.n_samples_per_prompt,
        sharing=degrees.sequence * degrees.context if packs else 1,
    )


def _shards(section: Any, facts: StrategyFacts, ranks: int) -> int:
    """Number of ranks that share one copy of the weights."""
    size = -1 if facts.shards_parts is None else int(get_at(section, facts.shards_parts))
    return ranks if size == -1 else size


def _recomputes(run: SkyRLTrainConfig, model: Model) -> bool:
    """Whether each layer is recomputed in backward. Megatron has its own settings for that."""
    own = facts_of(run.trainer).recomputation
    if own is None:
        return bool(run.trainer.recompute_activations)
    return bool(get_at(getattr(run.trainer, model), own).get("recompute_granularity") == "full")


def _megatron(run: SkyRLTrainConfig, model: Model) -> MegatronSharding:
    section, degrees = getattr(run.trainer, model), degrees_of(run, model)
    ranks = grid_of(run, model).ranks  # fewer than the degrees take: another check reports that
    config, learns = section.megatron_config, model in trained_models(run)
    distributes = learns and section.optimizer_config.optimizer == "adamw"
    in_float = config.ddp_config.grad_reduce_in_fp32 or run.trainer.compute_dtype == "float32"
    of_a_stage = ranks // degrees.pipeline
    return MegatronSharding(
        stages=degrees.pipeline,
        sharing_states=max(1, of_a_stage // degrees.tensor) if distributes else 1,
        sharing_expert_states=max(1, of_a_stage // degrees.experts) if distributes else 1,
        gradient_size=4 if in_float else 2,
        cuts_tokens=bool(config.transformer_config_kwargs.get("sequence_parallel", degrees.tensor > 1)),
    )


def _zero(zero: ZeroOptimizationConfig) -> ZeroSettings:
    defaults: dict[str, Any] = {
        "bucket": zero.reduce_bucket_size,
        "live": zero.stage3_max_live_parameters,
        "persistent": zero.stage3_param_persistence_threshold,
        "prefetch": zero.stage3_prefetch_bucket_size,
    }
    return ZeroSettings(
        stage=zero.stage,
        overlaps=zero.overlap_comm,
        offloads_optimizer=zero.offload_optimizer.device != "none" and zero.stage > 0,
        offloads_parameters=zero.offload_param.device != "none",
        **{name: value for name, value in defaults.items() if value != "auto"},
    )

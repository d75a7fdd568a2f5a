"""Which process computes on which GPU, how much work it does and the memory that it needs, without starting anything.

`skyrl plan` prints it, and reports draw it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from skyrl.config.derive.sizes import (
    Model,
    data_parallel_of,
    degrees_of,
    engines_of,
    grid_of,
    on_ray,
    sizes_of,
    work_of,
)
from skyrl.config.estimates.memory import (
    FITS_WITHIN,
    local_shape,
    models_of_estimated_sizes,
    models_without_packing,
    models_without_sizes,
    phases_of,
)
from skyrl.config.estimates.memory_fit import described, verdict_of
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import SkyRLError, UserError
from skyrl.planning.layout import ClusterNode, NoRoom, assign, counted, layout, on_machines
from skyrl.planning.model_shape import ModelShape

Plan = Mapping[str, Any]
"""The plan as `skyrl plan --json` prints it."""


def placement_text(plan: Plan, node: str = "node") -> str:
    """The GPUs of a run and their machines; on a CPU its slots, or its only process."""
    nodes = counted(plan["nodes"], node)
    if plan["gpus"]:
        return f"{counted(plan['gpus'], 'GPU')} on {nodes} of {plan['gpus_per_node']}"
    if plan["executor"] == "in_process":
        return "one process on a CPU"
    return f"{counted(plan['slots'], 'slot')} on {nodes}"


def plan_of(run: SkyRLTrainConfig, gpus_per_node: int | None = None) -> Plan:
    """The plan of a resolved tree that has passed `check`, on the fewest machines of one size that hold it.

    A slot is a GPU, or a place for one process on a CPU. Raises `UserError` if a machine of `gpus_per_node` GPUs is too
    small.
    """
    sizes = sizes_of(run, gpus_per_node)
    laid = layout(sizes)
    on_cuda = run.trainer.device == "cuda"
    usual = sizes.gpus_per_node if on_cuda and on_ray(run) else 1
    machine = gpus_per_node or max(usual, *(pool.gpus_per_node for pool in laid.pools))
    try:
        machines = assign(
            laid, [ClusterNode(id=str(number), gpus=machine) for number in range(sum(p.nodes for p in laid.pools))]
        )
    except NoRoom as error:
        message = f"{error.pool.name} needs {error.pool.gpus_per_node} on one node, but --gpus-per-node is {machine}"
        raise UserError(message) from None
    locations = on_machines(laid, machines)
    prompts, samples = run.trainer.train_batch_size, run.generator.n_samples_per_prompt
    engines, sizes_of_engines = engines_of(run), ("number", "gpus", "tensor", "pipeline", "data")
    placements = [
        {
            "role": placed.role,
            "rank": placed.rank,
            "pool": placed.pool,
            "places": [[int(node), gpu] for node, gpu in locations[placed]],
        }
        for placed in laid.placements
    ]
    return {
        "executor": "ray" if on_ray(run) else "in_process",
        "device": run.trainer.device,
        "gpus": laid.gpus if on_cuda else 0,
        "slots": laid.gpus,
        "nodes": len({node for nodes in machines.values() for node in nodes}),
        "gpus_per_node": machine if on_cuda else 0,
        "slots_per_node": machine,
        "actors": len(placements) if on_ray(run) else 0,
        "batch": {"prompts": prompts, "samples_per_prompt": samples, "samples": prompts * samples},
        "pools": [
            {
                "name": pool.name,
                "nodes": [int(node) for node in machines[pool.name]],
                "gpus_per_node": pool.gpus_per_node,
                "share": laid.share(pool.name),
            }
            for pool in laid.pools
        ],
        "models": [_model(run, model) for model in sizes.models],
        "engines": None if engines is None else {name: getattr(engines, name) for name in sizes_of_engines},
        "seats": placements,
        "memory": memory_of(run),
    }


def _model(run: SkyRLTrainConfig, model: Model) -> dict[str, Any]:
    """The sizes of a model, and the work of one of its ranks in one training step."""
    trainer, work, degrees = run.trainer, work_of(run, model), degrees_of(run, model)
    dimensions = ("pipeline", "context", "sequence", "tensor", "expert")
    tokens = trainer.max_tokens_per_microbatch if trainer.max_tokens_per_microbatch > 0 else None
    # Null for passes that are bounded by tokens: their number depends on the answers.
    unknown = ("micro_batches", "gradient_accumulation", "scoring_micro_batches", "micro_batch_size")
    return {
        "role": model,
        "ranks": grid_of(run, model).ranks,
        "data_parallel": data_parallel_of(run, model),
        "model_parallel": degrees.replica,
        **{f"{name}_parallel": getattr(degrees, name) for name in dimensions},
        **attrs.asdict(work),
        "gradient_accumulation": work.micro_batches,
        "micro_batch_size": trainer.micro_train_batch_size_per_gpu if work.optimizer_steps else 0,
        "scoring_micro_batch_size": trainer.micro_forward_batch_size_per_gpu,
        **(dict.fromkeys((*unknown, "scoring_micro_batch_size")) if tokens else {}),
        "tokens_per_micro_batch": tokens,
    }


def plan_in(folder: Path) -> Plan | None:
    """The plan of the run; None if the run has no engines, or if this version cannot read its configuration."""
    from skyrl.config.loading.kinds import samples_rollouts
    from skyrl.runs.stored_runs import started_in, stored_run

    try:
        run = stored_run(folder)
    except SkyRLError:
        return None  # the report itself says what the folder lacks
    if not samples_rollouts(run):
        return None
    with chdir(started_in(folder, run)):  # where the models lie whose sizes the plan needs
        return plan_of(run)


def memory_of(run: SkyRLTrainConfig) -> dict[str, Any]:
    """The estimate as `skyrl plan --json` prints it; all sizes in bytes."""
    phases = phases_of(run, known_shape_of)
    if phases is None:
        unknown = ", ".join(models_without_sizes(run, known_shape_of))
        reason = f"the sizes of {unknown} are unknown: use a folder with its config.json, or download it"
        return {"phases": None, "why": reason}
    verdict = verdict_of(run, known_shape_of)
    return {
        "phases": [
            {
                "name": phase.name,
                "role": phase.role,
                "bytes": phase.bytes,
                "parts": dict(phase.parts),
                "host": phase.host,
                "settings": list(phase.settings),
            }
            for phase in phases
        ],
        "estimated": list(models_of_estimated_sizes(run, known_shape_of)),
        "unpacked": list(models_without_packing(run, known_shape_of)),
        "gpu_kind": run.trainer.placement.gpu_kind,
        "gpu_bytes": None if verdict is None else verdict.memory,
        "usable_bytes": None if verdict is None else round(verdict.memory * FITS_WITHIN),
        "fits": None if verdict is None else verdict.fits,
        "sequences_in_cache": None if verdict is None else verdict.cache_holds,
        "why": None if verdict is None or verdict.fits else described(verdict),
        "binding": None if verdict is None or not verdict.over else list(verdict.over[0].settings),
        "nearest": None if verdict is None or verdict.nearest is None else dict(verdict.nearest),
    }


def known_shape_of(path: str) -> ModelShape | None:
    """Sizes of a model from its folder, from the table of known models, or from a copy in the hub's cache. Layers that
    are not those of a Llama or Mixtral are counted and tried, if transformers is installed.
    """
    from skyrl.hub import HUB_NAME, cached_folder

    folder = path if Path(path).expanduser().is_dir() else None
    if folder is None and local_shape(path) is None and HUB_NAME.fullmatch(path):
        cached = cached_folder(path)
        folder = None if cached is None else str(cached)
    shape = local_shape(folder or path)
    return shape if folder is None or (shape and not shape.is_estimated) else _counted(Path(folder).resolve()) or shape


@cache
def _counted(folder: Path) -> ModelShape | None:
    """The model's weights as its modules have them, and what its rows can do; None if that cannot be found out."""
    try:
        from skyrl.learners.row_support import row_support
        from skyrl.models.files.loading import load_config
        from skyrl.models.files.meta_model import counted_shape
    except ImportError:
        return None
    try:
        config = load_config(str(folder), {})
        rows = row_support(config, "sdpa", pack=True, share_prompts=True)
        return attrs.evolve(counted_shape(config), packs=rows.pack, shares_prompts=rows.share_prompts)
    except Exception:  # noqa: BLE001 - whatever transformers raises: the sizes are estimated or unknown
        return None

"""The memory part of a plan: bytes on one GPU in each phase, whether they fit, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from skyrl.config import SkyRLTrainConfig
    from skyrl.planning.model_shape import ModelShape

GIB = 2**30
MIB = 2**20


def memory_of(run: SkyRLTrainConfig) -> dict[str, Any]:
    """The estimate as `skyrl plan --json` prints it; all sizes in bytes."""
    from skyrl.config.estimates.memory import (
        FITS_WITHIN,
        models_of_estimated_sizes,
        models_without_packing,
        models_without_sizes,
        phases_of,
    )
    from skyrl.config.estimates.memory_fit import described, verdict_of

    phases = phases_of(run, known_shape_of)
    if phases is None:
        unknown = ", ".join(models_without_sizes(run, known_shape_of))
        why = f"the sizes of {unknown} are unknown: use a folder with its config.json, or download it"
        return {"phases": None, "why": why}
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
    from skyrl.config.estimates.memory import local_shape
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


def memory_lines(plan: Mapping[str, Any]) -> list[str]:
    """The estimate as text: a row for each phase, then the verdict."""
    memory = plan["memory"]
    if memory["phases"] is None:
        return ["", f"Memory is not estimated: {memory['why']}"]
    largest = max(phase["bytes"] for phase in memory["phases"])
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    on_cuda = plan["device"] == "cuda"
    rows = _rows(memory["phases"], unit, f"{name} per {'GPU' if on_cuda else 'process'}")
    estimated = ", ".join(memory["estimated"])
    guessed = [f"{estimated}: layers of a kind that is not counted; taken for those of a Llama or Mixtral."] * bool(
        estimated
    )
    unpacked = [f"{path}: packed rows would see each other, so rows are padded." for path in memory["unpacked"]]
    return ["", *rows, *guessed, *unpacked, *(_verdict(memory) if on_cuda else [])]


def _rows(phases: Sequence[Mapping[str, Any]], unit: int, title: str) -> list[str]:
    from skyrl.planning.memory import PARTS

    parts = [part for part in PARTS if any(phase["parts"].get(part) for phase in phases)]
    head = [title, "model", "total", *parts, "on the host"]
    rows = [
        [
            phase["name"],
            phase["role"],
            *(f"{size / unit:.1f}" for size in (phase["bytes"], *(phase["parts"].get(part, 0) for part in parts))),
            f"{phase['host'] / unit:.1f}",
        ]
        for phase in phases
    ]
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _verdict(memory: Mapping[str, Any]) -> list[str]:
    from skyrl.config.estimates.memory_fit import written

    kind = memory["gpu_kind"]
    if memory["fits"] is None:
        return [] if kind else ["Set trainer.placement.gpu_kind to see whether it fits."]
    usable, held = memory["usable_bytes"] / GIB, memory["sequences_in_cache"]
    cache = "" if held is None else f" An engine's cache holds {held} full-length sequences at once."
    if memory["fits"]:
        return [f"It fits {kind}, of which {usable:.1f} GiB may be used.{cache}"]
    lines = [f"It does not fit {kind}, of which {usable:.1f} GiB may be used: {memory['why']}."]
    if memory["binding"]:
        lines.append(f"Deciding settings: {', '.join(memory['binding'])}.")
    nearest = memory["nearest"]
    return [
        *lines,
        f"Closest change that fits: {written(nearest)}"
        if nearest
        else "No change of one or two settings makes it fit.",
    ]

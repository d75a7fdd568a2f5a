"""The memory part of a plan: bytes on one GPU in each phase, whether they fit, and what would fit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from skyrl.config import SkyRLTrainConfig
    from skyrl.planning.model_shape import ModelShape


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

"""Checks of memory: models that do not fit the kind of GPU that the configuration names."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem


def run_fits_gpu_memory(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The run fits its kind of GPU by an estimate that counts tensors; allocators differ, so it is only a warning."""
    if (kind := run.trainer.placement.gpu_kind) is None:
        return
    from skyrl.config.estimates.memory_fit import (  # slow to import, and most runs name no kind
        as_arguments,
        described,
        verdict_of,
    )

    verdict = verdict_of(run)
    if verdict is None or verdict.fits:
        return
    settings = verdict.over[0].settings if verdict.over else ("generator.inference_engine.gpu_memory_utilization",)
    hint = f"set {as_arguments(verdict.nearest)}" if verdict.nearest else "use a smaller model or shorter answers"
    yield Problem(
        path=settings[0],
        message=f"does not fit {kind}: {described(verdict)}",
        hint=f"{hint}; `skyrl plan` prints every phase",
        severity="warning",
    )

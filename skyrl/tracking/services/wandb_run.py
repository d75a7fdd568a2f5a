"""Weights & Biases: one run, online or in the run's folder for `wandb sync`."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from typing import Any, Self

import attrs

from skyrl.tracking.services.run_files import shown_configuration
from skyrl.tracking.services.service import Known, Service, ServiceRun, ServiceTable, closed, opened, resumable

INIT_SECONDS = 20.0
"""Deadline of a start in seconds; an attempt that takes longer fails and is repeated later."""


class WandbRun(Service):
    """One run in W&B, which accepts only increasing steps: delivered steps cannot be changed."""

    def __init__(self, run: ServiceRun, known: Known) -> None:
        """Raises what `wandb.init` raises, such as `CommError` without a network."""
        import wandb

        shared, own = run.settings, run.settings.wandb
        self._is_offline = (own.mode or os.environ.get("WANDB_MODE")) == "offline"
        known = resumable(known, run.first_step) if self._is_offline else known
        self._run = wandb.init(
            entity=own.entity,
            project=re.sub(r"[/\\#?%:]", "_", run.project)[:128],  # what W&B allows in project names
            name=run.name,
            id=own.id or known.id or secrets.token_hex(4),
            resume="allow",
            mode=own.mode,
            notes=shared.notes,
            tags=shared.tags or None,
            group=shared.group,
            job_type=shared.job_type,
            dir=str(run.folder),
            settings=_settings(wandb, own.base_url, shared.finish_seconds),
        )
        known = attrs.evolve(known, id=self._run.id)
        if self._is_offline:
            self.known = opened(known, str(self._run.settings.sync_dir))
        else:
            self.known = attrs.evolve(known, step=self._run.step - 1)  # the last step that the server has
        self._last = self.known.step

    @classmethod
    def of_run(cls, run: ServiceRun, known: Known) -> Self:
        return cls(run, known)

    def describe(self, stored: Mapping[str, Any]) -> None:
        self._run.config.update(shown_configuration(stored), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
        self._last = step

    def table(self, table: ServiceTable) -> None:
        import wandb

        rows = wandb.Table(columns=list(table.columns), data=[[*map(_cell, row)] for row in table.rows])
        self._run.log({table.name: rows}, step=max(table.step, self._last))

    def close(self) -> None:
        self._run.finish()
        if self._is_offline:
            self.known = closed(self.known)


def _settings(wandb: Any, base_url: str | None, finish_seconds: float) -> Any:
    """Settings that collect nothing about the machine, the code or the terminal, only configuration and metrics."""
    address = {"base_url": base_url} if base_url else {}
    return wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=finish_seconds,
        init_timeout=INIT_SECONDS,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        **address,
    )


def _cell(value: object) -> object:
    """The value as a cell of a W&B table: numbers and None are kept, everything else becomes text."""
    return value if isinstance(value, int | float) or value is None else str(value)

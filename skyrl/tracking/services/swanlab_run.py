"""SwanLab: one run, online or in the run's folder for `swanlab sync`."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from skyrl.tracking.services.run_files import shown_configuration
from skyrl.tracking.services.service import Known, Service, ServiceRun, ServiceTable, closed, opened, resumable


class SwanLabRun(Service):
    """One run in SwanLab. Delivered steps cannot be changed there."""

    def __init__(self, run: ServiceRun, known: Known) -> None:
        """Raises what `swanlab.init` raises, such as an authentication error."""
        import swanlab

        shared, own = run.settings, run.settings.swanlab
        mode = own.mode or os.environ.get("SWANLAB_MODE") or "online"
        self._is_offline = mode == "offline"
        known = resumable(known, run.first_step if self._is_offline else None)  # online, it skips steps it has
        known = attrs.evolve(known, id=own.id or known.id or secrets.token_hex(8))
        folder = Path(own.path or run.folder / "swanlog").expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._swanlab = swanlab
        # SwanLab collects nothing about the machine, the code or the terminal, only configuration and metrics.
        kinds = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")
        self._run = swanlab.init(
            workspace=own.workspace,
            project=re.sub(r"[^0-9a-zA-Z_\-+.]", "_", run.project)[:100],  # what SwanLab allows
            name=run.name,
            id=known.id,
            resume="allow",
            mode=mode,
            description=shared.notes,
            tags=list(shared.tags) or None,
            group=shared.group,
            job_type=shared.job_type,
            log_dir=str(folder),
            settings=swanlab.Settings(
                interactive=False, probe=dict.fromkeys(kinds, False), terminal={"proxy_type": "none"}
            ),
        )
        self.known = opened(known, str(self._run.dir))

    @classmethod
    def of_run(cls, run: ServiceRun, known: Known) -> Self:
        return cls(run, known)

    def describe(self, stored: Mapping[str, Any]) -> None:
        self._run.config.update(shown_configuration(stored))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, table: ServiceTable) -> None:
        rows = self._swanlab.echarts.Table().add(list(table.columns), [[*map(str, row)] for row in table.rows])
        self._run.log({table.name: rows}, step=table.step)

    def close(self) -> None:
        self._run.finish()
        self.known = closed(self.known)

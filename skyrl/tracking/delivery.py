"""From a run's folder to a tracking service: each step once, from the last one that the service has."""

from __future__ import annotations

import math
from importlib import import_module

import attrs

from skyrl.config.trackers import TRACKERS
from skyrl.tracking.run_files import GrowingLines, SampleTables, evaluation_tables, stored_configuration
from skyrl.tracking.service import Known, Service, ServiceRun


class Delivery:
    """Feeds one service from `metrics.jsonl` and what lies beside it."""

    def __init__(self, run: ServiceRun) -> None:
        self._run = run
        self._metrics = GrowingLines(run.folder / "metrics.jsonl")
        self._samples = SampleTables(run.folder / "trajectories.jsonl", run.settings.sample_rows)
        self._seen = -1  # last step in the file
        self._service = self._open()
        self._shown = self._service.known.step  # tables up to this step are delivered

    def deliver(self, *, at_end: bool = False) -> None:
        """Deliver what was written since the last call; `at_end`: what comes from the run is complete."""
        for record in self._metrics.new():
            step = int(record.pop("step"))
            self._deliver_step(step, record)
            self._seen = step
        if at_end:
            self._show_samples(math.inf)

    def close(self) -> None:
        """Everything is in the service when this returns."""
        self._service.close()
        self._keep(self._service.known)

    def _open(self) -> Service:
        run, known = self._run, Known.read(self._run.state_file)
        module, _, name = TRACKERS[run.service].made_by.partition(":")
        service: Service = getattr(import_module(module), name).of_run(run, known)
        self._keep(service.known)
        service.describe(stored_configuration(run.folder))
        if run.first_step is not None and run.first_step < service.known.step:
            service.rewind(run.first_step)
        return service

    def _show_samples(self, before: float) -> None:
        for table in self._samples.before(before):
            if table.step > self._shown:
                self._service.table(table)

    def _deliver_step(self, step: int, metrics: dict[str, float]) -> None:
        """A step that the service has is left out; where the run went back, what followed is replaced if it can be."""
        service = self._service
        self._show_samples(step)
        if step <= service.known.step and not (step <= self._seen and service.rewind(step - 1)):
            return
        service.log(step, metrics)
        for table in evaluation_tables(self._run.evaluations, step, self._run.settings.sample_rows):
            service.table(table)
        service.known = attrs.evolve(service.known, step=step)
        self._keep(service.known)

    def _keep(self, known: Known) -> None:
        known.write(self._run.state_file)

"""Delivers a run's folder to a tracking service: each step once, starting after the last one that the service has."""

from __future__ import annotations

import math

import attrs

from skyrl.config.foundation.import_paths import built_in
from skyrl.config.settings.trackers import TRACKERS
from skyrl.tracking.services.run_files import GrowingLines, SampleTables, evaluation_tables, stored_configuration
from skyrl.tracking.services.service import Known, Service, ServiceRun


class Delivery:
    """Feeds one service from `metrics.jsonl` and the files next to it."""

    def __init__(self, run: ServiceRun) -> None:
        self._run = run
        self._metrics = GrowingLines(run.folder / "metrics.jsonl")
        self._samples = SampleTables(run.folder / "trajectories.jsonl", run.settings.sample_rows)
        self._seen: dict[int, int] = {}  # step -> hash of its record in the file
        self._service = self._open()
        self._shown = self._service.known.step  # tables up to this step are delivered

    def deliver(self, *, at_end: bool = False) -> None:
        """Deliver what was written since the last call; `at_end`: the run has ended and its files are complete."""
        for record in self._metrics.new():
            step, mark = int(record.pop("step")), hash(frozenset(record.items()))
            if self._seen.get(step) != mark:  # an equal record is from a file that was replaced and is read again
                self._deliver_step(step, record, is_changed=step in self._seen)
                self._seen[step] = mark
        if at_end:
            self._show_samples(math.inf)

    def close(self) -> None:
        """Close the service and store its progress; everything is in the service when this returns."""
        self._service.close()
        self._keep(self._service.known)

    def _open(self) -> Service:
        run, known = self._run, Known.read(self._run.state_file)
        service: Service = built_in(TRACKERS[run.service].made_by).of_run(run, known)
        first, last = run.first_step, service.known.step
        if first is not None and first < last and not service.rewind(first):
            service.known = attrs.evolve(service.known, lost=(*service.known.lost, f"{first + 1}-{last}"))
        self._keep(service.known)
        lost = {"steps_of_killed_sessions": service.known.lost} if service.known.lost else {}
        service.describe(stored_configuration(run.folder) | lost)
        return service

    def _show_samples(self, before: float) -> None:
        for table in self._samples.before(before):
            if table.step > self._shown:
                self._service.table(table)
                self._shown = table.step

    def _deliver_step(self, step: int, metrics: dict[str, float], *, is_changed: bool) -> None:
        """Deliver a step unless the service has it. If the run went back, replace the later steps if the service can.

        `is_changed`: the file had a different record of the step before.
        """
        service = self._service
        if is_changed and service.rewind(step - 1):
            self._seen = {each: mark for each, mark in self._seen.items() if each < step}
            self._shown = min(self._shown, step - 1)
        self._show_samples(step)
        if step <= service.known.step:
            return
        service.log(step, metrics)
        for table in evaluation_tables(self._run.evaluations, step, self._run.settings.sample_rows):
            service.table(table)
        service.known = attrs.evolve(service.known, step=step)
        self._keep(service.known)

    def _keep(self, known: Known) -> None:
        known.write(self._run.state_file)

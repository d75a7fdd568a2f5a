"""Probes of the trainer's own fields, of `trainer.fully_async` and of `trainer.faults`."""

from __future__ import annotations

from tests.effects.observables import planned_steps, run
from tests.effects.probe import Probe

T = "trainer."

PROBES: tuple[Probe, ...] = (
    Probe(f"{T}epochs", 0, planned_steps),
    Probe(f"{T}max_training_steps", 3, planned_steps),
    Probe(f"{T}seed", 1, run, quick=True),
)

"""The memory that a plan promises is the memory that a learner takes."""

from __future__ import annotations

import pytest

from benchmarks.memory import SETTINGS
from benchmarks.memory_peaks import PHASES, estimated, measured
from skyrl.algorithms import linear_logprobs
from skyrl.learners.fsdp2 import IN_FLIGHT_BYTES
from skyrl.planning import activations, memory
from tests.long_cases import long_except

WITHIN = 0.15


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(SETTINGS, "3M, recomputed"))
def test_each_phase_takes_what_was_estimated(name: str) -> None:
    peaks, guesses = measured(SETTINGS[name]), estimated(SETTINGS[name])
    off = {phase: guesses[phase] / peaks[phase] - 1 for phase in PHASES}
    assert {phase: share for phase, share in off.items() if abs(share) > WITHIN} == {}


def test_the_estimate_cuts_tables_of_logits_where_the_learner_does() -> None:
    ours = (activations.LOGITS_AT_A_TIME, activations.PLAIN_UP_TO, activations.SHARE_OF_A_GPU)
    assert ours == (linear_logprobs.LOGITS_AT_A_TIME, linear_logprobs.PLAIN_UP_TO, linear_logprobs.SHARE_OF_A_GPU)


def test_the_estimate_gathers_as_many_weights_ahead_as_the_learner() -> None:
    assert memory.IN_FLIGHT == IN_FLIGHT_BYTES

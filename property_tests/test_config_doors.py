"""Every door of the configuration takes anything: what is not accepted ends in an exception of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from property_tests.doors import DOORS, knock


@pytest.mark.long
def test_two_hundred_inputs_at_every_door_raise_nothing_but_our_own(tmp_path: Path) -> None:
    knocks = knock(200, seed=1, folder=tmp_path)
    assert knocks.accepted.total() > 30
    assert knocks.refused.total() > 80
    assert {entry_point.__name__ for entry_point in DOORS} == knocks.accepted.keys() | knocks.refused.keys()


@pytest.mark.long
def test_a_hundred_thousand_inputs_at_every_door_raise_nothing_but_our_own(tmp_path: Path) -> None:
    """`python -m benchmarks.config_doors` reports the slowest of them."""
    knocks = knock(100_000, seed=2, folder=tmp_path)
    assert min(knocks.accepted.total(), knocks.refused.total()) > 15_000
    assert all(knocks.accepted[entry_point.__name__] and knocks.refused[entry_point.__name__] for entry_point in DOORS)

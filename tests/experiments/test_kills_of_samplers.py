"""A run whose draws follow rewards, killed at any moment: it draws what one draws that was not.

`pytest --long tests/experiments/test_kills_of_samplers.py` kills both kinds of run 20 times.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.forked import run
from tests.experiments.logged_sampler import draws_in
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same, assert_same_files
from tests.experiments.test_kills import AHEAD, chains, moments

pytestmark = pytest.mark.xdist_group("forked")


def followed(out: Path) -> dict[str, Any]:
    """Draws by rewards, written down below `out`."""
    return {
        "data__curriculum__sampler": "tests.experiments.logged_sampler:LoggedPools",
        "data__curriculum__sampler_kwargs": {"log": str(out / "draws")},
    }


BY_ROW = {**AHEAD, "environment__env_class": "tests.experiments.logged_sampler:by_letter"}
"""What was sampled twice is sampled by other weights, and its rewards are to be the same."""


def killed_draws(nano: Path, out: Path, faults: Sequence[Fault], **changes: Any) -> None:
    """Kill a run at these moments, one after the other, and finish it."""
    for fault in faults:
        status, output = run(nano, out, fault, **changes, **followed(out))
        assert status == -signal.SIGKILL, (fault, output)
    status, output = run(nano, out, **changes, **followed(out))
    assert status == 0 and "Traceback" not in output, output


def whole_run(nano: Path, out: Path, **changes: Any) -> dict[int, list[int]]:
    status, output = run(nano, out, **changes, **followed(out))
    assert status == 0, output
    draws = draws_in(out / "draws")
    rows = [row for step in sorted(draws) for row in draws[step]]
    assert len(rows) >= 48 and any(rows.count(row) > 2 for row in rows), "they follow no rewards"
    return draws


@pytest.fixture
def count(pytestconfig: pytest.Config) -> int:
    return 20 if pytestconfig.getoption("--long") else 1


@pytest.mark.long
def test_a_synchronous_run_that_is_killed_draws_what_an_undisturbed_one_draws(
    nano: Path, tmp_path: Path, count: int
) -> None:
    draws = whole_run(nano, tmp_path / "whole")
    for number, chain in enumerate(chains(moments(count, seed=11))):
        killed = tmp_path / str(number)
        killed_draws(nano, killed, chain)
        assert draws_in(killed / "draws") == draws
        assert_same(killed, tmp_path / "whole")
        assert_same_files(killed, tmp_path / "whole")


@pytest.mark.long
def test_an_asynchronous_run_that_is_killed_draws_what_an_undisturbed_one_draws(
    nano: Path, tmp_path: Path, count: int
) -> None:
    draws = whole_run(nano, tmp_path / "whole", **BY_ROW)
    for number, chain in enumerate(chains(moments(count, seed=12))):
        killed = tmp_path / str(number)
        killed_draws(nano, killed, chain, **BY_ROW)
        assert draws_in(killed / "draws") == draws

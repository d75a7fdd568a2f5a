"""Runs that agents play, killed while agents are between two questions, and started again by the same command."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.forked import run
from tests.experiments.phases import Fault
from tests.experiments.sameness import tokens
from tests.nano_run import metrics

pytestmark = pytest.mark.xdist_group("forked")

PLAYED: dict[str, Any] = {
    "environment__agent__function": "tests.experiments.phased_agent:asks_twice",
    "generator__max_input_length": 40,
    "trainer__epochs": 1,
    "trainer__max_training_steps": 6,
}
"""Six steps of four prompts, of three samples each: one epoch."""

WHERE: dict[str, tuple[dict[str, Any], list[int]]] = {
    "here": ({}, [30]),
    "here, twice": ({}, [5, 30]),
    "ahead of training": ({"trainer__fully_async": {"enabled": True, "max_staleness_steps": 2}}, [5, 20, 40]),
    "on Ray": ({"trainer__placement__executor": "ray", "trainer__placement__colocate_all": False}, [5, 30]),
}
"""Where agents play, and after how many of their first answers the run is killed each time."""


@pytest.mark.long
@pytest.mark.parametrize("where", [pytest.param(w, marks=[] if w == "here" else pytest.mark.long) for w in WHERE])
def test_a_run_that_is_killed_under_its_agents_trains_on_each_prompt_once(
    where: str, nano: Path, tmp_path: Path
) -> None:
    changes, kills = WHERE[where]
    for nth in kills:
        status, output = run(nano, tmp_path, Fault(phase="agent", nth=nth), **PLAYED, **changes)
        assert status == -signal.SIGKILL, output
    status, output = run(nano, tmp_path, **PLAYED, **changes)
    assert status == 0, output
    assert "Traceback" not in output
    trained = Counter((record["step"], record["prompt_id"]) for record in tokens(tmp_path))
    assert set(trained.values()) == {3}
    assert Counter(step for step, _ in trained) == dict.fromkeys(range(1, 7), 4)
    assert Counter(prompt for _, prompt in trained) == dict.fromkeys((f"0:{row}" for row in range(24)), 1)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if row["step"]] == [1, 2, 3, 4, 5, 6]
    assert {row["environment/agent_requests"] for row in rows if row["step"]} == {2.0}

"""Runs on Ray whose engines are added, drained and killed all the time: they train on what they would have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyrl.errors import Stopped
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs.engine_changes import ask
from tests.experiments.test_lost_ranks import kill, samples
from tests.nano_run import all_metrics, config, train

pytestmark = [pytest.mark.xdist_group("elastic"), pytest.mark.long]

ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "generator__inference_engine__num_engines": 2,
}
ENDLESS: dict[str, Any] = {
    "trainer__deterministic": True,
    "trainer__ckpt_interval": -1,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
    "trainer__epochs": 400,
}
PATIENCE = 600.0


class Changing(BasePPOExp):
    """Something is done to an engine in each step in which all of them serve, until it was done often enough."""

    left: ClassVar[int] = 0
    done: ClassVar[list[str]] = []

    async def _samples_written(self) -> None:
        await super()._samples_written()
        async with asyncio.timeout(PATIENCE):
            while any(engine.state == "starting" for engine in self.client.states):
                await asyncio.sleep(0.02)
        states = [engine.state for engine in self.client.states]
        if set(states) != {"serving"} or not self.has_settled():
            return
        if self.left:
            type(self).left -= 1
            self.done.append(self.disturb(len(states)))
        else:
            self.shutdown.request("Done")

    def has_settled(self) -> bool:
        """Whether the run has noticed all that was done."""
        return True

    def disturb(self, engines: int) -> str:
        raise NotImplementedError


class Resizing(Changing):
    def disturb(self, engines: int) -> str:
        action = "add" if engines == 1 else "drain"
        ask(self.folder.path, "add" if engines == 1 else "drain")
        return action


class Killing(Changing):
    def has_settled(self) -> bool:
        return self.client.metrics["inference/engine_restarts"] == len(self.done)

    def disturb(self, engines: int) -> str:
        """At once, or some time later: in the update, the transfer of weights or the next samples."""
        victim = f"engine-{self.left % engines}"
        asyncio.get_running_loop().call_later(0.1 * (self.left % 12), kill, self.processes, victim)
        return victim


def run_with(nano: Path, out: Path, kind: type[Changing], times: int, **changes: Any) -> int:
    """Steps of a run whose engines change so many times."""
    kind.left, kind.done = times, []
    with pytest.raises(Stopped, match="Done"):
        kind(config(nano, out, **{**ENDLESS, **ON_RAY, **changes})).run()
    assert len(kind.done) == times
    return int(all_metrics(out)[-1]["step"])


def assert_as_undisturbed(nano: Path, tmp_path: Path, steps: int) -> None:
    """Samples are those of undisturbed engines in as many processes: rounding differs in one process."""
    train(nano, tmp_path / "undisturbed", **ENDLESS, **ON_RAY, trainer__max_training_steps=steps)
    expected = samples(tmp_path / "undisturbed")
    assert samples(tmp_path / "out") == expected
    assert len({(step, prompt) for step, prompt, _ in expected}) == 4 * steps


@pytest.mark.parametrize("times", [4, 40])
def test_engines_that_come_and_go_change_no_sample(nano: Path, tmp_path: Path, times: int) -> None:
    """40: 20 are drained and 20 added, one after the other."""
    steps = run_with(nano, tmp_path / "out", Resizing, times)
    assert Resizing.done == ["drain", "add"] * (times // 2)
    serving = [record["inference/engines_in_service"] for record in all_metrics(tmp_path / "out")]
    assert {1, 2} <= set(serving)
    assert_as_undisturbed(nano, tmp_path, steps)


@pytest.mark.parametrize(("engines", "times"), [(1, 4), (2, 4), (2, 100)])
def test_engines_that_are_killed_and_started_again_change_no_sample(
    nano: Path, tmp_path: Path, engines: int, times: int
) -> None:
    """A run with one engine waits for it."""
    restarts = {
        "generator__inference_engine__max_engine_restarts": times,
        "generator__inference_engine__engine_restart_backoff_seconds": 0.0,
    }
    number = {"generator__inference_engine__num_engines": engines}
    steps = run_with(nano, tmp_path / "out", Killing, times, **restarts, **number)
    assert all_metrics(tmp_path / "out")[-1]["inference/engine_restarts"] == times
    assert_as_undisturbed(nano, tmp_path, steps)

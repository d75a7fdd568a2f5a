"""A long run of a toy model needs no more memory, file descriptors and threads at its end than at its beginning."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.experiments.ppo import BasePPOExp
from skyrl.tracking.tracker import Tracker, Trackers
from tests.forkserver import CONTEXT
from tests.nano_run import config

pytestmark = pytest.mark.xdist_group("forked")


class Meter:
    """A tracker that looks at its own process."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        reading = {
            "step": step,
            "kilobytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")) - _threads_of_asyncio(),
        }
        self._file.write(json.dumps(reading) + "\n")

    def close(self) -> None:
        self._file.close()


def _threads_of_asyncio() -> int:
    """Threads of the event loop's own pool, which is bounded, and starts another where a call finds none idle yet."""
    return sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())


class MeteredExp(BasePPOExp):
    """A run with a meter."""

    def get_tracker(self, first_step: int) -> Tracker:
        return Trackers([super().get_tracker(first_step), Meter(self.folder.path / "readings")])


def soak(nano: Path, out: Path, changes: dict[str, Any]) -> None:
    os.dup2(os.open(out / "said", os.O_WRONLY | os.O_CREAT), 2)
    MeteredExp(config(nano, out, **changes)).run()


def slope(steps: np.ndarray, values: np.ndarray) -> float:
    return float(np.polyfit(steps, values, 1)[0])


@pytest.mark.long
@pytest.mark.parametrize("total", [60, pytest.param(5_000, marks=pytest.mark.long)])
def test_descriptors_and_threads_stay_flat_and_memory_over_thousands_of_steps(
    nano: Path, tmp_path: Path, total: int, record_property: Any
) -> None:
    changes = {
        "trainer__epochs": 10_000,
        "trainer__max_training_steps": total,
        "trainer__eval_interval": 10,
        "trainer__ckpt_interval": 10,
        "trainer__max_ckpts_to_keep": 2,
        "trainer__eval_before_train": False,
        "generator__n_samples_per_prompt": 2,
        "environment__skyrl_gym__max_env_workers": 1,  # of more threads, as many are started as calls are slow
    }
    process = CONTEXT.Process(target=soak, args=(nano, tmp_path, changes))
    process.start()
    process.join(280 if total < 1000 else 3600)
    assert process.exitcode == 0, (tmp_path / "said").read_text(encoding="utf-8")[-2000:]
    lines = (tmp_path / "run" / "readings").read_text(encoding="utf-8").splitlines()
    readings = [json.loads(line) for line in lines][total // 3 :]  # caches are full by then
    steps = np.array([row["step"] for row in readings])
    slopes = {
        name: slope(steps, np.array([row[name] for row in readings]))
        for name in ("kilobytes", "descriptors", "threads")
    }
    print(f"{total} steps; per step: {slopes}")
    record_property("slopes", slopes)
    for name in ("descriptors", "threads"):  # a thread that writes in the background may have one of each for a moment
        fewest = [min(row[name] for row in part) for part in (readings[: total // 6], readings[-total // 6 :])]
        # One that is opened once, by whatever is first needed late, is none that each checkpoint or step leaves: in the
        # short run there are three checkpoints and evaluations between the two parts.
        assert fewest[1] <= fewest[0] + 2, f"{name}: {fewest}"
    if total >= 5_000:  # a short run is still filling caches: its memory says nothing
        assert slopes["kilobytes"] < 1.0

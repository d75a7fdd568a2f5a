"""Folders of runs that were not trained, and a service that lists what it is given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import pytest

from skyrl.config import TrackersConfig, compose
from skyrl.config.loading.stored import stored_form
from skyrl.config.settings.trackers import TrackerFacts
from skyrl.tracking.jsonlines import json_line
from skyrl.tracking.services.follow import Delivery
from skyrl.tracking.services.service import Known, ServiceRun, ServiceTable

REWARD = "reward/avg_raw_reward"


def make_run(folder: Path, steps: Iterable[int], **changes: Any) -> Path:
    """A run's folder with a line of metrics and two samples for each step, and an evaluation of step 2."""
    values = {
        "data.train_data": ["a.jsonl"],
        "data.val_data": ["a.jsonl"],
        "trainer.policy.model.path": "model",
        "trainer.device": "cpu",
        "trainer.run_path": str(folder),
        "trainer.logger": "console",
        "generator.inference_engine.backend": "torch",
        "environment.env_class": "gsm8k",
    }
    run = compose([], values | {path.replace("__", "."): value for path, value in changes.items()}).config
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(stored_form(run)))
    append(folder, steps)
    evaluated = folder / "exports" / "dumped_evals" / "global_step_2_evals"
    evaluated.mkdir(parents=True)
    (evaluated / "gsm8k.jsonl").write_text(json_line(sample(2, 0)))
    (evaluated / "aggregated_results.jsonl").write_text(json_line({"eval/all/avg_score": 1.0}))
    return folder


def append(folder: Path, steps: Iterable[int], bonus: float = 0.0) -> None:
    """The steps happen: samples, then metrics, of which the reward is a tenth of the step, and the bonus."""
    for step in steps:
        with (folder / "trajectories.jsonl").open("a") as lines:
            lines.writelines(json_line(sample(step, number)) for number in range(2))
        with (folder / "metrics.jsonl").open("a") as lines:
            lines.write(json_line({"step": step, REWARD: step / 10 + bonus}))


def sample(step: int, number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "1 | 1?"}]
    return {"step": step, "prompt_id": "0:1", "sample": number, "prompt": prompt, "response": "a\nb", "reward": 1.0}


def service_run(folder: Path, service: str = "listed", *, first_step: int | None = None, **settings: Any) -> ServiceRun:
    return ServiceRun(
        service=service,
        project="project",
        name="name",
        folder=folder,
        evaluations=folder / "exports" / "dumped_evals",
        settings=TrackersConfig(**settings),
        first_step=first_step,
    )


class Listed:
    """A service that keeps what it is given, and can take back steps where `rewinds` says so."""

    given: ClassVar[list[tuple[Any, ...]]] = []
    rewinds: ClassVar[bool] = False

    def __init__(self, run: ServiceRun, known: Known) -> None:
        self.known = attrs.evolve(known, id="one")

    @classmethod
    def of_run(cls, run: ServiceRun, known: Known) -> Self:
        return cls(run, known)

    def describe(self, stored: Mapping[str, Any]) -> None:
        self.given.append(("config", stored["config"]["trainer"]["run_name"]))
        if lost := stored.get("steps_of_killed_sessions"):
            self.given.append(("lost", *lost))

    def rewind(self, step: int) -> bool:
        if self.rewinds:
            self.given.append(("rewind", step))
            self.known = attrs.evolve(self.known, step=step)
        return self.rewinds

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.given.append((step, metrics[REWARD]))

    def table(self, table: ServiceTable) -> None:
        self.given.append((table.name, table.step, len(table.rows)))

    def close(self) -> None:
        self.given.append(("close",))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> type[Listed]:
    """The service under the name `listed`, in this process."""
    monkeypatch.setattr(
        "skyrl.tracking.services.follow.TRACKERS",
        {"listed": TrackerFacts(tracker_class=f"{__name__}:Listed", package="json")},
    )
    monkeypatch.setattr(Listed, "given", [])
    monkeypatch.setattr(Listed, "rewinds", False)
    return Listed


def deliver(run: ServiceRun) -> None:
    """Deliver all, as at the end of a run."""
    delivery = Delivery(run)
    delivery.deliver(at_end=True)
    delivery.close()

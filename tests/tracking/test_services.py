"""TensorBoard and W&B with their real packages: what is delivered is what their own readers find."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import attrs
import pytest

from skyrl.config.settings.tracker_settings import SwanLabConfig
from skyrl.errors import UserError
from skyrl.tools.track import deliver
from skyrl.tracking.services.service import Known, closed, opened
from tests.tracking import made_runs, readers
from tests.tracking.made_runs import REWARD, append, make_run, service_run

READERS = {"tensorboard": readers.in_tensorboard, "wandb": readers.in_wandb}
OFFLINE = ["trainer.trackers.wandb.mode=offline", 'trainer.trackers.tags=["a"]']


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages write into the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("service", READERS)
def test_a_run_is_delivered_after_the_fact_and_what_came_since_is_added(service: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", range(4))
    assert deliver(folder, service, OFFLINE) == 3
    append(folder, range(4, 6))
    assert deliver(folder, service, OFFLINE) == 5
    points = READERS[service](folder, REWARD)
    assert [step for step, _ in points] == [*range(6)]
    assert [value for _, value in points] == pytest.approx([step / 10 for step in range(6)])  # float32 in event files


@pytest.mark.long
def test_tensorboard_shows_the_configuration_and_the_samples_as_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", range(3))
    deliver(folder, "tensorboard", ["trainer.trackers.notes=why"])
    [text] = readers.texts_in_tensorboard(folder, "configuration")
    assert '"notes": "why"' in text and '"train_batch_size": 1024' in text
    assert len(readers.texts_in_tensorboard(folder, "samples")) == 3
    [evaluated] = readers.texts_in_tensorboard(folder, "evaluation/gsm8k")
    assert "| 2 | 0:1 | 0 | 1.0 | None | user: 1 \\| 1? | a<br>b |" in evaluated


@pytest.mark.long
def test_wandb_has_the_configuration_with_what_was_derived_and_tables(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", range(3), trainer__project_name="maths/grades: 1")
    deliver(folder, "wandb", OFFLINE)
    [run] = [record.run for record in readers.wandb_records(folder) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, list(run.tags)) == ("maths_grades_ 1", "test_run", ["a"])
    config = configuration_in_wandb(folder)
    assert config["trainer"]["train_batch_size"] == 1024
    assert config["skyrl"]["derived"]["trainer.ref.model.path"] == "model"
    tables = {row["_step"]: row["samples/nrows"] for row in readers.wandb_rows(folder) if "samples/nrows" in row}
    assert tables == {0: 2, 1: 2, 2: 2}
    assert [row["_step"] for row in readers.wandb_rows(folder) if "evaluation/gsm8k/nrows" in row] == [2]


def configuration_in_wandb(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in readers.wandb_records(folder):
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        values |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in updates}
    return values


def test_online_wandb_gets_what_its_server_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = service_run(make_run(tmp_path / "run", range(10)), "wandb", first_step=9)
    Known(id="one", step=9).write(run.state_file)  # given to a process that was killed before all was uploaded
    steps: list[int] = []
    server = MagicMock(id="one", step=7)  # the next one that it takes
    server.log = lambda values, step: steps.append(step) if REWARD in values else None
    monkeypatch.setattr("wandb.init", lambda **settings: server)
    made_runs.deliver(run)
    assert steps == [7, 8, 9]
    assert Known.read(run.state_file).step == 9


def test_online_swanlab_gets_again_what_a_killed_process_may_not_have_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = service_run(make_run(tmp_path / "run", range(10)), "swanlab", swanlab=SwanLabConfig(mode="online"))
    (tmp_path / "a").mkdir()
    first = closed(opened(Known(id="one"), str(tmp_path / "a")))
    killed = opened(attrs.evolve(first, step=4), str(tmp_path / "b"))
    attrs.evolve(killed, step=9).write(run.state_file)
    package = MagicMock()
    monkeypatch.setitem(sys.modules, "swanlab", package)
    made_runs.deliver(run)
    steps = [call.kwargs["step"] for call in package.init.return_value.log.mock_calls if REWARD in call.args[0]]
    assert steps == [5, 6, 7, 8, 9]  # SwanLab leaves out those that it has


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the folder of a run"):
        deliver(tmp_path, "tensorboard")

"""`skyrl.train` and the `Run` that it returns, with the nano model."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import skyrl
from skyrl.cli.main import cli
from skyrl.config import SkyRLTrainConfig, compose
from skyrl.errors import CallbackError, ConfigError, ResumeError, UserError
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import get_at
from tests.nano_run import as_words, overrides
from tests.supervised_run import settings
from tests.tree.test_code_names import reward

SHORT: dict[str, Any] = {"trainer__max_training_steps": 2, "trainer__eval_before_train": True}


class Hearing(skyrl.Callback):
    """Notes the events that do not come from the loop itself, and each step."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def on_rollouts(
        self, state: skyrl.TrainingState, control: skyrl.Control, groups: Sequence[TrajectoryGroup]
    ) -> None:
        self.heard.append(("rollouts", len(groups)))

    def on_weights_sent(self, state: skyrl.TrainingState, control: skyrl.Control, version: int) -> None:
        self.heard.append(("weights", version))

    def on_step_end(self, state: skyrl.TrainingState, control: skyrl.Control, metrics: Mapping[str, float]) -> None:
        self.heard.append(("step", state.step))

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heard = [(event, number) for event, number in state["heard"]]


class StopsAfterOne(skyrl.Callback):
    """Asks for the end of the run at its first step."""

    def on_step_end(self, state: skyrl.TrainingState, control: skyrl.Control, metrics: Mapping[str, float]) -> None:
        control.should_training_stop = True


@pytest.fixture(scope="module")
def trained(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> skyrl.Run:
    """A run of two steps, whose reward is a function of this module. Not to be written to."""
    out = tmp_path_factory.mktemp("trained")
    settings = overrides(nano, out, **SHORT)
    return skyrl.train(settings, callbacks=[Hearing()], environment__env_class=reward)


@pytest.mark.long
def test_a_run_has_metrics_samples_and_a_status(trained: skyrl.Run) -> None:
    assert [record["step"] for record in trained.metrics] == [0, 1, 2]
    assert {sample["step"] for sample in trained.samples()} == {1, 2}
    assert len(trained.samples(2)) == 12
    assert {sample["reward"] for sample in trained.samples()} == {1.0}
    assert (trained.status, repr(trained)) == ("finished", f"<Run {trained.folder}: finished, step 2>")


@pytest.mark.long
def test_metrics_become_a_table_with_a_row_for_each_step(trained: skyrl.Run) -> None:
    table = trained.to_pandas()
    assert list(table.index) == [0, 1, 2]
    assert table.loc[2, "reward/avg_raw_reward"] == trained.metrics[2]["reward/avg_raw_reward"] == 1.0


def test_without_pandas_the_message_names_the_command_that_installs_it(
    trained: skyrl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match="to_pandas needs the package pandas: .* install pandas"):
        trained.to_pandas()


def test_the_trained_model_is_loaded_by_transformers(trained: skyrl.Run) -> None:
    ids = trained.tokenizer()("a", return_tensors="pt").input_ids
    assert trained.model()(ids).logits.shape[:2] == ids.shape


def test_the_name_of_the_reward_is_in_the_configuration(trained: skyrl.Run) -> None:
    assert get_at(trained.config, "environment.env_class") == "tests.tree.test_code_names:reward"


def test_objects_hear_what_collaborators_do(trained: skyrl.Run) -> None:
    [callback] = trained.source.callbacks
    assert isinstance(callback, Hearing)
    assert callback.heard == [
        ("weights", 0),
        *(("rollouts", 4), ("weights", 1), ("step", 1)),
        *(("rollouts", 4), ("weights", 2), ("step", 2)),
    ]


@pytest.mark.long
def test_a_run_is_evaluated_sampled_and_reported(trained: skyrl.Run, tmp_path: Path) -> None:
    results = skyrl.evaluate(trained, to=tmp_path / "scores")
    assert (results["step"], results["metrics"]["eval/all/avg_score"]) == (2, 1.0)
    answers = skyrl.generate(trained, to=tmp_path / "answers", generator__eval_n_samples_per_prompt=2)
    assert len(answers) == 12 and {*answers[0]} >= {"prompt", "response", "response_ids"}
    html = trained.report(tmp_path / "report.html").read_text(encoding="utf-8")
    written = CliRunner().invoke(cli, ["report", str(trained.folder), "--to", str(tmp_path / "command.html")])
    assert written.exit_code == 0
    assert html == (tmp_path / "command.html").read_text(encoding="utf-8")
    assert "estimated memory of one process in each phase" in html and f"skyrl view {trained.folder}" in html


def test_a_run_is_loaded_and_shown(trained: skyrl.Run) -> None:
    html = skyrl.load(trained.folder)._repr_html_()
    assert html.startswith(f"<table><tr><th>folder</th><td>{trained.folder}</td></tr>")
    assert "<td>finished, step 2</td>" in html and "<svg" in html and "1.000" in html


def test_another_folder_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        skyrl.load(tmp_path)


@pytest.mark.long
def test_a_run_is_resumed_with_its_code_and_callbacks(trained: skyrl.Run, tmp_path: Path) -> None:
    folder = trained.folder.parent
    shutil.copytree(folder, tmp_path / "copy")
    moved = skyrl.load(tmp_path / "copy" / "run")
    with pytest.raises(ConfigError, match="is code that only the stored run names"):
        moved.resume(trainer__max_training_steps=3)
    longer = moved.resume(
        trainer__max_training_steps=3,
        trainer__eval_interval=-1,
        environment__env_class=reward,
        trainer__ckpt_path=str(tmp_path / "copy" / "checkpoints"),
    )
    assert longer.folder == moved.folder
    assert [record["step"] for record in longer.metrics] == [0, 1, 2, 3]
    assert trained.status == "finished" and len(trained.metrics) == 3  # the first folder was not touched


@pytest.mark.long
def test_a_run_without_a_checkpoint_is_not_resumed(trained: skyrl.Run, tmp_path: Path) -> None:
    shutil.copytree(trained.folder, tmp_path / "run")
    run = skyrl.load(tmp_path / "run")
    with pytest.raises(ResumeError, match="contains no checkpoint"):
        run.resume(environment__env_class=reward, trainer__ckpt_path=str(tmp_path / "none"))


FORMS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "a mapping": lambda values, folder: values,
    "a file": lambda values, folder: str(_file(values, folder)),
    "a path": lambda values, folder: _file(values, folder),
    "a list of files": lambda values, folder: [_file(values, folder)],
    "a resolved tree": lambda values, folder: compose([], values).config,
    "a composed run": lambda values, folder: compose([], values),
    "a tree made in Python": lambda values, folder: SkyRLTrainConfig.from_dict(values),
}


def _file(values: Mapping[str, Any], folder: Path) -> Path:
    from tests.supervised_run import toml_file

    return Path(toml_file(folder / "run.toml", dict(values)))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_configuration_is_the_same_run(nano: Path, tmp_path: Path, form: str) -> None:
    from skyrl.api.source import source_of

    values = overrides(nano, tmp_path)
    source = source_of(
        FORMS[form](values, tmp_path), {"trainer__seed": 7, "trainer__run_path": str(tmp_path / "other")}
    )
    composed = source.composed(lambda kind: ())
    expected = compose([], {**values, "trainer.seed": 7, "trainer.run_path": str(tmp_path / "other")})
    assert composed.config == expected.config


@pytest.mark.parametrize("configuration", [None, 3, object(), b"run.toml", 1.5])
def test_what_is_no_configuration_is_refused(configuration: Any) -> None:
    with pytest.raises(UserError, match="is no configuration: give a file"):
        skyrl.train(configuration)


def test_the_traceback_of_a_mistake_has_at_most_five_frames(nano: Path, tmp_path: Path) -> None:
    mistakes: list[dict[str, Any]] = [
        {"trainer__epochs": "two"},
        {"trainer__epoch": 2},
        {"data__train_data": ["nowhere.jsonl"]},
        {"trainer__policy__model__path": str(tmp_path)},
        {"environment__env_class": lambda completion: 1.0},
        {"environment__env_class": "nowhere.py:x"},
        {"trainer__callbacks": ["nowhere.py:x"]},
    ]
    for mistake in mistakes:
        with pytest.raises(UserError) as refused:
            skyrl.train(overrides(nano, tmp_path), **mistake)
        assert len(traceback.extract_tb(refused.value.__traceback__)) <= 5, mistake
        assert refused.value.__suppress_context__


def test_a_callback_that_fails_ends_the_run_and_checkpoints_stay(nano: Path, tmp_path: Path) -> None:
    class Failing(skyrl.Callback):
        def on_step_end(self, state: skyrl.TrainingState, control: skyrl.Control, metrics: Mapping[str, float]) -> None:
            if state.step == 2:
                raise LookupError("lost")

    changes = {"trainer__ckpt_interval": 1, "trainer__eval_interval": -1, "trainer__max_training_steps": 3}
    settings = overrides(nano, tmp_path, **changes)
    with pytest.raises(CallbackError, match="Failing failed in on_step_end: LookupError: lost") as failed:
        skyrl.train(settings, callbacks=[Failing()])
    assert len(traceback.extract_tb(failed.value.__traceback__)) <= 5
    run = skyrl.load(tmp_path / "run")
    assert run.status == "failed"
    assert (tmp_path / "checkpoints" / "global_step_1").is_dir()


@pytest.mark.long
async def test_a_callback_that_stops_a_run_is_left_out_to_continue(nano: Path, tmp_path: Path) -> None:
    """Under a running event loop, as in a notebook."""
    settings = overrides(nano, tmp_path, trainer__max_training_steps=2, trainer__eval_interval=-1)
    stopped = skyrl.train(settings, trainer__callbacks=[StopsAfterOne])
    assert (stopped.status, [record["step"] for record in stopped.metrics]) == ("finished", [0, 1])
    assert [record["step"] for record in stopped.resume().metrics] == [0, 1]
    assert [record["step"] for record in stopped.resume(trainer__callbacks=[]).metrics] == [0, 1, 2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["sft", "reward_model", "asynchronous"])
def test_every_kind_of_run_has_callbacks(nano: Path, tmp_path: Path, kind: str) -> None:
    hearing = Hearing()
    if kind == "asynchronous":
        changes = {"trainer__max_training_steps": 1, "trainer__eval_interval": -1}
        skyrl.train(overrides(nano, tmp_path, **changes), callbacks=[hearing], trainer__fully_async__enabled=True)
        assert {event for event, _ in hearing.heard} == {"rollouts", "weights", "step"}
    else:
        run = skyrl.train(settings(nano, tmp_path, kind), callbacks=[hearing], num_steps=1)
        assert hearing.heard == [("step", 1)]
        assert run.samples() == []
        assert isinstance(run.model(), torch.nn.Module)


def test_words_of_a_command_are_no_overrides(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        skyrl.train(as_words(overrides(nano, tmp_path)))

"""The command as a person meets it, mostly being given nonsense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from attrs import frozen

from skyrl.cli.main import main
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.processes.signals import stop_command
from skyrl.tree import to_dict
from tests.nano_run import config, overrides


@frozen
class Ended:
    """How a command ended, and what it said."""

    code: object
    stdout: str
    stderr: str


def in_a_process(*arguments: str, cwd: Path) -> Ended:
    """`skyrl` as a shell starts it, with plain output."""
    command = [sys.executable, "-m", "skyrl.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=240)
    assert "Traceback" not in result.stderr, result.stderr
    return Ended(result.returncode, result.stdout, result.stderr)


SIGNALLED_AT_ITS_END = """
import atexit, os, signal
atexit.register(lambda: [os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)])
from skyrl.cli import start
start()
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["config", "check", "nothing.toml"], 2)])
def test_signals_at_the_very_end_do_not_change_the_exit_code(words: list[str], code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALLED_AT_ITS_END, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr


@pytest.mark.parametrize("reason", ["", "Stopped by SIGTERM"])
def test_a_command_does_not_stop_twice(reason: str) -> None:
    before = {number: signal.signal(number, stop_command) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ShutdownSignal(grace=30.0) as shutdown:
            if reason:
                shutdown.request(reason)
        left = {signal.getsignal(number) for number in before}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert left == ({signal.SIG_IGN} if reason else {stop_command})


Command = Callable[..., Ended]


@pytest.fixture
def skyrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`skyrl` in this process, which has imported everything, in the folder of the test."""

    def ends(*arguments: str) -> Ended:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err, captured.err
        return Ended(ending.value.code, captured.out, captured.err)

    return ends


@pytest.fixture
def run_toml(nano: Path, tmp_path: Path) -> Path:
    """The nano run as a file, two steps long."""
    nested: dict[str, object] = {}
    for path, value in overrides(nano, tmp_path, trainer__max_training_steps=2).items():
        *tables, key = path.split(".")
        table = nested
        for name in tables:
            table = table.setdefault(name, {})  # type: ignore[assignment]  # goes down one table
        table[key] = value
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(nested), encoding="utf-8")
    return file


def line_of(file: Path, start: str) -> int:
    """Number from 1 of the first line that starts so."""
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if line.startswith(start))


def refused(result: Ended, *messages: str) -> None:
    assert result.code == 2, result.stderr
    for words in messages:
        assert words in result.stderr


@pytest.mark.long
def test_a_run_ends_with_where_everything_is_and_what_it_achieved(
    run_toml: Path, tmp_path: Path, skyrl: Command
) -> None:
    result = in_a_process("run", "run.toml", cwd=tmp_path)
    assert result.code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("accuracy before 0.") and " after 0." in lines[-1]
    assert {"  trained model  run/model", "  checkpoints    checkpoints"} < {*lines}
    assert "step 2/2  reward 0." in result.stderr
    assert "accelerator" not in result.stdout + result.stderr
    locations = json.loads((tmp_path / "run" / "config.json").read_text())["places"]
    assert locations["trainer.device"] == f"run.toml:{line_of(run_toml, 'device = ')}"
    repeated = skyrl("run", "run.toml")
    assert repeated.code == 0
    assert "nothing was trained" in repeated.stdout
    assert repeated.stdout.splitlines()[-1] == lines[-1]
    assert "  look at it     skyrl view run" in lines
    new = skyrl("run", "run.toml", "trainer.max_training_steps=1", "--new")
    assert (new.code, new.stderr.splitlines()[0]) == (0, f"New run in {tmp_path}/run-2.")
    assert {"  trained model  run-2/model", "  look at it     skyrl view run-2"} < {*new.stdout.splitlines()}


@pytest.mark.parametrize("name", ["mine", "team/mine"])
def test_a_new_run_is_renamed_where_its_folder_follows_its_name(name: str, tmp_path: Path, skyrl: Command) -> None:
    """And no warning says that the name of the file has no effect."""
    (tmp_path / "run.toml").write_text(f'[trainer]\nrun_name = "{name}"\n[trainer.policy.model]\npath = "nowhere"\n')
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    result = skyrl("run", "run.toml", "--new")
    assert result.stderr.splitlines()[0] == f"New run in runs/{name}-2."
    assert "has no effect" not in result.stderr


def test_show_prints_the_resolved_tree(run_toml: Path, nano: Path, tmp_path: Path, skyrl: Command) -> None:
    result = skyrl("config", "show", "run.toml")
    assert json.loads(result.stdout) == to_dict(config(nano, tmp_path, trainer__max_training_steps=2))


def test_three_mistakes_are_reported_together_with_suggestions(run_toml: Path, tmp_path: Path) -> None:
    mistakes = ["trainer.policy.optimizer_config.lr=fast", "trainer.epoch=2", "generator.n_samples_per_prompt=2.5"]
    refused(
        in_a_process("run", "run.toml", *mistakes, cwd=tmp_path),
        "(3 problems)",
        "'fast' is not a number",
        "did you mean trainer.epochs?",
        "'2.5' is not a whole number",
        "argument 3",
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.policy.optimizer_config.lr=fast", "'fast' is not a number"),
        ("trainer.epochs=true", "not a whole number"),
        ("trainer.train_batch_size=3.5", "not a whole number"),
        ("data.train_data=gone.parquet", "there is no file gone.parquet"),
        ("data.train_data=a.parquet,b.parquet", "is not a list of text"),
        ("trainer.policy.optimizer_config.lr=-1", "-1"),
        ("trainer.polcy.seed=3", "did you mean trainer.policy"),
        ("trainer.policy.model.path=/nowhere/model", "there is no model folder /nowhere/model"),
        ("trainer.policy_mini_batch_size=3", "nearest divisors: 2 and 4"),
        ("environment.env_class=gsm9k", "Registered: aime, code, gsm8k"),
        ("data.train_data=['gone.parquet']", "there is no file gone.parquet"),
        ("trainer.algorithm.policy_loss_type=gspoo", "did you mean gspo?"),
        ("+trainer.new=3", "the prefix + is not supported"),
        ("trainer", "cannot be read"),
        ("trainer.ckpt_path=", "set it to a folder"),
        ("data.train_data=['~nobody-of-this-name/x.parquet']", "is not a path here"),
        ("trainer.logger=wandb", "wandb needs a key, but none is set"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_and_nothing_starts(
    run_toml: Path, tmp_path: Path, argument: str, message: str, skyrl: Command
) -> None:
    refused(skyrl("run", "run.toml", argument), message)
    assert not (tmp_path / "run").exists()


def test_a_missing_file_and_a_wrong_argument_are_told_together(tmp_path: Path, skyrl: Command) -> None:
    refused(skyrl("config", "check", "gone.toml", "trainer.epochs=x"), "no such file", "'x' is not")


def test_a_file_that_does_not_parse_is_told_with_line_and_column(tmp_path: Path, skyrl: Command) -> None:
    (tmp_path / "bad.toml").write_text("[trainer]\nepochs = = 2\n", encoding="utf-8")
    refused(skyrl("config", "check", "bad.toml"), "bad.toml:2:10", "2 | epochs = = 2")


def test_a_value_in_a_file_is_told_with_its_line(run_toml: Path, tmp_path: Path, skyrl: Command) -> None:
    (tmp_path / "more.toml").write_text('[trainer]\nepochs = 2\nseed = "one"\n', encoding="utf-8")
    refused(skyrl("config", "check", "run.toml", "more.toml"), "more.toml:3")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "?"}], "no column 'prompt'"),
        ([], "contains no rows"),
        pytest.param(
            [{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": None}], "row 1", marks=pytest.mark.long
        ),
        ([{"prompt": [{"role": "user", "content": "a"}], "ground_truth": "b"}] * 3, "the training data has 3"),
        ([{"prompt": [{"role": "user", "content": "a"}]}] * 3, "row 0 has no ground_truth"),
    ],
)
def test_data_that_cannot_be_used_is_told_and_nothing_starts(
    run_toml: Path, tmp_path: Path, rows: list[dict[str, object]], message: str, skyrl: Command
) -> None:
    schema = None if rows else pa.schema({"prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "data.parquet")
    refused(skyrl("run", "run.toml", "data.train_data=['data.parquet']"), message)
    assert not (tmp_path / "run").exists()


def test_a_model_folder_that_holds_garbage_is_told(run_toml: Path, tmp_path: Path, nano: Path, skyrl: Command) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (nano / "model").iterdir():
        (broken / file.name).write_bytes(b"garbage" if file.suffix == ".safetensors" else file.read_bytes())
    refused(skyrl("run", "run.toml", "trainer.policy.model.path=broken"), "the model broken cannot be loaded")


def test_strict_makes_a_value_without_effect_a_mistake(run_toml: Path, tmp_path: Path, skyrl: Command) -> None:
    argument = "trainer.algorithm.kl_loss_coef=0.1"
    relaxed = skyrl("config", "check", "run.toml", argument)
    assert relaxed.code == 0
    assert "has no effect in this run" in relaxed.stderr
    refused(skyrl("config", "check", "--strict", "run.toml", argument), "has no effect in this run")


def test_checking_a_configuration_imports_nothing_heavy(run_toml: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "skyrl.cli", "config", "check", "run.toml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
        env={**os.environ},
    )
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert "skyrl" in imported
    assert not imported & {"torch", "ray", "transformers", "rich", "yaml", "numpy", "pyarrow"}

"""Which modules that a file names are imported by commands that only read the file; and files made to stop a reader."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import compose
from skyrl.data.sources import read_rows
from skyrl.errors import ConfigError, DataError, UserError
from skyrl.runs.stored_runs import stored_run
from skyrl.tools.sampling_target import _is_run
from skyrl.tracking.services.run_files import stored_configuration
from skyrl.tree.imports import following
from skyrl.tree.python_source import parsed_expression, parsed_program
from skyrl.viewer.report import _read_stored

MODULE = """
import pathlib
from skyrl.config import DataConfig
from skyrl.tree import frozen

pathlib.Path(__file__ + ".ran").touch()

@frozen
class Own(DataConfig):
    extra: int = 1

def loss(inputs):
    return inputs
"""

NAMED = {
    "class": 'data.class = "{}:Own"\ndata.extra = 5',
    "class of a file": 'data.class = "{}.py:Own"\ndata.extra = 5',
    "loss": 'trainer.algorithm.policy_loss_type = "{}:loss"',
    "estimator": 'trainer.algorithm.advantage_estimator = "{}.py:loss"',
    "environment": 'environment.env_class = "{}:loss"',
    "filter": 'trainer.fully_async.accept = "{}:loss"',
}
COMMANDS = {
    "check": ("config", "check"),
    "check --json": ("config", "check", "--json"),
    "show": ("config", "show"),
    "show --origins": ("config", "show", "--origins"),
    "explain": ("config", "explain", "trainer.epochs"),
    "diff": ("config", "diff", "preset:cuda"),
    "plan": ("plan",),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("setting", NAMED)
def test_commands_that_read_import_what_they_say_and_nothing_with_no_code(
    setting: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = {}
    for option in ("--no-code", ""):
        module = f"evil_{abs(hash((setting, command, option)))}"
        Path(f"{module}.py").write_text(MODULE)
        Path("run.toml").write_text(NAMED[setting].format(module))
        words = [*COMMANDS[command], *filter(None, [option]), "run.toml"]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code in (0, 1 if command == "diff" else 0), (words, result.output, result.exception)
        imported[option] = Path(f"{module}.py.ran").exists()
        if option and command.startswith("check") and setting != "filter":
            assert "not checked" in result.output and module in result.output
    expected = setting.startswith("class") or (command.startswith("check") and setting in ("loss", "estimator"))
    assert imported == {"--no-code": False, "": expected}


@pytest.mark.parametrize("where", ["none.py:Own", "none:Own", "no.such.module:Own"])
def test_code_that_is_not_there_is_not_checked_either(where: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'environment.env_class = "{where}"\ndata.class = "{where}"\ndata.other = 1')
    result = CliRunner().invoke(cli, ["config", "check", "--no-code", "--json", str(tmp_path / "run.toml")])
    report = json.loads(result.output)
    assert (result.exit_code, report["ok"]) == (0, True)
    messages = {problem["path"]: problem["message"] for problem in report["problems"]}
    assert messages.keys() == {"data.class", "environment.env_class"}
    assert "no file of it was found" in messages["environment.env_class"]


def test_what_does_not_depend_on_code_is_checked_without_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('data.class = "evil:Own"\ntrainer.epochs = "two"')
    with following("nothing"), pytest.raises(ConfigError, match="'two' is not a whole number"):
        compose([tmp_path / "run.toml"])


@pytest.mark.parametrize("name", ["check", "config", "plan", "show"])
def test_the_help_says_what_is_imported(name: str) -> None:
    words = {"config": ["config"], "plan": ["plan"]}.get(name, ["config", name])
    help_text = " ".join(CliRunner().invoke(cli, [*words, "--help"]).output.split())
    assert "import" in help_text and "without running it" not in help_text


@pytest.mark.parametrize("sign", ["-", "(", "[", "not ", "{1:", "a.", "~"])
def test_a_program_that_python_does_not_parse_is_a_syntax_error(sign: str) -> None:
    for read in (parsed_program, parsed_expression):
        with pytest.raises(SyntaxError):
            read(sign * 9_000)
        with pytest.raises(SyntaxError):
            read("a\0")


def test_a_program_of_signs_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = " + "-" * 9_000 + "1")
    result = CliRunner().invoke(cli, ["config", "convert", str(tmp_path / "train.py"), "--from", "trl"])
    assert isinstance(result.exception, ConfigError) and "train.py" in str(result.exception)


@pytest.mark.parametrize("kind", ["endless", "pipe", "huge", "not UTF-8"])
def test_a_strangers_run_folder_is_refused_whatever_its_files_are(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    match kind:
        case "endless":
            file.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(file)
        case "huge":
            with file.open("wb") as stream:
                stream.truncate(1 << 40)
        case _:
            file.write_bytes(b"\xff\xfe")
    for read in (stored_run, stored_configuration, _read_stored):
        with pytest.raises(UserError, match=r"config\.json"):
            read(tmp_path)
    assert not _is_run(tmp_path)
    file.rename(tmp_path / "progress.json")
    (tmp_path / "metrics.jsonl").touch()
    result = CliRunner().invoke(cli, ["watch", str(tmp_path), "--once"])
    assert result.exception is None or isinstance(result.exception, UserError)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv"])
def test_a_source_with_a_name_of_thousands_of_letters_is_no_file(suffix: str) -> None:
    with pytest.raises(DataError, match="there is no data file aaa"):
        read_rows("a" * 4_000 + suffix)

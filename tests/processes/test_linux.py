"""On a system other than Linux, a command works or says in a sentence that it needs Linux."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import UserError
from skyrl.processes.linux import ANYWHERE
from skyrl.runs.session import RunSession

WORKING = {
    "config": ["config", "check", "preset:one-process", "trainer.device=cpu"],
    "plan": ["plan", "preset:one-process", "trainer.device=cpu"],
    "simulate": ["simulate", "preset:one-process", "--answer-seconds", "1", "--train-seconds", "1", "--steps", "2"],
    "completion": ["completion", "zsh"],
}


@pytest.fixture(autouse=True, params=["darwin", "win32"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr("skyrl.processes.linux.PLATFORM", request.param)
    monkeypatch.chdir(tmp_path)
    name: str = request.param
    return name


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", cli.list_commands(Context(cli)))
def test_a_command_works_elsewhere_or_says_that_it_needs_linux(command: str, platform: str, tmp_path: Path) -> None:
    if command in ANYWHERE:
        result = CliRunner().invoke(cli, WORKING[command])
        assert result.exit_code == 0, (result.output, result.exception)
        return
    error = CliRunner().invoke(cli, [command, "anything"]).exception
    assert isinstance(error, UserError) and error.exit_code == 2
    assert str(error).startswith(f"skyrl {command} needs Linux, and this is {platform}: use a Linux machine, WSL or")
    assert len(str(error).splitlines()) == 1 and not list(tmp_path.iterdir())
    assert CliRunner().invoke(cli, ["--help"]).exit_code == 0


def test_a_run_from_python_says_that_it_needs_linux() -> None:
    with pytest.raises(UserError, match="a run needs Linux"):
        RunSession(object())  # type: ignore[arg-type]  # nothing of it is read

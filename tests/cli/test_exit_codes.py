"""How the command ends, for whatever ends what it runs: the exit codes that scripts and queues rely on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from skyrl.cli import main as command
from skyrl.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    Problem,
    ProcessError,
    ResumeError,
    RunError,
    Stopped,
    UserError,
)


class PanicException(BaseException):
    """As libraries in Rust raise it."""


ENDINGS: list[tuple[BaseException, int, str]] = [
    (UserError("no such file"), 2, "no such file"),
    (ConfigError([Problem(path="trainer.seed", message="is odd")]), 2, "trainer.seed"),
    (DataError("rows.jsonl is empty"), 2, "rows.jsonl is empty"),
    (ResumeError("another configuration"), 2, "another configuration"),
    (RunError("it failed"), 1, "it failed"),
    (ProcessError("engine-0 died"), 1, "engine-0 died"),
    (NonFiniteError("the loss is nan"), 1, "the loss is nan"),
    (ZeroDivisionError("of a mistake"), 1, "ZeroDivisionError: of a mistake"),
    (MemoryError(), 1, "This process gets no more memory: raise its limit (ulimit -v, or that of"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), 1, "This process gets no more memory"),
    (RuntimeError("can't start new thread"), 1, "This process gets no more threads: raise its limits (ulimit -u;"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 1, "This process gets no more threads"),
    (PanicException("ThreadPoolBuildError { Resource temporarily unavailable }"), 1, "gets no more threads"),
    (PanicException("index out of bounds"), 1, "PanicException: index out of bounds"),
    (RuntimeError("another"), 1, "RuntimeError: another"),
    (PermissionError(errno.EACCES, "Permission denied", "out/x"), 1, "out/x: Permission denied\n"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device\n"),
    (OSError(errno.EBADF, "Bad file descriptor"), 1, "Traceback"),
    (PermissionError(errno.EPERM, "Operation not permitted"), 1, "Traceback"),
    (Stopped("Stopped by SIGTERM."), 75, "Stopped by SIGTERM."),
    (Stopped("Stopped.", 130), 130, "Stopped."),
    (KeyboardInterrupt(), 130, "Stopped. "),
    (click.Abort(), 130, "Stopped. "),
    (click.UsageError("no such option"), 2, "no such option"),
]


@pytest.mark.parametrize(("ending", "code", "message"), ENDINGS, ids=lambda value: type(value).__name__)
def test_every_way_to_end_has_its_exit_code_and_says_why(
    ending: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(**_: Any) -> None:
        raise ending

    monkeypatch.setattr(command.cli, "main", raises)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == code
    stderr = capsys.readouterr().err
    assert message in stderr
    assert ("Traceback" in stderr) == (message == "Traceback" or f"{type(ending).__name__}: " in message)


def test_a_file_that_cannot_be_written_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "out.svg")

    monkeypatch.setattr(command.cli, "main", raises)
    with pytest.raises(SystemExit):
        command.main([])
    assert capsys.readouterr().err == "out.svg: Read-only file system\n"


@pytest.mark.parametrize("words", [["run"], ["config", "check"], ["doctor"], ["launch", "local"], ["plan"]])
def test_a_current_folder_that_was_deleted_is_told(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = CliRunner().invoke(command.cli, [*words, "trainer.policy.model.path=/model"])
    assert isinstance(result.exception, UserError), result.exception
    assert str(result.exception) == "the current folder was deleted or unmounted: change to one that exists"


@pytest.mark.parametrize(
    "words",
    [
        ["ckpt", "list", "NAME"],
        ["launch", "status", "NAME"],
        ["templates", "check", "NAME"],
        ["simulate", "--like", "NAME"],
        ["watch", "--once", "NAME"],
        ["config", "check", "NAME"],
        ["sweep", "NAME"],
        ["init", "NAME"],
    ],
)
def test_a_name_longer_than_any_file_system_takes_ends_every_command_in_a_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([word.replace("NAME", "n" * 300) for word in words])
    assert ended.value.code in (1, 2)
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    assert "nnn" in stderr


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_a_command_may_say_how_it_ended(returned: int | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.cli, "main", lambda **_: returned)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == code


def test_a_mistake_of_ours_is_shown_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(**_: Any) -> None:
        raise ValueError("http://user:password-of-mine@host/")

    monkeypatch.setattr(command.cli, "main", raises)
    with pytest.raises(SystemExit):
        command.main([])
    stderr = capsys.readouterr().err
    assert "Traceback" in stderr
    assert "password-of-mine" not in stderr

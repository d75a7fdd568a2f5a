"""`skyrl launch logs`: what a launch has printed, in files of its folder, as a whole and as it grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import UserError
from skyrl.launchers import output
from skyrl.launchers.job import Launch
from skyrl.launchers.output import LaunchOutput


def launched(folder: Path, **logs: str) -> Launch:
    """A launch of this machine with these files of output."""
    (folder / "logs").mkdir(parents=True)
    for name, text in logs.items():
        (folder / "logs" / f"{name}.log").write_text(text)
    launch = Launch(target="local", name="mine", folder=folder, id="1:1", cwd=str(folder.parent), submitted=0.0)
    launch.write()
    return launch


class Growing:
    """A launcher whose run prints one more line each time it is asked about, and ends after the last."""

    def __init__(self, file: Path, *lines: str) -> None:
        self._file, self._lines = file, list(lines)

    def state(self, launch: Launch) -> str:
        if not self._lines:
            return "finished"
        with self._file.open("a") as stream:
            stream.write(self._lines.pop(0))
        return "running"


def test_what_was_printed_is_printed_once(tmp_path: Path) -> None:
    launch, anyone = launched(tmp_path / "one", local="step 1\n"), Growing(tmp_path)
    seen = LaunchOutput(launch, anyone)  # type: ignore[arg-type]  # its state is not asked
    assert (seen.new(), seen.new()) == ("step 1\n", "")
    (launch.folder / "logs" / "local.log").write_text("step 1\nstep 2\n")
    assert seen.new() == "step 2\n"


def test_several_files_are_told_apart(tmp_path: Path) -> None:
    launch = launched(tmp_path / "two", **{"job-1": "first\n", "job-2": "second\n", "job-3": ""})
    seen: Any = LaunchOutput(launch, Growing(tmp_path))  # type: ignore[arg-type]  # its state is not asked
    assert seen.new() == "==> job-1.log <==\nfirst\n==> job-2.log <==\nsecond\n"


def test_a_letter_that_is_written_in_two_parts_is_printed_whole(tmp_path: Path) -> None:
    launch = launched(tmp_path / "one", local="")
    seen: Any = LaunchOutput(launch, Growing(tmp_path))  # type: ignore[arg-type]  # its state is not asked
    file = launch.folder / "logs" / "local.log"
    file.write_bytes("ü".encode()[:1])
    assert seen.new() == ""
    file.write_bytes("ü\n".encode())
    assert seen.new() == "ü\n"


def test_of_more_output_than_is_read_at_once_the_end_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_STORED", 7)
    launch = launched(tmp_path / "one", local="step 1\nstep 2\n")
    seen: Any = LaunchOutput(launch, Growing(tmp_path))  # type: ignore[arg-type]  # its state is not asked
    file = launch.folder / "logs" / "local.log"
    assert seen.new() == f"(7 bytes are left out: see {file})\nstep 2\n"
    assert seen.new() == ""


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")])
def test_output_that_never_ends_is_refused(make: Callable[[Path], object], tmp_path: Path) -> None:
    launch = launched(tmp_path / "one")
    make(launch.folder / "logs" / "local.log")
    with pytest.raises(UserError, match=r"local.log cannot be read: it is a (pipe|device), not a regular file"):
        LaunchOutput(launch, Growing(tmp_path)).new()  # type: ignore[arg-type]  # its state is not asked


def test_the_output_is_followed_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_EVERY", 0.0)
    launch = launched(tmp_path / "one", local="")
    running: Any = Growing(launch.folder / "logs" / "local.log", "step 1\n", "step 2\n")
    assert list(LaunchOutput(launch, running).follow()) == ["step 1\n", "step 2\n", ""]


def test_the_command_prints_the_output_of_a_launch_by_its_folder_or_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launched(tmp_path / "launches" / "mine", local="trained\n")
    for name in ("mine", "launches/mine"):
        result = CliRunner().invoke(cli, ["launch", "logs", name])
        assert (result.exit_code, result.stdout) == (0, "trained\n")
    gone = CliRunner().invoke(cli, ["launch", "logs", "-f", "mine"])  # its process is gone, so that nothing is awaited
    assert (gone.exit_code, gone.stdout) == (0, "trained\n")

"""The command `skyrl view`, from its first line to Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner
from httpx import get

from skyrl.cli.main import cli
from tests.viewer_run import group, write


def test_the_command_serves_this_machine_until_it_is_interrupted_and_leaves_its_index(tmp_path: Path) -> None:
    write(tmp_path, [[group(1, 0, ["an answer"])]])
    command = [sys.executable, "-m", "skyrl.cli", "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split(" at ")[1].split()[0]
        page = get(address, timeout=60, follow_redirects=True)
        stranger = get(address.partition("?")[0], timeout=60)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert address.startswith("http://127.0.0.1:") and "an answer" in page.text
    assert stranger.status_code == 403
    assert (process.returncode, rest) == (0, "The viewer has stopped.\n")
    assert (tmp_path / "trajectories.index").is_file()


def test_the_page_does_not_wait_for_the_import_of_environments_and_of_the_configuration() -> None:
    code = (
        "import sys, skyrl.cli.main, skyrl.processes.service, skyrl.viewer.pages, skyrl.viewer.server, "
        "skyrl.tracking.token_file\n"
        "print([name for name in ('skyrl.config', 'skyrl.envs', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["view", str(tmp_path)])
    assert result.exit_code != 0 and "has no trajectories.jsonl: runs that" in result.output + str(result.exception)


def test_a_folder_of_runs_is_refused_with_the_newest_of_them(tmp_path: Path) -> None:
    for name, age in (("old", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name, (age, age))
    for command in ("view", "report"):
        result = CliRunner().invoke(cli, [command, str(tmp_path)])
        assert f"; it is a folder of runs: skyrl {command} {tmp_path / 'new'}" in str(result.exception)

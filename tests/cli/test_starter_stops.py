"""Scripts that make small models, and `skyrl init`: stopped, they end in one line and keep nothing half made."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from tests.nano_run import as_words, overrides

SCRIPT = """
import os, signal
from skyrl.errors import Stopped
from skyrl.starter.stopping import stopped_in_words
with stopped_in_words():
    {stop}
"""
BY_SIGTERM = "Stopped by SIGTERM. Incomplete files were removed: the same command starts from scratch.\n"
BY_CTRL_C = "Stopped. Incomplete files were removed: the same command starts from scratch.\n"


@pytest.mark.parametrize(
    ("stop", "code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, BY_SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, BY_CTRL_C),
        ("raise Stopped('Stopped by SIGTERM. Step 7 is saved.')", 143, BY_SIGTERM),
        ("raise Stopped('Stopped. Step 7 is saved.', 130)", 130, BY_CTRL_C),
    ],
)
def test_a_script_that_is_stopped_ends_in_one_line(stop: str, code: int, message: str) -> None:
    script = SCRIPT.format(stop=stop)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, message)


def test_incomplete_files_are_removed_on_failure(tmp_path: Path) -> None:
    from skyrl.starter.tiny_chat import made_whole

    with pytest.raises(FileNotFoundError), made_whole(tmp_path / "base") as folder:
        (folder / "missing" / "rows.jsonl").write_text("")
    assert not list(tmp_path.iterdir())


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "skyrl.cli", "init", *words]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code", "by"), [(signal.SIGTERM, 143, "Stopped by SIGTERM"), (signal.SIGINT, 130, "Stopped")]
)
def test_init_shows_its_progress_and_keeps_no_half_of_a_model(
    number: signal.Signals, code: int, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    with started(tmp_path, "mine") as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("step   1/150"))
        process.send_signal(number)
        lines = process.stderr.read().splitlines()
    rest = "run python prepare.py there to create the model and its data."
    assert [line for line in lines if not line.startswith("step ")] == [
        f"{by}. The files of the task are in mine; {rest}"
    ]
    assert process.returncode == code
    files = [".gitignore", "README.md", "prepare.py", "reward.py", "run.toml", "skyrl.schema.json", "test_reward.py"]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == files
    assert not list((tmp_path / "scratch").glob("tmp*"))  # torch has a folder of its own there


TRAINING = """
from pathlib import Path
from skyrl.starter.tiny_chat import train
train(Path("empty.toml"))
"""


@pytest.mark.long
def test_control_c_in_an_example_reaches_its_run(nano: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    command = [sys.executable, "-c", TRAINING, *as_words(overrides(nano, tmp_path, trainer__epochs=1000))]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        assert run.stderr is not None
        next(line for line in run.stderr if line.startswith("step ") and line.split()[1].startswith("3/"))
        run.send_signal(signal.SIGINT)
        stderr = run.stderr.read()
    assert run.returncode == 130
    assert "Traceback" not in stderr and "is saved: the same command continues after it." in stderr


def test_init_shows_what_its_script_tells_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = "step 1/2  0:01 left\\nwaiting for: data\\na warning\\n"
    (tmp_path / "random.py").write_text(f'import os, sys\nsys.stderr.write("{lines}")\nsys.stderr.flush()\nos._exit(0)')
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), "--template", "sft"])
    assert result.exit_code == 0 and result.stderr == "step 1/2  0:01 left\nwaiting for: data\n"


def test_a_path_with_dots_makes_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["init", "bad/../mine", "--no-model"])
    assert "cd mine\n" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_task_that_is_there_in_part_is_kept_and_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyrl.starter.tiny_chat import make_task

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(SystemExit, match=r"already there: model\. Remove both \(rm -r data model\)"):
        make_task([], [])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

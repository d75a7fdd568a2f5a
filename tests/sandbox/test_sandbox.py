"""Running programs in a sandbox: what they read, print and end with, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

import psutil
import pytest

import skyrl
from skyrl.config.settings.trackers import TRACKERS
from skyrl.envs import find_env
from skyrl.errors import ProcessError, UserError
from skyrl.sandbox import fork_client, sandbox
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from skyrl.sandbox.tiers import Tier
from tests.sandbox.attacks import HERE
from tests.sandbox.right_programs import A_HANDFUL, RIGHT


def test_at_least_one_tier_is_here_and_the_machine_of_the_tests_knows_the_first() -> None:
    assert "process" in HERE


@pytest.mark.sampled(3)
def test_a_folder_that_is_nested_deep_and_closed_is_removed(sandbox: Sandbox) -> None:
    program = (
        "import os\nprint(os.getcwd(), flush=True)\nfor _ in range(1100):\n  os.mkdir('deep')\n  os.chdir('deep')\n"
        "open('file', 'w').close()\nos.chmod('.', 0)\nprint('done')"
    )
    folder, done = sandbox.run(program).stdout.decode().split()
    assert done == "done"
    assert not Path(folder).exists() or list(Path(folder).iterdir()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in A_HANDFUL else pytest.mark.long) for name in RIGHT]
)
def test_a_right_program_prints_what_it_has_to(name: str, sandbox: Sandbox) -> None:
    right = RIGHT[name]
    ran = sandbox.run(right.program, right.stdin.encode(), ResourceLimits(seconds=240.0))
    assert (ran.ended, ran.code, ran.stdout.decode()) == ("exit", 0, right.printed), ran


def test_a_program_may_start_threads_however_many_the_run_itself_has(sandbox: Sandbox) -> None:
    enough = Event()
    with ThreadPoolExecutor(100) as pool:
        for _ in range(100):
            pool.submit(enough.wait)
        ran = sandbox.run(RIGHT["sixteen threads"].program)
        enough.set()
    assert ran.stdout == b"True\n", ran


def test_there_are_a_hundred_right_programs() -> None:
    assert len(RIGHT) >= 100


def test_the_folder_is_removed_and_links_in_it_are_not_followed(tmp_path: Path, sandbox: Sandbox) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x", encoding="utf-8")
    ran = sandbox.run(f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nprint(os.getcwd())")
    assert kept.read_text(encoding="utf-8") == "x"
    folder = Path(ran.stdout.decode().strip())
    assert not folder.exists() or list(folder.iterdir()) == []


def test_programs_read_and_print_and_end_with_their_code(sandbox: Sandbox) -> None:
    text = "é" * 300_000
    ran = sandbox.run(
        "import sys\nprint(sys.stdin.read())\nsys.exit(3)", text.encode(), ResourceLimits(output_bytes=1 << 20)
    )
    assert (ran.ended, ran.code, ran.stdout.decode()) == ("exit", 3, text + "\n")
    assert sandbox.run("import asyncio, json, tomllib\nprint(json.dumps([1]))").stdout == b"[1]\n"
    assert b"ZeroDivisionError" in sandbox.run("1 / 0").stderr


def test_programs_run_side_by_side(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        printed = list(pool.map(lambda number: sandbox.run(f"print({number})").stdout, range(32)))
    assert printed == [f"{number}\n".encode() for number in range(32)]


@pytest.mark.parametrize("tier", HERE)
def test_no_key_of_a_tracker_reaches_a_program(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [facts.key for facts in TRACKERS.values() if facts.key]
    for name in (*keys, "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "of-a-tracker")
    sandbox = Sandbox(tier)
    look = "print(dict(os.environ), open(f'/proc/{os.getppid()}/environ').read())"
    ran = sandbox.run(f"import os\ntry:\n    {look}\nexcept OSError:\n    print(dict(os.environ))")
    sandbox.close()
    assert b"PATH" in ran.stdout and b"of-a-tracker" not in ran.stdout, ran
    assert "WANDB_API_KEY" in keys and not [key for key in keys if key.encode() in ran.stdout]


@pytest.mark.parametrize("tier", HERE)
def test_a_fork_server_that_was_killed_is_started_again(tier: Tier) -> None:
    before, sandbox = set(psutil.Process().children(recursive=True)), Sandbox(tier)
    assert sandbox.run("print(1)").stdout == b"1\n"
    servers = set(psutil.Process().children(recursive=True)) - before
    for server in servers:
        with suppress(psutil.NoSuchProcess):
            server.kill()
    psutil.wait_procs(servers, 10)
    assert sandbox.run("print(2)").stdout == b"2\n"
    sandbox.close()


def test_a_tier_that_is_not_there_is_an_error_and_never_a_weaker_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    sandbox.why_unavailable.cache_clear()
    try:
        with pytest.raises(UserError, match=r"'bwrap' is not available.* no command 'bwrap'.*Available: process"):
            Sandbox("bwrap")
    finally:
        sandbox.why_unavailable.cache_clear()


def test_a_tier_that_the_kernel_does_not_allow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> object:
        raise ProcessError("a sandboxed process could not be started: unshare: Operation not permitted")

    monkeypatch.setattr(sandbox, "_run", refused)
    sandbox.why_unavailable.cache_clear()
    try:
        with pytest.raises(UserError, match="'namespace' is not available.*unshare: Operation not permitted"):
            Sandbox("namespace")
    finally:
        sandbox.why_unavailable.cache_clear()


CANNOT_START = """
from skyrl.errors import ProcessError
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from skyrl.sandbox.worker import Worker

try:
    Worker(Sandbox("process", modules=["no_such_module"]), "no_such_module", ResourceLimits())
except ProcessError:
    print("refused")
"""


def test_a_sandbox_that_cannot_start_leaves_no_folder_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", CANNOT_START], env=environment, capture_output=True, text=True, check=True
    )
    assert (ran.stdout, list(tmp_path.iterdir())) == ("refused\n", [])


@pytest.mark.parametrize("tier", HERE)
def test_programs_run_where_only_the_user_may_enter_the_temporary_folder(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they read lies in it, too."""
    tmp_path.chmod(0o700)
    (tmp_path / "read").mkdir(mode=0o755)
    (tmp_path / "read" / "word").write_text("found", encoding="utf-8")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = Sandbox(tier, readable=[tmp_path / "read"])
    try:
        ran = sandbox.run(f"open('own', 'w').write('x')\nprint(open({str(tmp_path / 'read' / 'word')!r}).read())")
    finally:
        sandbox.close()
    assert (ran.stdout, ran.stderr) == (b"found\n", b"")


def test_one_answer_cannot_poison_the_next() -> None:
    tests = [{"input": "", "output": "fine\n"}]
    code = find_env("code")
    spoil = "import builtins, os\nbuiltins.print = None\nos.environ['X'] = '1'\nopen('left', 'w').write('x')"
    assert code({"reward_spec": {"ground_truth": tests}}).step(f"```\n{spoil}\n```").reward == 0.0
    look = "import os\nprint('spoiled' if 'X' in os.environ or os.path.exists('left') else 'fine')"
    assert code({"reward_spec": {"ground_truth": tests}}).step(f"```\n{look}\n```").reward == 1.0


@pytest.mark.parametrize("tier", HERE)
def test_a_closed_folder_of_imports_hides_nothing_that_stands_beside_it(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that holds rewards is where Python imports from; only root may enter the one of the first run."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        closed, own = Path(parent, "closed"), Path(parent, "own")
        closed.mkdir(mode=0o700)
        own.mkdir(mode=0o755)
        (own / "reward.py").write_text("x = 1\n", encoding="utf-8")
        Path(parent).chmod(0o755)
        monkeypatch.syspath_prepend(str(closed))
        sandbox = Sandbox(tier, readable=[own], modules=["json"])
        try:
            ran = sandbox.run(f"print(open({str(own / 'reward.py')!r}).read())")
        finally:
            sandbox.close()
    assert ran.stdout == b"x = 1\n\n", ran


def test_the_fork_server_needs_no_file_that_its_sandbox_does_not_show(tmp_path: Path) -> None:
    """As in the tier `bwrap`, which not every machine has."""
    root = Path(skyrl.__file__).parent
    for name in fork_client._OURS:
        copy = tmp_path / "skyrl" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((root / name).read_bytes())
    begin = "import sys; sys.path.insert(0, sys.argv[1]); from skyrl.sandbox import fork_server; print('here')"
    words = [sys.executable, "-I", "-S", "-c", begin, str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("here\n", "")

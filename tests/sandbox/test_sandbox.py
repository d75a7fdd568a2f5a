from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

import psutil
import pytest

from skyrl.envs import find_env
from skyrl.errors import ProcessError, UserError
from skyrl.sandbox import sandbox
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox, why_unavailable
from skyrl.sandbox.tiers import TIERS, Tier
from tests.processes.clusters import soon
from tests.processes.left_over import left_over, process_beside
from tests.sandbox.escapes import ESCAPES, HOARDS, NEVER_END, OPEN, ROOTS, TWICE, table
from tests.sandbox.right_programs import A_HANDFUL, RIGHT

HERE = [tier for tier in TIERS if not why_unavailable(tier)]
"""What this machine has: every test below runs over all of them."""

SECURITY = Path(__file__).parents[2] / "SECURITY.md"

LIMITS = ResourceLimits(seconds=5.0, memory_bytes=1 << 30)
SHORT = ResourceLimits(seconds=0.4, cpu_seconds=2)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that only the user of the run may enter."""
    folder = tmp_path_factory.mktemp("closed")
    (folder / "open").mkdir(mode=0o755)
    (folder / "beside").write_text("secret")
    folder.chmod(0o700)
    return folder


@pytest.fixture(params=HERE, scope="module")
def made(request: pytest.FixtureRequest, closed: Path) -> Iterator[Sandbox]:
    """A sandbox of each tier, whose programs may read a folder inside a closed one."""
    found = Sandbox(request.param, readable=[closed / "open"])
    yield found
    found.close()


@pytest.fixture
def stands_for(tmp_path: Path, closed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What a program may want, by the word that stands for it. A server on loopback has a datagram socket of the same
    number, an abstract one of that name, and one on a file.
    """
    monkeypatch.setenv("SKYRL_SECRET", "1")
    secret, everybodys = tmp_path / "secret", Path(tempfile.gettempdir()) / f"skyrl-{uuid4().hex}"
    secret.write_text("secret", encoding="utf-8")
    secret.chmod(0o600)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
    ):
        port: int = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        abstract.bind(f"\0skyrl-canary-{port}")
        abstract.listen()
        file.bind(f"{everybodys}.socket")
        Path(f"{everybodys}.socket").chmod(0o777)
        file.listen()
        Thread(target=_answer, args=(server,), daemon=True).start()
        yield {
            "CLOSED": str(closed),
            "SECRET": str(secret),
            "SOCKET": f"{everybodys}.socket",
            "CANARY": str(everybodys),
            "MINE": str(tmp_path / "mine"),
            "HOME": str(Path.home()),
            "PORT": str(port),
            "RUN": str(os.getpid()),
        }
    for left in (everybodys, Path(f"{everybodys}.socket"), Path("/dev/shm") / f"skyrl-{port}"):
        left.unlink(missing_ok=True)


def _answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nx")


def test_at_least_one_tier_is_here_and_the_machine_of_the_tests_knows_the_first() -> None:
    assert "process" in HERE


@contextmanager
def neighbour(made: Sandbox) -> Iterator[None]:
    """Another program in the same sandbox, which has written a file into its folder and runs as long as the block."""
    writes = "with open('unseen', 'w') as file: file.write('x')\nimport os, time\nos.rename('unseen', 'neighbour')\n"
    with ThreadPoolExecutor(1) as beside:
        beside.submit(made.run, writes + "time.sleep(1000)", limits=ResourceLimits(seconds=200.0))
        assert soon(lambda: process_beside("neighbour") is not None)
        yield
        running = process_beside("neighbour")
        assert running is not None
        running.kill()


@pytest.mark.parametrize("wanted", ESCAPES)
def test_each_tier_stops_what_the_table_says_and_nothing_else(
    wanted: str, made: Sandbox, stands_for: dict[str, str]
) -> None:
    program, verdicts = ESCAPES[wanted]
    for name, value in stands_for.items():
        program = program.replace(name, value)
    with neighbour(made) if "neighbour" in program else nullcontext():
        for _ in range(2 if wanted in TWICE else 1):
            ran = made.run(program, limits=LIMITS)
    verdict = verdicts[TIERS.index(made.tier)]
    open_here = verdict == OPEN or (verdict == ROOTS and not made.record()["own_user_for_each_program"])
    assert (b"escaped" in ran.stdout) == open_here, ran


def test_there_are_as_many_attacks_as_promised() -> None:
    page = " ".join(SECURITY.read_text(encoding="utf-8").split())
    assert f"{len(FORGERIES)} programs that forge a reward" in page
    counted = f"{len(ESCAPES)} that try to get out, {len(HOARDS)} that hoard memory and {len(NEVER_END)} that never end"
    assert counted in page


def test_the_table_of_attacks_is_printed_in_the_page_on_security() -> None:
    assert table() in SECURITY.read_text(encoding="utf-8")


@pytest.mark.parametrize("where", HOARDS)
def test_more_memory_than_its_limit_in_all_processes_ends_a_program(where: str, made: Sandbox) -> None:
    ran = made.run(HOARDS[where], limits=ResourceLimits(seconds=120.0, memory_bytes=400 << 20))
    assert (ran.ended, ran.code) == ("exit", 137), ran
    assert left_over() == []


def test_a_folder_that_is_nested_deep_and_closed_is_removed(made: Sandbox) -> None:
    program = (
        "import os\nprint(os.getcwd(), flush=True)\nfor _ in range(1100):\n  os.mkdir('deep')\n  os.chdir('deep')\n"
        "open('file', 'w').close()\nos.chmod('.', 0)\nprint('done')"
    )
    folder, done = made.run(program).stdout.decode().split()
    assert done == "done"
    assert not Path(folder).exists() or list(Path(folder).iterdir()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in A_HANDFUL else pytest.mark.long) for name in RIGHT]
)
def test_a_right_program_prints_what_it_has_to(name: str, made: Sandbox) -> None:
    right = RIGHT[name]
    ran = made.run(right.program, right.stdin.encode(), ResourceLimits(seconds=60.0))
    assert (ran.ended, ran.code, ran.stdout.decode()) == ("exit", 0, right.printed), ran


def test_a_program_may_start_threads_however_many_the_run_itself_has(made: Sandbox) -> None:
    enough = Event()
    with ThreadPoolExecutor(100) as pool:
        for _ in range(100):
            pool.submit(enough.wait)
        ran = made.run(RIGHT["sixteen threads"].program)
        enough.set()
    assert ran.stdout == b"True\n", ran


def test_there_are_a_hundred_right_programs() -> None:
    assert len(RIGHT) >= 100


@pytest.mark.parametrize("kind", NEVER_END)
def test_what_never_ends_is_ended_and_leaves_nothing_behind(kind: str, made: Sandbox) -> None:
    ran = made.run(NEVER_END[kind], limits=SHORT)
    assert ran.ended in ("timeout", "output") or ran.code != 0 or "grandchild" in kind
    assert len(ran.stdout) <= SHORT.output_bytes
    assert left_over() == []


def test_the_folder_is_removed_and_links_in_it_are_not_followed(tmp_path: Path, made: Sandbox) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x", encoding="utf-8")
    ran = made.run(f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nprint(os.getcwd())")
    assert kept.read_text(encoding="utf-8") == "x"
    folder = Path(ran.stdout.decode().strip())
    assert not folder.exists() or list(folder.iterdir()) == []


def test_programs_read_and_print_and_end_with_their_code(made: Sandbox) -> None:
    text = "é" * 300_000
    ran = made.run(
        "import sys\nprint(sys.stdin.read())\nsys.exit(3)", text.encode(), ResourceLimits(output_bytes=1 << 20)
    )
    assert (ran.ended, ran.code, ran.stdout.decode()) == ("exit", 3, text + "\n")
    assert made.run("import asyncio, json, tomllib\nprint(json.dumps([1]))").stdout == b"[1]\n"
    assert b"ZeroDivisionError" in made.run("1 / 0").stderr


def test_programs_run_side_by_side(made: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        printed = list(pool.map(lambda number: made.run(f"print({number})").stdout, range(32)))
    assert printed == [f"{number}\n".encode() for number in range(32)]


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


FORGERIES = {
    "leaving early": "import os\nos._exit(0)",
    "leaving by SystemExit": "raise SystemExit(0)",
    "a friendly object": "class E:\n  def __eq__(self, o): return True\ndef add(a, b): return E()",
    "patching json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
    "printing first": "print(3)\nprint('true')\nimport os\nos._exit(0)",
    "an answer for every test": "def add(a, b): return True",
    "looking for the expected output": (
        "import gc, sys\n"
        "def add(a, b):\n"
        "  f = sys._getframe(1)\n"
        "  return f.f_globals.get('test', f.f_locals.get('output', f.f_locals.get('expected')))"
    ),
    "reading its own folder": (
        "import os\ndef add(a, b): return [open(f).read() for f in os.listdir('.') if os.path.isfile(f)]"
    ),
    "not a number": "def add(a, b): return float('nan')",
    "nested": "def add(a, b):\n  x = []\n  for _ in range(100000): x = [x]\n  return x",
}


@pytest.mark.parametrize("trick", FORGERIES)
def test_a_reward_cannot_be_forged(trick: str) -> None:
    tests = [{"fn_name": "add", "input": [1000, 271], "output": 1271}]
    env = find_env("code")({"reward_spec": {"ground_truth": tests}})
    assert env.step(f"```python\n{FORGERIES[trick]}\n```").reward == 0.0


def test_one_answer_cannot_poison_the_next() -> None:
    tests = [{"input": "", "output": "fine\n"}]
    code = find_env("code")
    spoil = "import builtins, os\nbuiltins.print = None\nos.environ['X'] = '1'\nopen('left', 'w').write('x')"
    assert code({"reward_spec": {"ground_truth": tests}}).step(f"```\n{spoil}\n```").reward == 0.0
    look = "import os\nprint('spoiled' if 'X' in os.environ or os.path.exists('left') else 'fine')"
    assert code({"reward_spec": {"ground_truth": tests}}).step(f"```\n{look}\n```").reward == 1.0

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import psutil
import pytest

from skyrl.envs import find_env
from skyrl.errors import UserError
from skyrl.processes import sandbox
from skyrl.processes.sandbox import Limits, Sandbox, Tier
from tests.processes.escapes import ESCAPES, NEVER_END

TIERS: tuple[Tier, ...] = ("process", "namespace")
LIMITS = Limits(seconds=5.0, memory_bytes=1 << 30)
SHORT = Limits(seconds=1.0, cpu_seconds=2)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> Tier:
    found: Tier = request.param
    return found


@pytest.fixture
def port() -> Iterator[int]:
    """A server on loopback, with a datagram socket of the same number and an abstract one of that name."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        number: int = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", number))
        abstract.bind(f"\0skyrl-canary-{number}")
        abstract.listen()
        Thread(target=_answer, args=(server,), daemon=True).start()
        yield number


def _answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nx")


@pytest.mark.parametrize("wanted", ESCAPES)
def test_each_tier_stops_what_the_table_says_and_nothing_else(
    wanted: str, tier: Tier, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_SECRET", "1")
    secret, canary = tmp_path / "home.txt", tmp_path / "canary"
    secret.write_text("secret", encoding="utf-8")
    program, stopped_by = ESCAPES[wanted]
    stands_for = {"HOME": secret, "PORT": port, "CANARY": canary, "RUN": os.getpid()}
    for name, value in stands_for.items():
        program = (
            program.replace(name, str(value)) if name != "CANARY" else program.replace("'CANARY'", repr(str(value)))
        )
    ran = Sandbox(tier).run(program, limits=LIMITS)
    assert (b"escaped" not in ran.stdout) == (tier in stopped_by), ran


@pytest.mark.parametrize("kind", NEVER_END)
def test_what_never_ends_is_ended_and_leaves_nothing_behind(kind: str, tier: Tier) -> None:
    begun = time.monotonic()
    ran = Sandbox(tier).run(NEVER_END[kind], limits=SHORT)
    assert time.monotonic() - begun < SHORT.seconds + 10  # of a machine that has other things to do
    assert ran.ended in ("timeout", "output") or ran.code != 0 or "grandchild" in kind
    assert len(ran.stdout) <= SHORT.output_bytes
    assert not [process for process in psutil.process_iter(["cmdline"]) if _is_of_a_sandbox(process)]


def _is_of_a_sandbox(process: psutil.Process) -> bool:
    mine = f"{os.getpid()}"
    try:
        line = " ".join(process.info["cmdline"] or ())
        return "sandbox_launch.py" in line and process.status() != psutil.STATUS_ZOMBIE and mine in _ancestors(process)
    except psutil.NoSuchProcess:
        return False


def _ancestors(process: psutil.Process) -> set[str]:
    """Its parents' numbers, and for one that has lost them, everybody's: it should not be there."""
    parents = {str(parent.pid) for parent in process.parents()}
    return parents if str(os.getpid()) in parents or len(parents) > 1 else parents | {str(os.getpid())}


def test_the_folder_is_removed_and_links_in_it_are_not_followed(tmp_path: Path, tier: Tier) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x", encoding="utf-8")
    ran = Sandbox(tier).run(f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nprint(os.getcwd())")
    assert kept.read_text(encoding="utf-8") == "x"
    assert not Path(ran.stdout.decode().strip()).exists()


def test_a_tier_that_is_not_there_is_an_error_and_never_a_weaker_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_is_available", lambda tier: tier == "process")
    with pytest.raises(UserError, match="'namespace' is not available"):
        Sandbox("namespace")


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

"""Every attack on every tier that the machine has: SECURITY.md says what each tier stops, and what it does not stop.

By default every tenth attack runs; `--long` runs all, and repeats them as an ordinary user where the tests run as root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from skyrl.envs.builtin.code import CodeEnv
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from skyrl.sandbox.tiers import TIERS
from tests.processes.clusters import soon
from tests.processes.left_over import a_test_begins, left_over, process_beside
from tests.sandbox.attacks import ALL_ESCAPES, ATTACKS, FORGERIES
from tests.sandbox.endless import HOARDS, NEVER_END
from tests.sandbox.escapes import TWICE, is_open
from tests.sandbox.forgeries import CALLED

ROOT = Path(__file__).parents[2]
SECURITY = ROOT / "SECURITY.md"
LIMITS = ResourceLimits(seconds=30.0, memory_bytes=1 << 30)
SHORT = ResourceLimits(seconds=0.4, cpu_seconds=2)


@pytest.fixture(autouse=True)
def _what_runs_already() -> None:
    a_test_begins()


def every_tenth(names: Iterable[str]) -> list[Any]:
    """Parameters of which nine out of ten are `long`."""
    return [pytest.param(name, marks=[pytest.mark.long] if at % 10 else []) for at, name in enumerate(names)]


@contextmanager
def neighbour(sandbox: Sandbox) -> Iterator[None]:
    """Another program in the same sandbox, which has written a file into its folder and runs as long as the block."""
    writes = "with open('unseen', 'w') as file: file.write('x')\nimport os, time\nos.rename('unseen', 'neighbour')\n"
    with ThreadPoolExecutor(1) as executor:
        executor.submit(sandbox.run, writes + "time.sleep(1000)", limits=ResourceLimits(seconds=200.0))
        assert soon(lambda: process_beside("neighbour") is not None)
        yield
        running = process_beside("neighbour")
        assert running is not None
        running.kill()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("escape", every_tenth(ALL_ESCAPES))
def test_each_tier_stops_what_the_table_says_and_nothing_else(
    escape: str, sandbox: Sandbox, stands_for: dict[str, str]
) -> None:
    program, verdicts = ALL_ESCAPES[escape]
    for name, value in stands_for.items():
        program = program.replace(name, value)
    with neighbour(sandbox) if "neighbour" in program else nullcontext():
        for _ in range(2 if escape in TWICE else 1):
            ran = sandbox.run(program, limits=LIMITS)
    verdict = verdicts[TIERS.index(sandbox.tier)]
    open_here = is_open(verdict, sandbox.record())
    assert (b"escaped" in ran.stdout) == open_here, ran
    assert b"SyntaxError" not in ran.stderr


@pytest.mark.parametrize("where", every_tenth(HOARDS))
def test_more_memory_than_its_limit_in_all_processes_ends_a_program(where: str, sandbox: Sandbox) -> None:
    ran = sandbox.run(HOARDS[where], limits=ResourceLimits(seconds=120.0, memory_bytes=400 << 20))
    assert (ran.ended, ran.code) == ("exit", 137), ran
    assert left_over() == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", every_tenth(NEVER_END))
def test_what_never_ends_is_ended_and_leaves_nothing_behind(kind: str, sandbox: Sandbox) -> None:
    ran = sandbox.run(NEVER_END[kind], limits=SHORT)
    assert ran.ended in ("timeout", "output") or ran.code != 0 or "child" in kind
    assert len(ran.stdout) <= SHORT.output_bytes
    assert left_over() == []


def grade(program: str, sandbox: Sandbox, *, is_called: bool) -> float:
    """The reward of an answer to: what are 1000 and 271 together?"""
    case = {"fn_name": "add", "input": [1000, 271], "output": 1271}
    if not is_called:
        case = {"input": "1000\n271\n", "output": "1271\n"}
    env = CodeEnv({"reward_spec": {"ground_truth": [case]}}, sandbox, LIMITS)
    return env.step(f"```python\n{program}\n```").reward


@pytest.mark.parametrize("trick", every_tenth(FORGERIES))
def test_a_reward_cannot_be_forged(trick: str, sandbox: Sandbox) -> None:
    assert grade(FORGERIES[trick], sandbox, is_called=trick in CALLED) == 0.0


def test_the_same_tasks_pay_for_right_answers(sandbox: Sandbox) -> None:
    assert grade("def add(a, b): return a + b", sandbox, is_called=True) == 1.0
    assert grade("print(int(input()) + int(input()))", sandbox, is_called=False) == 1.0


def test_there_are_as_many_attacks_as_the_page_on_security_says() -> None:
    page = " ".join(SECURITY.read_text(encoding="utf-8").split())
    assert ATTACKS >= 100
    assert (
        f"{ATTACKS} attacks on each tier: {len(ALL_ESCAPES)} programs that try to get out, {len(HOARDS)} that hoard "
        f"memory, {len(NEVER_END)} that never end, {len(FORGERIES)} that forge a reward"
    ) in page


@pytest.mark.long
def test_an_ordinary_user_has_the_same_results() -> None:
    """A test run as root repeats this folder as `nobody`, with all attacks and all right programs."""
    if os.geteuid() != 0:
        return  # the tests of this folder have just run as an ordinary user
    command = [sys.executable, "-m", "tests.sandbox.as_nobody", "-q", "--long", "-p", "no:cacheprovider"]
    result = subprocess.run([*command, "tests/sandbox"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]

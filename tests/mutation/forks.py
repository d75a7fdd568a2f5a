"""pytest in forks of a process that has imported the libraries: a mutant costs the import of this project alone."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

OPTIONS = ("-q", "-p", "no:cacheprovider", "--no-header", "--hypothesis-seed=0",
           "--ignore=tests/weight_sync/test_vllm_roads.py",  # starts vLLM in a process of its own
           "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip  # plugins are preloaded, too
FAILED_ITSELF = 70
"""Exit code of a fork in which an exception was raised that no test caught."""

CPU_SECONDS, SECONDS = 10, 60
"""Granted to every test, beside ten and forty times the CPU seconds that it needed without a mutant."""


def preload(modules: Iterable[str]) -> None:
    """Imports libraries by name; one that cannot be imported alone is left to whoever wants it."""
    for name in modules:
        with suppress(BaseException):
            importlib.import_module(name)


def in_a_fork(work: Callable[[], int], log: Path) -> int:
    """The exit code of `work` in a fork, or minus the signal that ended it: SIGXCPU or SIGALRM where a test of
    `run_tests` was past its deadline.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = FAILED_ITSELF
        try:
            os.setsid()
            with log.open("w", encoding="utf-8") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            code = int(work())
        except BaseException:  # noqa: BLE001 - there is nobody above to whom it could go
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what its tests started
    return os.waitstatus_to_exitcode(status)


def run_tests(tests: Mapping[str, float], path: Path, code: CodeType, current: Path) -> int:
    """pytest's exit code for these tests, given with their seconds, where the module at `path` is `code`. It stops at
    the first that fails, whose name is then in the file `current`.
    """
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return code if Path(self.path) == path else original(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]  # typed where it is inherited from
    return int(pytest.main([*OPTIONS, "-x", *tests], plugins=[Deadlines(tests, current)]))


class Deadlines:
    """A plugin of pytest: writes down which test runs, and ends the process where a test takes far longer than it did.

    The bounds are wide: a busy machine is not a mutant that is noticed.
    """

    def __init__(self, seconds: Mapping[str, float], current: Path) -> None:
        self._seconds, self._current = seconds, current
        self._allow(60.0)  # to collect
        current.write_text("", encoding="utf-8")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._current.write_text(nodeid, encoding="utf-8")
        self._allow(self._seconds.get(nodeid, 60.0))

    def _allow(self, seconds: float) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(
            resource.RLIMIT_CPU,
            (1 + int(used.ru_utime + used.ru_stime + CPU_SECONDS + 10 * seconds), resource.RLIM_INFINITY),
        )
        signal.alarm(int(SECONDS + 40 * seconds))


class Lines:
    """A plugin of pytest: which lines of a folder run when it is imported, and which each test runs, with its CPU
    seconds.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._prefix = root, str(folder)
        self._lines: set[tuple[str, int]] = set()
        self.imported: list[tuple[str, int]] = []
        self.tests: dict[str, tuple[float, list[tuple[str, int]]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        with self._looking():
            result = yield
        self.imported = self._seen()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        before = sum(os.times()[:4])
        with self._looking():
            result = yield
        self.tests[item.nodeid] = (sum(os.times()[:4]) - before, self._seen())
        return result

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._lines = set()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def _seen(self) -> list[tuple[str, int]]:
        return sorted((str(Path(file).relative_to(self._root)), line) for file, line in self._lines)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._note if frame.f_code.co_filename.startswith(self._prefix) else None

    def _note(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._note


def gather(root: Path, folder: Path, tests: Sequence[str], result: Path) -> int:
    """Runs the tests once, and writes what each of them runs, and the libraries that they import, to `result`."""
    lines = Lines(root, folder)
    status = int(pytest.main([*OPTIONS, *tests], plugins=[lines]))
    ours = ("skyrl", "tests", "property_tests", "conftest", "__", "test_", "_pytest", "pytest")
    libraries = [name for name in sys.modules if not name.startswith(ours)]
    found = {"tests": lines.tests, "imported": lines.imported, "libraries": libraries}
    result.write_text(json.dumps(found), encoding="utf-8")
    return status

"""pytest in forks of a process that has imported the libraries: a mutant costs the import of this project alone.

`collected.py` spares most mutants that, too.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

OPTIONS = ("-q", "-s", "-p", "no:cacheprovider", "--no-header", "--hypothesis-seed=0",
           "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip  # plugins are preloaded, too
FAILED_ITSELF = 70
"""Exit code of a fork in which an exception was raised that no test caught."""

NOTICED = frozenset({pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED})
"""Exit codes of pytest with which a mutant is killed: a test failed, or a file of tests could not be imported."""

CPU_SECONDS, SECONDS = 10, 60
"""Granted to every test, beside ten and forty times the CPU seconds that it needed without a mutant."""

_TEMPORARY = tempfile.gettempdir()
"""Where forks of forks have their folders, too: paths of sockets must be short."""


def preload(modules: Iterable[str]) -> None:
    """Imports libraries by name; one that cannot be imported alone is left to whoever wants it."""
    for name in modules:
        with suppress(BaseException):
            importlib.import_module(name)


def in_a_fork(work: Callable[[], int], log: Path) -> int:
    """The exit code of `work` in a fork that writes to `log`, or minus the signal that ended it: SIGXCPU or SIGALRM
    where a test was past its deadline. Temporary files of the fork are removed with it, however it ends.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=_TEMPORARY, ignore_cleanup_errors=True) as temporary:
        return _forked(work, log, temporary)


def _forked(work: Callable[[], int], log: Path, temporary: str) -> int:
    sys.stdout.flush()
    gc.freeze()  # what is here stays shared with the fork, whose collections leave it alone
    child = os.fork()
    if child == 0:
        code = FAILED_ITSELF
        try:
            os.setsid()
            os.environ["TMPDIR"] = tempfile.tempdir = temporary
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
    gc.unfreeze()
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what its tests started
    return os.waitstatus_to_exitcode(status)


def run_tests(tests: Mapping[str, float], path: Path, code: CodeType, current: Path) -> int:
    """pytest's exit code for these tests, given with their seconds, where the module at `path` is `code`. They run in
    this order up to the first that fails, whose name is then in the file `current`. A test may be given as its
    file, or as a folder.
    """
    import_as(path, code)
    files = dict.fromkeys(name.partition("::")[0] for name in tests)
    return int(pytest.main([*OPTIONS, "-x", *files], plugins=[Chosen(tests), Deadlines(tests, current)]))


def import_as(path: Path, code: CodeType) -> None:
    """From now on the module at `path` is imported as `code`."""
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return code if Path(self.path) == path else original(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]  # typed where it is inherited from


class Chosen:
    """A plugin of pytest: only these tests run, in this order, as far as they can be collected."""

    def __init__(self, tests: Iterable[str]) -> None:
        self._places = {name: index for index, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if self._place(item) >= 0), key=self._place)

    def _place(self, item: pytest.Item) -> int:
        """-1 where neither it, nor its file, nor a folder of it is one of them."""
        file = Path(item.nodeid.partition("::")[0])
        names = (item.nodeid, *map(str, (file, *file.parents)))
        return next((self._places[name] for name in names if name in self._places), -1)


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

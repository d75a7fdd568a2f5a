"""Tests that are collected once: a mutant of functions that have not run by then takes their place in a fork.

Import and collection cost seconds, most mutants are noticed by a test that takes milliseconds.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation.forks import OPTIONS, Deadlines, import_as

NOT_HERE = 71
"""Exit code for a mutant that only takes its place where its module is imported again."""

Run = Callable[[Mapping[str, float], Path, CodeType, Path], int]
"""`forks.run_tests`, or what does the same with tests that are collected already."""


def with_collected(folder: Path, tests: Sequence[str], work: Callable[[Run], object]) -> int:
    """Collects the tests of the package in `folder`, and does `work` in place of running them. pytest's exit code."""
    return int(pytest.main([*OPTIONS, *tests], plugins=[Collected(folder, work)]))


class Collected:
    """A plugin of pytest: gives `work` what `forks.run_tests` does, for use in forks."""

    def __init__(self, folder: Path, work: Callable[[Run], object]) -> None:
        self._folder, self._work = folder, work

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._functions = [
            candidate for candidate in gc.get_objects() if type(candidate) is FunctionType and self._is_ours(candidate)
        ]
        self._work(self.run)
        return True

    def _is_ours(self, function: FunctionType) -> bool:
        return Path(function.__code__.co_filename).is_relative_to(self._folder)

    def run(self, tests: Mapping[str, float], path: Path, code: CodeType, current: Path) -> int:
        """As `forks.run_tests`, or NOT_HERE. The process is of no further use."""
        if not self._put_in_place(path, code):
            return NOT_HERE
        items = [self._items[name] for name in tests]
        self._session.config.pluginmanager.register(Deadlines(tests, current))
        try:
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._session.testsfailed:
                    return pytest.ExitCode.TESTS_FAILED
        except (KeyboardInterrupt, pytest.exit.Exception):
            return pytest.ExitCode.INTERRUPTED
        return pytest.ExitCode.OK

    def _put_in_place(self, path: Path, code: CodeType) -> bool:
        """False where the change is in no function that exists, although the module is imported."""
        import_as(path, code)
        if not any(getattr(module, "__file__", None) == str(path) for module in list(sys.modules.values())):
            return True
        changed = {
            (function_code.co_qualname, function_code.co_firstlineno): function_code
            for function_code in _functions_of(code)
        }
        replaced = False
        for function in self._functions:
            old = function.__code__
            new = changed.get((old.co_qualname, old.co_firstlineno), old)
            if old.co_filename == str(path) and new != old:
                if new.co_freevars != old.co_freevars:
                    return False
                function.__code__, replaced = new, True
        return replaced


def _functions_of(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions_of(constant)

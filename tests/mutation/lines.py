"""A plugin of pytest that notes which lines of a package run at import, and which each test runs."""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.mutation.forks import OPTIONS

Line = tuple[str, int]


class Lines:
    """Which lines of a folder run when it is imported, and which each test runs, with its CPU seconds."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._prefix = root, str(folder)
        self._lines: set[Line] = set()
        self._imported: set[Line] = set()
        self.tests: dict[str, tuple[float, list[Line]]] = {}

    @property
    def imported(self) -> list[Line]:
        """Lines outside of functions, whenever they ran, and lines of functions that ran while tests were collected."""
        return self._named(self._imported)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        with self._looking():
            result = yield
        self._imported |= self._lines
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        before = sum(os.times()[:4])
        with self._looking():
            result = yield
        self.tests[item.nodeid] = (sum(os.times()[:4]) - before, self._named(self._lines))
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

    def _named(self, lines: set[Line]) -> list[Line]:
        return sorted((str(Path(file).relative_to(self._root)), line) for file, line in lines)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._note if frame.f_code.co_filename.startswith(self._prefix) else None

    def _note(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            in_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
            (self._lines if in_function else self._imported).add((frame.f_code.co_filename, frame.f_lineno))
        return self._note


def gather(root: Path, folder: Path, tests: Sequence[str], result: Path) -> int:
    """Runs the tests once, and writes what each of them runs, and the libraries that they import, to `result`."""
    lines = Lines(root, folder)
    status = int(pytest.main([*OPTIONS, *tests], plugins=[lines]))
    ours = ("skyrl", "tests", "property_tests", "conftest", "__", "test_", "_pytest", "pytest")
    libraries = [name for name in sys.modules if not name.startswith(ours)]
    content = {"tests": lines.tests, "imported": lines.imported, "libraries": libraries}
    result.write_text(json.dumps(content), encoding="utf-8")
    return status

"""One log file per rank: everything that a process prints or logs, and its last message if it dies.

    2026-11-21T14:40:53.123Z policy-1 step 12 INFO skyrl.learners.fsdp: gradient norm 0.51

Times are by the driver's clock: each process adds the difference that was measured when it started, so that the lines
of several machines can be put in order. A log that has grown large begins anew; what it held before is kept once, as
`policy-1.log.1`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from skyrl.processes.redaction import RedactedStream

LARGEST = 64 << 20
"""Size in bytes beyond which a log begins anew with the next step."""

BOUNDS_OF_RAY = {"RAY_ROTATION_MAX_BYTES": str(16 << 20), "RAY_ROTATION_BACKUP_COUNT": "1"}
"""Variables that bound each log of Ray's own processes, in bytes and in number of earlier files. Ray's own bounds are
several gigabytes for each process, in a folder of the system's disk."""

_EXIT = "ends itself with os._exit("
_FATAL = "Fatal Python error: "


class RankLog:
    """Redirects standard output and error (also of C code) and `logging` of this process to its log from now on."""

    def __init__(self, path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.name = path, name
        self.step, self.offset = 0, 0.0
        sys.stdout.flush()
        sys.stderr.flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        sys.stdout = _redacted_stream(1)
        sys.stderr = _redacted_stream(2)
        faulthandler.enable(2)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(self))
        logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
        logging.captureWarnings(True)
        _note_exits()

    def begin_step(self, step: int) -> None:
        """Put this step on later lines, the first of which begins the log anew if that is large.

        The file stays the same, since processes that this one has started, such as vLLM's, write to it, too: a renamed
        one would take their last words away. Lines that are written during the copy may be lost.
        """
        self.step = step
        with contextlib.suppress(OSError):  # the disk may be away or full; a log ends no run
            if os.fstat(2).st_size > LARGEST:
                shutil.copyfile(self.path, f"{self.path}.1")
                os.ftruncate(2, 0)

    def dump_stacks(self) -> None:
        """Write the stacks of every thread into the log."""
        faulthandler.dump_traceback(2, all_threads=True)


def _redacted_stream(descriptor: int) -> Any:
    return RedactedStream(open(descriptor, "w", buffering=1, closefd=False, errors="backslashreplace"))


class _Formatter(logging.Formatter):
    def __init__(self, log: RankLog) -> None:
        super().__init__()
        self.log = log

    def format(self, record: logging.LogRecord) -> str:
        when = record.created + self.log.offset
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(when))}.{int(when * 1000) % 1000:03d}Z"
        head = f"{stamp} {self.log.name} step {self.log.step} {record.levelname} {record.name}: "
        return head + super().format(record)


def _note_exits() -> None:
    """Write the exit code of a process that ends itself to the log, since Ray does not know it."""
    leave = os._exit

    def noted_exit(status: int) -> NoReturn:
        os.write(2, f"{_EXIT}{status})\n".encode())
        leave(status)

    os._exit = noted_exit


def last_words(path: Path) -> str:
    """The process's own message in its log about how it ended; empty if it was killed, which leaves no message."""
    for line in reversed(tail(path)):
        if line.startswith(_EXIT):
            return f"it called {line.removeprefix(_EXIT.removesuffix('os._exit('))}"
        if line.startswith(_FATAL):
            return line.removeprefix(_FATAL)
    return ""


def last_line(path: Path) -> str:
    """The last non-empty line of a log, at most 200 characters of it."""
    lines = [line.strip() for line in tail(path) if line.strip()]
    return lines[-1][:200] if lines else ""


def end_of(text: str, most: int) -> str:
    """The text in one line. If it has more than `most` characters, its last whole words after three dots."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"... {line[-most:].partition(' ')[2]}"


def tail(path: Path) -> list[str]:
    """The last lines of a log, of at most 32 KiB; none if it cannot be read here."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 32_768))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []  # it is on another machine, or was never made

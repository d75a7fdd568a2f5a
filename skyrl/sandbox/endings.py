"""Ends a program as `python program.py` does, up to the point where none of its output can be lost.

The interpreter that runs it was forked and is not finalized, which would take longer than most programs.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress


def code_of(work: Callable[[], object]) -> int:
    """Run `work` and return its exit code. An exception is written to standard error in one line."""
    try:
        work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        _say(str(end.code))
        return 1
    except BaseException as error:  # noqa: BLE001  # the exit code says that the program failed
        _say(f"{type(error).__name__}: {error}")
        return 1
    return 0


def end(code: int) -> None:
    """Wait for the program's threads, call its exit handlers, flush its buffers, and end the process."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            code = code_of(threading._shutdown) or code
        with suppress(BaseException):
            atexit._run_exitfuncs()
        if not _flushed():
            code = code or 1
        _close_what_is_open()
    finally:
        os._exit(code & 255)


def _flushed() -> bool:
    complete = True
    for stream in (sys.stdout, sys.__stdout__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            complete = False
    return complete


def _close_what_is_open() -> None:
    """Flush files that a program left open, by dropping all references to them."""
    with suppress(BaseException):
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        _flushed()


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace")[:2000])

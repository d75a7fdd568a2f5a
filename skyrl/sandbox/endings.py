"""How a program ends: as under `python program.py`, up to the point where nothing of it can be lost.

The interpreter that runs it was forked and is not taken down, which would take longer than most programs.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress


def code_of(work: Callable[[], object]) -> int:
    """Runs it; its exit code. What it raises is written on standard error in one line."""
    try:
        work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        _say(str(end.code))
        return 1
    except BaseException as error:  # noqa: BLE001  # its own business: the exit code says that it failed
        _say(f"{type(error).__name__}: {error}")
        return 1
    return 0


def end(code: int) -> None:
    """Wait for its threads, call what it registered for the end, write what is in buffers, and end the process."""
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
    whole = True
    for stream in (sys.stdout, sys.__stdout__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            whole = False
    return whole


def _close_what_is_open() -> None:
    """Files that a program left open are written when nothing refers to them any more."""
    with suppress(BaseException):
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        _flushed()


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace")[:2000])

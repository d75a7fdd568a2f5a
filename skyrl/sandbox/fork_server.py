"""The program behind `sandbox.py`: a warm interpreter that forks a confined process for each request.

    server          trusted; its standard input is a socket, and each message on it asks for one process
      supervisor    trusted; waits for the end or the deadline, and ends every descendant
        init        where there are namespaces: process 1 of them, which mounts, reaps, and takes all others with it
          program   gives up its rights, limits itself, and becomes the program

A request is JSON and open files: standard input, output and errors, and a socket on which the supervisor says how it
ended. Who closes the other end of that socket wants an end at once. Of the standard library alone.
"""

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from skyrl.sandbox import confinement

TIMED_OUT = 124
READY = b"ready"
READ_PATHS = "SKYRL_READ_PATHS"
"""Variable with the ways to what a program may read, as JSON, where the usual names do not lead there."""

LONGEST_REQUEST = 1 << 16
_LONGEST_WAIT = 1e9
"""Milliseconds that `poll` can count."""
_USED_OFTEN = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq"),
    *("itertools", "math", "operator", "queue", "random", "re", "sqlite3", "statistics", "string", "typing"),
    *("urllib.parse", "encodings.idna", "unicodedata"),
)
"""Modules that programs often import, read once for all of them."""


def main() -> None:
    """`SETTINGS` as JSON: namespaces, folder, paths, modules."""
    settings: dict[str, Any] = json.loads(sys.argv[2])
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries supervisors
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prepare(settings)
    requests.sendall(READY)
    while True:
        message, files, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 16)
        if not message:
            os._exit(0)
        try:
            if os.fork() == 0:
                requests.close()
                _supervise(settings, json.loads(message), files)
        except OSError as error:
            with socket.socket(fileno=os.dup(files[-1])) as control, suppress(OSError):
                control.sendall(f"broken: no process: {error}".encode())
        for number in files:
            os.close(number)


def _prepare(settings: dict[str, Any]) -> None:
    """Modules in memory, and readable again by whoever the programs run as."""
    sys.path.remove(sys.argv[1])
    sys.path += [path for path in settings["paths"] if path not in sys.path]
    for name in settings["modules"] or _USED_OFTEN:
        importlib.import_module(name)
    if not settings["modules"]:  # programs do not find skyrl
        for name in [name for name in sys.modules if name.partition(".")[0] == "skyrl"]:
            del sys.modules[name]
    if confinement.other_user() is not None:
        if settings["namespaces"]:
            confinement.make_reachable([*sys.path, sys.base_prefix, sys.prefix, *settings["readable"]])
        _open_to_all(settings["readable"])
    gc.freeze()  # what every process shares stays shared
    confinement.control(confinement.DUMPABLE, 0)  # nobody of the same user looks into it or changes it


def _open_to_all(readable: list[str]) -> None:
    """Modules and what is to be read, by ways that need no right to the folders above them; `READ_PATHS` tells them."""
    wanted = [path for path in (*sys.path, *readable) if os.path.isdir(path)]
    ways = {path: _path_to(path) for path in wanted if not confinement.is_reachable(path)}
    os.environ[READ_PATHS] = json.dumps(ways)
    if not ways:
        return
    sys.path[:] = [ways.get(path, path) for path in sys.path]
    sys.path_importer_cache.clear()
    for package in list(sys.modules.values()):
        folders = getattr(package, "__path__", None)
        if isinstance(folders, list):
            folders[:] = [_by_another_way(folder, ways) for folder in folders]


def _path_to(folder: str) -> str:
    return f"/proc/self/fd/{os.open(folder, os.O_PATH)}"


def _by_another_way(folder: str, ways: dict[str, str]) -> str:
    for path in sorted(ways, key=len, reverse=True):
        if folder.startswith(f"{path}/"):
            return ways[path] + folder[len(path) :]
    return folder


def _supervise(settings: dict[str, Any], request: dict[str, Any], files: list[int]) -> None:
    """Until nothing of it is left; says on the control socket how the program ended."""
    deadline = time.monotonic() + request["limits"]["seconds"]
    control = socket.socket(fileno=files.pop())
    code = TIMED_OUT
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        confinement.die_with_parent()
        confinement.control(confinement.CHILD_SUBREAPER, 1)
        os.setsid()
        user = confinement.other_user()
        if settings["namespaces"]:
            user = None if confinement.enter_namespaces(user) else user
        elif user is not None:
            os.chown(request["folder"], user, user)
        child = os.fork()
        if child == 0:
            (_init if settings["namespaces"] else _program)(settings, request, files, control, user)
        for number in files:
            os.close(number)
        code = _wait(child, control, deadline)
        _sweep(None if settings["namespaces"] else user)
        control.sendall(f"code: {code}".encode())
    except OSError as error:
        with suppress(OSError):
            control.sendall(f"broken: {error}".encode())
    finally:
        os._exit(0)


def _init(
    settings: dict[str, Any], request: dict[str, Any], files: list[int], control: socket.socket, user: int | None
) -> None:
    """Process 1: when it ends, the kernel ends all others."""
    try:
        confinement.die_with_parent()
        owner = os.getuid() if user is None else user
        confinement.mount_own(request["folder"], owner, request["limits"]["folder_bytes"])
        child = os.fork()
        if child == 0:
            _program(settings, request, files, control, user)
        for number in files:
            os.close(number)
        while True:
            pid, status = os.wait()
            if pid == child:
                os._exit(_code(status))
    except OSError as error:
        with suppress(OSError):
            control.sendall(f"broken: {error}".encode())
    finally:
        os._exit(TIMED_OUT)


def _program(
    settings: dict[str, Any], request: dict[str, Any], files: list[int], control: socket.socket, user: int | None
) -> None:
    """Become it. Whatever goes wrong before is told on the control socket; afterwards it is the program's affair."""
    code = 1
    try:
        folder = request["folder"]
        os.chdir(folder)
        os.setsid()
        source, *standard = files
        for number, file in enumerate(standard):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(HOME=folder, TMPDIR=folder)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        confinement.limit(request["limits"])
        confinement.give_up_rights(user)
        confinement.die_with_parent()
    except (OSError, ValueError) as error:
        with suppress(OSError):
            control.sendall(f"broken: {error}".encode())
        os._exit(1)
    control.close()
    try:
        if request["module"]:
            os.close(source)
            importlib.import_module(request["module"]).main()
        else:
            _write_program(source)
            sys.argv = ["program.py"]
            runpy.run_path("program.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:  # noqa: BLE001  # its own business: the exit code says that it failed
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:2000])
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = 1
    finally:
        os._exit(code & 255)


def _write_program(source: int) -> None:
    with open(source, "rb") as given, open("program.py", "wb") as file:
        shutil.copyfileobj(given, file)


def _wait(child: int, control: socket.socket, deadline: float) -> int:
    """The child's exit code, 128 + the number of the signal that ended it, or `TIMED_OUT`; then it is no more."""
    number = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(number, select.POLLIN)
    waiting.register(control, select.POLLIN)
    ready = [place for place, _ in waiting.poll(min(max(0.0, (deadline - time.monotonic()) * 1000), _LONGEST_WAIT))]
    in_time = number in ready
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return _code(status) if in_time else TIMED_OUT


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _sweep(user: int | None) -> None:
    """Kill every descendant: all of `user` at once, or else each, stopped first so that it has no more children."""
    if user is not None:
        _as_that_user(user, lambda: os.kill(-1, signal.SIGKILL))
    while True:
        stopped: set[int] = set()
        while user is None and (new := set(_descendants()) - stopped):
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(_descendants(), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _as_that_user(user: int, work: Callable[[], None]) -> None:
    """In a process that has no other rights."""
    child = os.fork()
    if child == 0:
        try:
            confinement.become(user)
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _descendants() -> list[int]:
    """Of this process, children before their own."""
    found = confinement.children(os.getpid())
    for pid in found:
        found += confinement.children(pid)
    return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

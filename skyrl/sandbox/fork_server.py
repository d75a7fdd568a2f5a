"""The program behind `sandbox.py`: a warm interpreter that forks a confined process for each request.

    server          trusted; its standard input is a socket, and each message on it asks for one process
      supervisor    trusted; waits for the end or the deadline, and ends every descendant
        init        process 1 of the namespaces, if there are some: mounts, reaps, and ends all others when it ends
          program   gives up its rights, limits itself, and becomes the program

A request is JSON and open files: standard input, output and errors, a control group if it has one, and a socket on
which the supervisor reports how it ended. Closing the other end of that socket ends the program at once. A command with
a service gets a network in its namespace, and the socket that listens there is sent first. Imports the standard library
alone.
"""

import atexit
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
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
LISTENING = b"listening"
SERVICE_PORT = 8000
"""Port on loopback at which a command reaches its service, in its network namespace."""

LONGEST_REQUEST = 1 << 16
_GLANCE = 0.02
"""Seconds between two checks of the memory of a program's processes."""
_USED_OFTEN = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq"),
    *("itertools", "math", "operator", "queue", "random", "re", "sqlite3", "statistics", "string", "typing"),
    *("urllib.parse", "encodings.idna", "unicodedata"),
)
"""Modules that programs often import, loaded once for all of them."""


def main() -> None:
    """Run the server. Its settings are JSON in the second argument: namespaces, folder, paths, modules."""
    settings: dict[str, Any] = json.loads(sys.argv[2])
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
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
    """Import modules, and make them readable for the users that programs run as."""
    sys.path.remove(sys.argv[1])
    sys.path += [path for path in settings["paths"] if path not in sys.path]
    for name in settings["modules"] or _USED_OFTEN:
        importlib.import_module(name)
    if not settings["modules"]:  # programs do not find skyrl
        for name in [name for name in sys.modules if name.partition(".")[0] == "skyrl"]:
            del sys.modules[name]
    if confinement.unused_user_id() is not None:
        confinement.make_reachable([*sys.path, sys.base_prefix, sys.prefix, *settings["readable"]])
    gc.freeze()  # pages that all processes share stay shared
    confinement.control(confinement.DUMPABLE, 0)  # no process of the same user can read or change its memory


def _supervise(settings: dict[str, Any], request: dict[str, Any], files: list[int]) -> None:
    """Run the program, wait until nothing of it is left, and report on the control socket how it ended."""
    deadline = time.monotonic() + request["limits"]["seconds"]
    control = socket.socket(fileno=files.pop())
    group = files.pop() if request["group"] else None
    kills = _kills_in(group)
    code = TIMED_OUT
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        confinement.die_with_parent()
        confinement.control(confinement.CHILD_SUBREAPER, 1)
        os.setsid()
        user = confinement.unused_user_id()
        if settings["namespaces"]:
            user = None if confinement.enter_namespaces(user) else user
        elif user is not None:
            os.chown(request["folder"], user, user, follow_symlinks=False)
        if request["service"]:
            with confinement.listen_on_loopback(SERVICE_PORT) as listener:
                socket.send_fds(control, [LISTENING], [listener.fileno()])
        child = os.fork()
        if child == 0:
            if group is not None and os.geteuid() == 0:
                _join_group(group)
            if group is not None:
                os.close(group)
            (_init if settings["namespaces"] else _program)(settings, request, files, control, user)
        for number in files:
            os.close(number)
        limit = request["limits"]["memory_bytes"]
        code = _wait(child, control, deadline, lambda: _uses_more_than(limit) or _kills_in(group) > kills)
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
    """Process 1 of the namespaces: when it ends, the kernel ends all others."""
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
    """Run the program in this process. Setup errors go to the control socket; later ones show in the exit code."""
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
        _open_standard_streams()
        confinement.limit(request["limits"], own_user=settings["namespaces"] or user is not None)
        confinement.give_up_rights(user, own_network=request["service"])
        confinement.die_with_parent()
    except (OSError, ValueError) as error:
        with suppress(OSError):
            control.sendall(f"broken: {error}".encode())
        os._exit(1)
    control.close()
    _close_all_but(source)
    if request["command"]:
        os.close(source)
        code = _exit_code(lambda: _become_command(request))
    elif request["module"]:
        os.close(source)
        code = _exit_code(importlib.import_module(request["module"]).main)
    else:
        code = _exit_code(lambda: _run_program(source))
    _end(code)


def _open_standard_streams() -> None:
    """Open the standard streams, including those that a program returns to after it has redirected its output."""
    streams = {
        "stdin": open(0, encoding="utf-8", errors="surrogateescape", closefd=False),  # noqa: SIM115 - stays open
        "stdout": open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False),  # noqa: SIM115 - stays open
        "stderr": open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False),  # noqa: SIM115 - stays open
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_program(source: int) -> None:
    """Run a file like `python program.py`: it is the module `__main__`, and imports from its own folder."""
    with open(source, "rb") as source_file, open("program.py", "wb") as file:
        shutil.copyfileobj(source_file, file)
    sys.argv = ["program.py"]
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader("__main__", "program.py")
    spec = importlib.util.spec_from_loader("__main__", loader)
    assert spec is not None, "there is a loader"
    program = importlib.util.module_from_spec(spec)
    program.__spec__ = None
    sys.modules["__main__"] = program
    loader.exec_module(program)


def _become_command(request: dict[str, Any]) -> None:
    """Replace this process by the command. Raises OSError if it cannot be executed; never returns otherwise."""
    environment = {**request["environment"], "HOME": request["folder"], "TMPDIR": request["folder"]}
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and a program would inherit
    os.execvpe(request["command"][0], request["command"], environment)


def _close_all_but(kept: int) -> None:
    """Close every file that is open here for whatever reason, except the standard streams and one more."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with suppress(OSError):
                os.close(int(name))


def _exit_code(work: Callable[[], object]) -> int:
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


def _end(code: int) -> None:
    """End the process as `python program.py` does, up to the point where none of its output can be lost: wait for the
    program's threads, call its exit handlers, and flush its buffers. The interpreter was forked and is not finalized,
    which would take longer than most programs.
    """
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            code = _exit_code(threading._shutdown) or code
        with suppress(BaseException):
            atexit._run_exitfuncs()
        if not _flushed():
            code = code or 1
        with suppress(BaseException):  # files that the program left open are flushed with the last reference to them
            vars(sys.modules["__main__"]).clear()
            gc.collect()
            _flushed()
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


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace")[:2000])


def _wait(child: int, control: socket.socket, deadline: float, is_over: Callable[[], bool]) -> int:
    """Wait for the child, or kill it. Returns its exit code, 128 + the signal that ended it, or `TIMED_OUT`.

    A program whose processes together exceed the memory limit is killed with SIGKILL, as the kernel does.
    """
    number = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(number, select.POLLIN)
    waiting.register(control.fileno(), select.POLLIN)
    ended, killed, is_asked = False, False, False
    while not (ended or killed or is_asked) and (left := deadline - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in waiting.poll(min(left, _GLANCE) * 1000)]
        ended, is_asked = number in ready, control.fileno() in ready
        killed = not ended and is_over()
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return _code(status) if ended or killed else TIMED_OUT


def _uses_more_than(limit: int) -> bool:
    """Whether the processes that descend from this one use more than `limit` bytes.

    Resident pages are counted first, which counts shared pages once for each process. If that exceeds the limit, each
    page is divided by the number of its users; a process that hides its pages is still counted in full.
    """
    processes: list[int] = []
    if os.path.exists("/proc/self/stat"):
        processes = confinement.descendants(os.getpid())
    else:  # in namespaces, /proc shows the program alone, without this process
        with suppress(OSError):
            processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if sum(map(_resident, processes)) <= limit:
        return False
    return sum(map(_share, processes)) > limit


def _join_group(group: int) -> None:
    """Put this process, and all that it starts, into the control group of this descriptor."""
    procs = os.open("cgroup.procs", os.O_WRONLY, dir_fd=group)
    try:
        os.write(procs, b"0")
    finally:
        os.close(procs)


def _kills_in(group: int | None) -> int:
    """Number of processes of the control group that the kernel has killed for its limit; 0 without a group."""
    for name in ("memory.events", "memory.oom_control") if group is not None else ():
        with suppress(OSError), open(os.open(name, os.O_RDONLY, dir_fd=group), encoding="ascii") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _resident(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _share(pid: int) -> int:
    with suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss:", "SwapPss:")))
    return _resident(pid)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _sweep(user: int | None) -> None:
    """Kill every descendant: all of `user` at once, or else one by one, stopped first so that they start no others.
    Then remove, with the rights of `user`, what it has left in /dev/shm.
    """
    if user is not None:
        _run_as_user(user, lambda: os.kill(-1, signal.SIGKILL))
    while True:
        stopped: set[int] = set()
        while user is None and (new := set(confinement.descendants(os.getpid())) - stopped):
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(confinement.descendants(os.getpid()), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(0.001)
    if user is not None and _left_in_memory(user):
        _run_as_user(user, lambda: _remove(_left_in_memory(user)))


def _left_in_memory(user: int) -> list[str]:
    """Files of this user in /dev/shm."""
    files = []
    with suppress(OSError), os.scandir("/dev/shm") as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == user:
                    files.append(entry.path)
    return files


def _remove(files: Iterable[str]) -> None:
    for file in files:
        with suppress(OSError):
            shutil.rmtree(file) if os.path.isdir(file) and not os.path.islink(file) else os.unlink(file)


def _run_as_user(user: int, work: Callable[[], None]) -> None:
    """Run `work` in a new process with the rights of `user` alone."""
    child = os.fork()
    if child == 0:
        try:
            confinement.become(user)
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

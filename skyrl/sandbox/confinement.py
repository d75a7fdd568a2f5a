"""Confines a process before it becomes an untrusted program: rights, visible files, space. Uses Linux system calls.

Only `fork_server.py` uses it, in processes of one thread. Imports the standard library alone.
"""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

from skyrl.sandbox import landlock, system_calls

NO_NEW_PRIVILEGES, PARENT_DEATH_SIGNAL, CHILD_SUBREAPER, DUMPABLE = 38, 1, 36, 4
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES, _NO_EXEC = 0x1000, 0x4000, 0x40000, 2, 4, 8
_SET_INTERFACE_FLAGS, _INTERFACE_UP = 0x8914, 1
_MOUNT_SETATTR, _HERE, _WHOLE_TREE, _READ_ONLY = 442, -100, 0x8000, 1
_OTHER_USERS = ((0x70000000, 1 << 22), (20_000, 40_000))
"""Ranges (first, count) of user ids that no account has. The process id is added, so that no two processes have the
same. The second range is for containers with fewer user ids."""

_libc = ctypes.CDLL(None, use_errno=True)


def control(option: int, value: int) -> None:
    """Call `prctl`; an option that this kernel does not know is ignored."""
    _libc.prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Have this process killed when the one that forked it ends."""
    control(PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def unused_user_id() -> int | None:
    """A user id for this process alone, if it is root and such ids exist; otherwise None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="ascii") as lines:
        ranges = [tuple(map(int, line.split())) for line in lines]
    for other, many in _OTHER_USERS:
        if any(first <= other and other + many <= first + count for first, _, count in ranges):
            return other + os.getpid() % many
    return None


def become(user: int) -> None:
    """Change to this user for good, giving up root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def is_reachable(path: str) -> bool:
    """Whether any user may reach this file or folder and read it."""
    parts = path.split("/")
    try:
        above = [os.stat("/".join(parts[:length]) or "/").st_mode for length in range(1, len(parts))]
        return all(mode & 0o001 for mode in above) and bool(os.stat(path).st_mode & 0o004)
    except OSError:
        return False


def enter_namespaces(user: int | None) -> bool:
    """Enter new namespaces of mounts, IPC and network, and of processes for the next child. True if this process had to
    become `user` for it.

    Raises OSError if the kernel does not allow it.
    """
    new = NEW_MOUNTS | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
    if user is not None and _libc.unshare(new) == 0:
        return False
    if user is not None:
        become(user)
    control(DUMPABLE, 1)  # so that it owns its files below /proc again
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(NEW_USER | new), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return user is not None


def mount_own(folder: str, owner: int, room: int) -> None:
    """Mount, as process 1, a new /proc, an empty `folder` and an empty /dev/shm (semaphores of multiprocessing) with
    `room` bytes each; nothing else can be written.
    """
    _mount("", "/", "", _PRIVATE | _RECURSIVE)
    _mount("proc", "/proc", "proc", _NO_SUID | _NO_DEVICES | _NO_EXEC)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _WHOLE_TREE, attributes, 32), "mount_setattr")
    options = f"size={room},nr_inodes=20000,mode=700,uid={owner},gid={owner}"
    for path in (folder, "/dev/shm"):
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", _NO_SUID | _NO_DEVICES, options)


def make_reachable(paths: list[str]) -> None:
    """Make paths readable for other users, in new mounts of this process: folders that only root may enter are hidden
    except for these paths. A path that is itself closed stays as it is. Raises OSError if the kernel does not allow it.
    """
    gates = {path: gate for path in dict.fromkeys(paths) if os.path.exists(path) and (gate := _closed_parent(path))}
    if not gates:
        return
    hidden = list(gates)
    message = f"programs cannot see {hidden[0]}, in a folder that only root may enter, without new mounts"
    _check(_libc.unshare(NEW_MOUNTS), message)
    _mount("", "/", "", _PRIVATE | _RECURSIVE)
    kept = {path: os.open(path, os.O_PATH) for path in hidden}
    folders = {path for path in hidden if os.path.isdir(path)}
    for gate in sorted(set(gates.values())):
        _mount("tmpfs", gate, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")
    for path in sorted(hidden, key=len):
        if os.path.exists(path):  # inside one that was there before
            continue
        os.makedirs(path if path in folders else os.path.dirname(path), mode=0o755, exist_ok=True)
        if path not in folders:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(f"/proc/self/fd/{kept[path]}", path, "", _BIND | _RECURSIVE)
    for number in kept.values():
        os.close(number)


def limit(limits: dict[str, float], *, own_user: bool) -> None:
    """Limit this process and all its descendants.

    The kernel counts the processes and threads of a user on the whole machine. If the program has no user of its own,
    the number of all that run is added to its limit, so that processes of the run itself do not make a program fail.
    """
    others = 0 if own_user else _processes_and_threads() + 3 * int(limits["processes"])
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, others + limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        ceiling = resource.getrlimit(name)[1]
        most = int(value) if ceiling == resource.RLIM_INFINITY else min(int(value), ceiling)
        resource.setrlimit(name, (most, most))


def _processes_and_threads() -> int:
    """Number of processes and threads on the whole machine."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return int(file.read().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 1 << 15


def listen_on_loopback(port: int) -> socket.socket:
    """Bring up loopback in the network namespace of this process, and return a socket that listens on 127.0.0.1.

    Raises OSError if the kernel does not allow it.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    request = struct.pack("16sh14x", b"lo", _INTERFACE_UP)
    fcntl.ioctl(listener, _SET_INTERFACE_FLAGS, request)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def give_up_rights(user: int | None, *, own_network: bool) -> None:
    """Drop all rights, irrevocably; the last step of a process before it executes a program, in its own folder.
    `own_network` still allows IPv4 sockets, for a process in a network namespace of its own.
    """
    if user is not None and os.geteuid() == 0:
        become(user)
    control(NO_NEW_PRIVILEGES, 1)
    landlock.restrict()
    system_calls.refuse(own_network=own_network)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, none), "capset")
    control(DUMPABLE, 1)


def descendants(process: int) -> list[int]:
    """All descendants of a process: its children, then theirs, and so on."""
    pids = children(process)
    for pid in pids:
        pids += children(pid)
    return pids


def children(parent: int) -> list[int]:
    """Processes that any thread of `parent` started."""
    if not os.path.exists("/proc/thread-self/children"):  # a kernel that was built without these files
        return _children_by_looking_at_all(parent)
    pids: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            pids += _started_by(f"/proc/{parent}/task/{thread}/children")
    return pids


def _started_by(file: str) -> list[int]:
    """Process numbers in a `children` file of /proc; none if its thread has ended."""
    with suppress(OSError), open(file, encoding="ascii") as children:
        return [int(word) for word in children.read().split()]
    return []


def _children_by_looking_at_all(parent: int) -> list[int]:
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:
                if int(stat.read().rpartition(b")")[2].split()[1]) == parent:
                    pids.append(int(name))
    return pids


def _closed_parent(path: str) -> str | None:
    """The folder above the path, nearest to the root, that not every user may enter; None if there is none."""
    parts = path.split("/")
    for length in range(2, len(parts)):
        folder = "/".join(parts[:length])
        if not os.stat(folder).st_mode & 0o001:
            return folder
    return None


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    encoded = [text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _check(result: int, message: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{message}: {os.strerror(number)}")

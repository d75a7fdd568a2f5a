"""Programs that try to get out of a sandbox, and what each tier can do about them: the table of SECURITY.md.

Each prints `escaped` if it got what it wanted. In the programs, SECRET stands for a file that only the run's user may
read, PORT for a server on loopback, SOCKET for one on a file that everybody may use, CANARY for a file that must not
appear where everybody may write, CLOSED for a folder that only the run's user may enter, in which
`open` may be read and `beside` may not, MINE for one where only the run's user may, HOME for the run's home folder, RUN
for the number of the run's process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Verdict = Literal["stopped", "only a run of root's", "**not stopped**"]
"""`only a run of root's`: stopped there, since each program then has a user of its own."""

STOPPED: Verdict = "stopped"
ROOTS: Verdict = "only a run of root's"
OPEN: Verdict = "**not stopped**"
ALL, BUT_PROCESS, BUT_BWRAP = (STOPPED, STOPPED, STOPPED), (OPEN, STOPPED, STOPPED), (OPEN, OPEN, STOPPED)
ROOTS_FIRST, ROOTS_TWO = (ROOTS, STOPPED, STOPPED), (ROOTS, ROOTS, STOPPED)

ESCAPES: Mapping[str, tuple[str, tuple[Verdict, Verdict, Verdict]]] = {
    # what it wants: the program, and what `process`, `namespace` and `bwrap` do about it
    "an environment variable of the run": (
        "import os\nprint('escaped' if 'SKYRL_SECRET' in os.environ else 'no')",
        ALL,
    ),
    "the run's home folder, by its name": (
        "import os\nprint('escaped' if os.path.expanduser('~') == 'HOME' else 'no')",
        ALL,
    ),
    "the environment of the run's process": (
        "print('escaped' if open('/proc/RUN/environ', 'rb').read() else 'no')",
        ROOTS_FIRST,
    ),
    "an open file of the run": (
        "import os, sys\n"
        "for fd in range(3, 64):\n"
        "  try: os.fstat(fd)\n"
        "  except OSError: continue\n"
        "  link = os.readlink(f'/proc/self/fd/{fd}')\n"
        "  if not link.startswith(('/proc', os.getcwd(), sys.base_prefix)): print('escaped')",
        ALL,
    ),
    "a server on loopback": (
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint('escaped')",
        ALL,
    ),
    "a server on loopback, by HTTP": (
        "import urllib.request as u\nu.urlopen('http://localhost:PORT/', timeout=1)\nprint('escaped')",
        ALL,
    ),
    "a datagram to loopback": (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('127.0.0.1', PORT)); s.send(b'x')\n"
        "print('escaped')",
        ALL,
    ),
    "the machine below a virtual one (vsock)": ("import socket\nsocket.socket(40)\nprint('escaped')", ALL),
    "an abstract socket": (
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('\\0skyrl-canary-PORT')\nprint('escaped')",
        BUT_PROCESS,
    ),
    "a socket file that everybody may use": (
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('SOCKET')\nprint('escaped')",
        BUT_BWRAP,
    ),
    "a file that only the run's user may read": ("print('escaped' if open('SECRET').read() else '')", ROOTS_TWO),
    "a file that everybody may read": ("print('escaped' if open('/etc/passwd').read() else '')", BUT_BWRAP),
    "a file beside what it may read, in a folder that only the run's user may enter": (
        "import os\n"
        "for place in ['CLOSED/open', *(f'/proc/self/fd/{fd}' for fd in range(256))]:\n"
        "  for up in range(1, 12):\n"
        "    try: found = open(place + '/..' * up + '/beside').read()\n"
        "    except OSError: continue\n"
        "    print('escaped' if found else '')",
        ROOTS_TWO,
    ),
    "to write where only the run's user may": ("open('MINE', 'w').write('x')\nprint('escaped')", ROOTS_FIRST),
    "to write where everybody may": ("open('CANARY', 'w').write('x')\nprint('escaped')", BUT_PROCESS),
    "a look at other processes": (
        "import os\nprint('escaped' if sum(p.isdigit() for p in os.listdir('/proc')) > 4 else 'no')",
        BUT_PROCESS,
    ),
    "a signal to the run": ("import os\nos.kill(RUN, 0)\nprint('escaped')", ROOTS_FIRST),
    "to kill the process that would end its children, and so leave one behind": (
        "import os, signal, time\n"
        "boss = os.getppid()\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  os.kill(boss, signal.SIGKILL)\n"
        "  time.sleep(0.2)\n"
        "  try: os.kill(boss, 0)\n"
        "  except ProcessLookupError: print('escaped', flush=True)\n"
        "  os._exit(0)\n"
        "time.sleep(0.4)",
        ROOTS_FIRST,
    ),
    "the memory of the process above it": (
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')\nprint('escaped')",
        ALL,
    ),
    "to attach to the process above it": (
        "import ctypes, os\nprint('escaped' if ctypes.CDLL(None).ptrace(16, os.getppid(), None, None) == 0 else 'no')",
        ALL,
    ),
    "the folder of another answer that runs beside it": (
        "import glob, os\n"
        "for file in glob.glob(os.path.dirname(os.getcwd()) + '/skyrl-sandbox-*/neighbour'):\n"
        "  if open(file).read(): print('escaped')",
        ROOTS_FIRST,
    ),
    "a message to the next answer, in shared memory": (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "left = libc.shmget(PORT, 64, 0)\n"
        "if left >= 0: libc.shmctl(left, 0, None); print('escaped')\n"
        "else: libc.shmget(PORT, 64, 0o1666)",
        ALL,
    ),
    "a message to the next answer, in /dev/shm": (
        "import os\n"
        "if os.path.exists('/dev/shm/skyrl-PORT'): print('escaped')\n"
        "else: open('/dev/shm/skyrl-PORT', 'w').write('x')",
        BUT_PROCESS,
    ),
    "the privileges of a set-uid program": (
        "print('escaped' if 'NoNewPrivs:\\t0' in open('/proc/self/status').read() else 'no')",
        ALL,
    ),
    "to be root": ("import os\nos.setuid(0)\nprint('escaped')", ALL),
    "to mount something": (
        "import ctypes, os\n"
        "print('escaped' if ctypes.CDLL(None).mount(b'x', os.getcwd().encode(), b'tmpfs', 0, b'') == 0 else 'no')",
        ALL,
    ),
    "higher limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\nprint('escaped')",
        ALL,
    ),
    "more memory than its limit": ("x = bytearray(3 << 30)\nprint('escaped')", ALL),
    "memory in files without a name": ("import os\nos.memfd_create('x')\nprint('escaped')", ALL),
    "a file larger than its limit": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "f = open('big', 'wb')\nfor _ in range(64): f.write(b'x' * (1 << 20))\nf.flush()\nprint('escaped')",
        ALL,
    ),
    "more on disk than its limit, in many files": (
        "for name in range(8):\n  with open(str(name), 'wb') as f: f.write(b'x' * (12 << 20))\nprint('escaped')",
        BUT_PROCESS,
    ),
    "more processes than its limit": (
        "import os, time\nfor _ in range(80):\n  if os.fork() == 0: time.sleep(9)\nprint('escaped')",
        ROOTS_FIRST,
    ),
    "many open files": ("fs = [open('/dev/null') for _ in range(500)]\nprint('escaped')", ALL),
    "a core dump": (
        "import resource\nprint('escaped' if resource.getrlimit(resource.RLIMIT_CORE)[1] else 'no')",
        ALL,
    ),
    "the modules of the run": ("import skyrl\nprint('escaped')", ALL),
    "the packages of the run's Python": ("import torch\nprint('escaped')", ALL),
    "namespaces of its own, and with them more of the kernel": (
        "import ctypes\nprint('escaped' if ctypes.CDLL(None).unshare(0x10000000) == 0 else 'no')",
        ALL,
    ),
}
TWICE = ("a message to the next answer, in shared memory", "a message to the next answer, in /dev/shm")
"""The second run reads what the first has left."""

NEVER_END: Mapping[str, str] = {
    "a loop": "while True: pass",
    "a sleep": "import time\ntime.sleep(1000)",
    "a sleep deaf to signals": (
        "import signal, time\n"
        "for s in range(1, 32):\n"
        "  try: signal.signal(s, signal.SIG_IGN)\n"
        "  except OSError: pass\n"
        "time.sleep(1000)"
    ),
    "a gigabyte of print": "while True: print('x' * 1000000)",
    "a gigabyte of errors": "import sys\nwhile True: sys.stderr.write('x' * 1000000)",
    "a grandchild that keeps the output open": "import os, time\nif os.fork() == 0: time.sleep(1000)",
    "a grandchild in a session of its own": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)"
    ),
    "a tower": "print(9 ** 9 ** 9)",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "a waiting read": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "forks": ("import os, time\nfor _ in range(40):\n  if os.fork() == 0:\n    time.sleep(1000)\ntime.sleep(1000)"),
    "forks without end": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "a stop of itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}
"""They run until somebody ends them, and all that they started."""


HOARDS: Mapping[str, str] = {
    "in its children together": (
        "import os, signal\n"
        "for _ in range(11):\n"
        "  if os.fork() == 0: break\n"
        "x = b'x' * (60 << 20)\n"
        "while True: signal.pause()"
    ),
    "in memory that its children share": (
        "import mmap, os, signal\n"
        "for _ in range(11):\n"
        "  if os.fork() == 0: break\n"
        "x = mmap.mmap(-1, 60 << 20)\n"
        "x.write(b'x' * (60 << 20))\n"
        "while True: signal.pause()"
    ),
}
"""They hold 720 MB, none of their processes more than 150, and wait until somebody ends them."""


def table() -> str:
    """As SECURITY.md has it."""
    lines = ["| what a program wants | `process` | `namespace` | `bwrap` |", "|---|---|---|---|"]
    lines += [f"| {wanted} | {' | '.join(verdicts)} |" for wanted, (_, verdicts) in ESCAPES.items()]
    lines += [f"| more memory than its limit, {where} | {' | '.join(['ended'] * 3)} |" for where in HOARDS]
    lines += [f"| never to end: {kind} | {' | '.join(['ended'] * 3)} |" for kind in NEVER_END]
    return "\n".join(lines)

"""Programs that try to reach the network, files, other processes and other answers, and what each tier does about it.

Each prints `escaped` if it got what it wanted. Words in capitals stand for what the fixture `stands_for` has made:
SECRET is a file that only the run's user may read, PORT a server on loopback, SOCKET one on a file that everybody may
use, CANARY a file that must not appear where everybody may write, CLOSED a folder that only the run's user may enter,
in which `open` may be read and `beside` may not, MINE a file that is not there, where only the run's user may write,
THEIRS one that is there, SHARED a folder in which everybody may write, with a folder `guest` of that kind, HOME the
run's home folder, RUN the number of the run's process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

Verdict = Literal[
    "stopped",
    "only as root",
    "as root, or by Landlock",
    "as root, or by Landlock 6",
    "only by Landlock",
    "only by Landlock 6",
    "**not stopped**",
]
"""`only as root`: stopped there, since each program then has a user of its own; `by Landlock`: where the kernel has it,
in version 3 or in the one that is named.
"""

STOPPED: Verdict = "stopped"
ROOTS: Verdict = "only as root"
OPEN: Verdict = "**not stopped**"
APART: Verdict = "as root, or by Landlock"
UNSIGNALLED: Verdict = "as root, or by Landlock 6"
ALL, BUT_PROCESS, BUT_BWRAP = (STOPPED, STOPPED, STOPPED), (OPEN, STOPPED, STOPPED), (OPEN, OPEN, STOPPED)
ROOTS_FIRST, ROOTS_TWO = (ROOTS, STOPPED, STOPPED), (ROOTS, ROOTS, STOPPED)
APART_FIRST, UNSIGNALLED_FIRST = (APART, STOPPED, STOPPED), (UNSIGNALLED, STOPPED, STOPPED)


def is_open(verdict: Verdict, sandbox: Mapping[str, object]) -> bool:
    """Whether programs of a sandbox with this record get what the verdict is about."""
    _, by_landlock, version = verdict.partition("by Landlock")
    if by_landlock and cast(int, sandbox["landlock"]) >= int(version or 3):
        return False
    if "as root" in verdict:
        return not sandbox["own_user_for_each_program"]
    return verdict != STOPPED


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
        APART_FIRST,
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
        ("only by Landlock 6", STOPPED, STOPPED),
    ),
    "a socket file that everybody may use": (
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('SOCKET')\nprint('escaped')",
        BUT_BWRAP,
    ),
    "a file that only the run's user may read": ("print('escaped' if open('SECRET').read() else '')", ROOTS_TWO),
    "a file that only the run's user may read, by a link to it": (
        "import os\nos.symlink('SECRET', 'link')\nprint('escaped' if open('link').read() else '')",
        ROOTS_TWO,
    ),
    "a file that only the run's user may read, by another program": (
        "import subprocess\nprint('escaped' if subprocess.run(['cat', 'SECRET'], capture_output=True).stdout else '')",
        ROOTS_TWO,
    ),
    "the names in a folder that only the run's user may enter": (
        "import os\nprint('escaped' if 'beside' in os.listdir('CLOSED') else '')",
        ROOTS_TWO,
    ),
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
    "to write where only the run's user may": ("open('MINE', 'w').write('x')\nprint('escaped')", APART_FIRST),
    "to write where everybody may": (
        "open('CANARY', 'w').write('x')\nprint('escaped')",
        ("only by Landlock", STOPPED, STOPPED),
    ),
    "to move a folder of another user, which everybody may write, into its own": (
        "import os\nos.rename('SHARED/guest', 'guest')\nprint('escaped')",
        ("only by Landlock", STOPPED, STOPPED),
    ),
    "to remove a file of the run": ("import os\nos.remove('THEIRS')\nprint('escaped')", APART_FIRST),
    "to write beside what it may read": ("open('CLOSED/open/new', 'w').close()\nprint('escaped')", APART_FIRST),
    "to change the rights of what it may read": (
        "import os\nos.chmod('CLOSED/open', 0o755)\nprint('escaped')",
        ROOTS_FIRST,
    ),
    "the run's terminal": ("open('/dev/tty')\nprint('escaped')", ALL),
    "a look at other processes": (
        "import os\nprint('escaped' if sum(p.isdigit() for p in os.listdir('/proc')) > 4 else 'no')",
        BUT_PROCESS,
    ),
    "the command line of the run's process": (
        "print('escaped' if open('/proc/RUN/cmdline').read() else '')",
        BUT_PROCESS,
    ),
    "how many files the run's process has open": (
        "import os\nprint('escaped' if os.listdir('/proc/RUN/fd') else '')",
        ROOTS_FIRST,
    ),
    "the files that the run's process has open": (
        "import os\nprint('escaped' if os.readlink('/proc/RUN/fd/0') else '')",
        APART_FIRST,
    ),
    "the root folder of the run's process": (
        "import os\nprint('escaped' if os.listdir('/proc/RUN/root/') else '')",
        APART_FIRST,
    ),
    "the limits of the run's process": (
        "import resource\nresource.prlimit(RUN, resource.RLIMIT_NOFILE)\nprint('escaped')",
        ROOTS_FIRST,
    ),
    "the scheduler's settings of the run's process": (
        "import os\nos.sched_getaffinity(RUN)\nprint('escaped')",
        BUT_PROCESS,
    ),
    "a signal to whatever it sees": (
        "import os\n"
        "for name in os.listdir('/proc'):\n"
        "  if not name.isdigit() or int(name) in (1, os.getpid()): continue\n"
        "  try: os.kill(int(name), 0)\n"
        "  except OSError: continue\n"
        "  print('escaped')",
        UNSIGNALLED_FIRST,
    ),
    "a signal to the run": ("import os\nos.kill(RUN, 0)\nprint('escaped')", UNSIGNALLED_FIRST),
    "to kill the process that would end its children, and so leave one behind": (
        "import os, signal, time\n"
        "boss = os.getppid()\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  os.kill(boss, signal.SIGKILL)\n"
        "  for _ in range(1000):\n"
        "    time.sleep(0.01)\n"
        "    try: os.kill(boss, 0)\n"
        "    except ProcessLookupError: print('escaped', flush=True); break\n"
        "  os._exit(0)\n"
        "os.wait()",
        UNSIGNALLED_FIRST,
    ),
    "to stop the process above it, which watches its time": (
        "import os, signal\nos.kill(os.getppid(), signal.SIGCONT)\nprint('escaped')",
        UNSIGNALLED_FIRST,
    ),
    "the memory of the run's process": ("open('/proc/RUN/mem', 'rb')\nprint('escaped')", APART_FIRST),
    "to change the memory of the run's process": ("open('/proc/RUN/mem', 'wb')\nprint('escaped')", APART_FIRST),
    "an open file of the run's process, by its number": (
        "import ctypes, os\n"
        "process = os.pidfd_open(RUN)\n"
        "print('escaped' if ctypes.CDLL(None).syscall(438, process, 0, 0) >= 0 else 'no')",
        ALL,
    ),
    "to compare its kernel objects with those of the run": (
        "import ctypes, os, platform\n"
        "number = {'x86_64': 312, 'aarch64': 272}[platform.machine()]\n"
        "print('escaped' if ctypes.CDLL(None).syscall(number, os.getpid(), RUN, 0, 0, 0) >= 0 else 'no')",
        ALL,
    ),
    "what the run writes to disk, by shortening it": (
        "import os\nos.truncate('THEIRS', 0)\nprint('escaped')",
        APART_FIRST,
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
        "for file in glob.glob(os.path.dirname(os.getcwd()) + '/*/neighbour'):\n"
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
        ROOTS_FIRST,
    ),
    "a message to the next answer, in its folder": (
        "import os\nprint('escaped' if os.path.exists('left') else '')\nopen('left', 'w').close()",
        ALL,
    ),
    "a message to the next answer, in the temporary folder": (
        "import os, tempfile\n"
        "place = os.path.join(tempfile.gettempdir(), 'left')\n"
        "print('escaped' if os.path.exists(place) else '')\nopen(place, 'w').close()",
        ALL,
    ),
    "a message to the next answer, in the warm interpreter": (
        "import builtins, re\n"
        "print('escaped' if hasattr(builtins, 'left') or hasattr(re, 'left') else '')\n"
        "builtins.left = re.left = 1",
        ALL,
    ),
    "a message to the next answer, in the environment": (
        "import os\nprint('escaped' if 'LEFT' in os.environ else '')\nos.environ['LEFT'] = '1'\nos.putenv('LEFT', '1')",
        ALL,
    ),
}
TWICE = tuple(escape for escape in ESCAPES if escape.startswith("a message to the next answer"))
"""The second run reads what the first has left."""

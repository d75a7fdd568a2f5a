"""Programs that try to get out of a sandbox, and what each tier can do about them.

Each prints `escaped` if it got what it wanted. `HOME`, `PORT`, `CANARY` and `RUN` stand for a file in the home folder,
a server on loopback, a file that must not appear, and the number of the run's process.
"""

from __future__ import annotations

from collections.abc import Mapping

BOTH, NAMESPACE, NEITHER = ("process", "namespace"), ("namespace",), ()

ESCAPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # what it wants: the program, and the tiers that stop it
    "an environment variable of the run": (
        "import os\nprint('escaped' if 'SKYRL_SECRET' in os.environ else 'no')",
        BOTH,
    ),
    "the environment of the run's process": (
        "print('escaped' if open('/proc/RUN/environ', 'rb').read() else 'no')",
        NAMESPACE,
    ),
    "an open file of the run": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "  try: os.fstat(fd)\n"
        "  except OSError: continue\n"
        "  if not os.readlink(f'/proc/self/fd/{fd}').startswith(('/proc', os.getcwd())): print('escaped')",
        BOTH,
    ),
    "a server on loopback": (
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint('escaped')",
        NAMESPACE,
    ),
    "a server on loopback, by HTTP": (
        "import urllib.request as u\nu.urlopen('http://localhost:PORT/', timeout=1)\nprint('escaped')",
        NAMESPACE,
    ),
    "a datagram to loopback": (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('127.0.0.1', PORT)); s.send(b'x')\n"
        "print('escaped')",
        NAMESPACE,
    ),
    "an abstract socket": (
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('\\0skyrl-canary-PORT')\nprint('escaped')",
        NAMESPACE,
    ),
    "a file in the home folder": ("print('escaped' if open('HOME').read() else '')", NEITHER),
    "a file of the system": ("print('escaped' if open('/etc/passwd').read() else '')", NEITHER),
    "a file where anybody may write": ("open('CANARY', 'w').write('x')\nprint('escaped')", NEITHER),
    "a look at other processes": (
        "import os\nprint('escaped' if sum(p.isdigit() for p in os.listdir('/proc')) > 4 else 'no')",
        NAMESPACE,
    ),
    "a signal to the run": ("import os\nos.kill(RUN, 0)\nprint('escaped')", NAMESPACE),
    "the privileges of a set-uid program": (
        "print('escaped' if 'NoNewPrivs:\\t0' in open('/proc/self/status').read() else 'no')",
        BOTH,
    ),
    "more memory than its limit": ("x = bytearray(3 << 30)\nprint('escaped')", BOTH),
    "a file larger than its limit": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "f = open('big', 'wb')\nfor _ in range(64): f.write(b'x' * (1 << 20))\nf.flush()\nprint('escaped')",
        BOTH,
    ),
    "many open files": ("fs = [open('/dev/null') for _ in range(500)]\nprint('escaped')", BOTH),
    "a core dump": (
        "import resource\nprint('escaped' if resource.getrlimit(resource.RLIMIT_CORE)[1] else 'no')",
        BOTH,
    ),
    "the modules of the run": ("import skyrl\nprint('escaped')", BOTH),
    "the modules of an environment's packages": ("import torch\nprint('escaped')", BOTH),
}

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
}
"""They run until somebody ends them, and all that they started."""

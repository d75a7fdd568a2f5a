"""Programs that never end or that hoard memory: each tier ends them, with everything that they started."""

from __future__ import annotations

from collections.abc import Mapping

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
    "a loop deaf to the limit of CPU time": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    ),
    "a wait for a thread that never ends": (
        "import threading\nthreading.Thread(target=threading.Event().wait).start()"
    ),
    "a function for the end that never returns": "import atexit, time\natexit.register(time.sleep, 1000)",
    "a finalizer that never returns": (
        "import time\nclass Thing:\n  def __del__(self): time.sleep(1000)\nthing = Thing()\ndel thing"
    ),
    "exceptions that are caught again and again": (
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass"
    ),
    "a deadlock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "a child for each that is killed": (
        "import os, time\n"
        "while True:\n"
        "  if os.fork() == 0: time.sleep(1000)\n"
        "  try: os.waitpid(-1, 0)\n"
        "  except OSError: pass"
    ),
    "a chain of children, each older one gone": (
        "import os, time\nwhile True:\n  time.sleep(0.01)\n  if os.fork(): os._exit(0)\n  os.setsid()"
    ),
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

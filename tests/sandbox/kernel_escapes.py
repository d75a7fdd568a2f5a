"""Programs that try to get rights, more than their limits, or more of the kernel, and what each tier does about it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.sandbox.escapes import ALL, BUT_PROCESS, ROOTS_FIRST, Verdict

KERNEL_ESCAPES: Mapping[str, tuple[str, tuple[Verdict, Verdict, Verdict]]] = {
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
    "to leave the control group that limits its memory": (
        "import os\n"
        "for line in open('/proc/self/cgroup'):\n"
        "  _, names, path = line.strip().split(':', 2)\n"
        "  if 'skyrl-sandbox-' not in path: continue\n"
        "  above = '/sys/fs/cgroup/' + names + os.path.dirname(path)\n"
        "  for file, text in ('/cgroup.procs', '0'), (f'/{os.path.basename(path)}/memory.limit_in_bytes', '-1'):\n"
        "    try: open(above + file, 'w').write(text)\n"
        "    except OSError: continue\n"
        "    print('escaped')",
        ALL,
    ),
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
    "a higher priority": ("import os\nos.nice(-5)\nprint('escaped')", ALL),
    "real-time scheduling": (
        "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\nprint('escaped')",
        ALL,
    ),
    "to set the clock": ("import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())\nprint('escaped')", ALL),
    "to set the machine's name": ("import socket\nsocket.sethostname(socket.gethostname())\nprint('escaped')", ALL),
    "to change a setting of the kernel": ("open('/proc/sys/kernel/core_pattern', 'a').close()\nprint('escaped')", ALL),
    "another root folder": ("import os\nos.chroot('.')\nprint('escaped')", ALL),
    "a device of its own": ("import os\nos.mknod('d', 0o020666, os.makedev(1, 1))\nprint('escaped')", ALL),
    "raw packets": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)\nprint('escaped')",
        ALL,
    ),
    "the kernel by netlink": (
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nprint('escaped')",
        ALL,
    ),
    "the kernel's ciphers": (
        "import socket\nsocket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)\nprint('escaped')",
        ALL,
    ),
    "a socket by the system calls of 32 bits": (
        "import ctypes, mmap, platform\n"
        "assert platform.machine() == 'x86_64'\n"
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('53b867010000bb02000000b901000000ba00000000cd805bc3'))\n"
        "made = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()\n"
        "print('escaped' if made >= 0 else 'no')",
        ALL,
    ),
    "a socket by the system calls of x32": (
        "import ctypes\nprint('escaped' if ctypes.CDLL(None).syscall(0x40000029, 2, 1, 0) >= 0 else 'no')",
        ALL,
    ),
    "to take the filter of system calls off": (
        "import ctypes\nctypes.CDLL(None).prctl(22, 0, 0)\n"
        "print('escaped' if 'Seccomp:\\t2' not in open('/proc/self/status').read() else 'no')",
        ALL,
    ),
    "the namespaces of the run": (
        "import ctypes, os\n"
        "place = os.open('/proc/RUN/ns/net', os.O_RDONLY)\n"
        "print('escaped' if ctypes.CDLL(None).setns(place, 0) == 0 else 'no')",
        ALL,
    ),
    "the kernel's queues of requests (io_uring)": (
        "import ctypes\n"
        "made = ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))\n"
        "print('escaped' if made >= 0 else 'no')",
        ALL,
    ),
    "programs in the kernel (bpf)": (
        "import ctypes, platform\n"
        "number = {'x86_64': 321, 'aarch64': 280}[platform.machine()]\n"
        "attributes = (ctypes.c_uint32 * 32)(2, 4, 8, 1)\n"
        "print('escaped' if ctypes.CDLL(None).syscall(number, 0, attributes, 128) >= 0 else 'no')",
        ALL,
    ),
    "a file of a terabyte with nothing in it": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "open('f', 'w').truncate(1 << 40)\nprint('escaped')",
        ALL,
    ),
    "more threads than its limit": (
        "import threading\nthreading.stack_size(1 << 16)\ndone = threading.Event()\n"
        "for _ in range(80): threading.Thread(target=done.wait, daemon=True).start()\nprint('escaped')",
        ROOTS_FIRST,
    ),
    "more files than its folder may have": (
        "for name in range(21_000): open(str(name), 'w').close()\nprint('escaped')",
        BUT_PROCESS,
    ),
}

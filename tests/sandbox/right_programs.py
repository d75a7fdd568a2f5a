"""Programs that are right, each with what it reads and has to print: a sandbox that fails one takes a reward away.

Most use something that a sandbox may get in the way of: threads, subprocesses, files, what runs at the end, deep
recursion, much output, odd ways to read and print.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Right:
    """One program, its standard input, and its output."""

    program: str
    printed: str
    stdin: str = ""


LARGE = "".join(f"{number}\n" for number in range(100_000))

RIGHT: dict[str, Right] = {
    # Threads and what is started at the end
    "a thread that nobody joins": Right(
        "import threading\nthreading.Thread(target=lambda: print('late')).start()", "late\n"
    ),
    "a thread that outlasts the main one": Right(
        "import threading\n"
        "def work():\n  threading.main_thread().join()\n  print(total)\n"
        "total = 7\nthreading.Thread(target=work).start()\nprint('main')",
        "main\n7\n",
    ),
    "a daemon thread": Right(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint(1)", "1\n"
    ),
    "sixteen threads": Right(
        "import threading\nfound = []\n"
        "threads = [threading.Thread(target=found.append, args=(n,)) for n in range(16)]\n"
        "[t.start() for t in threads]\n[t.join() for t in threads]\nprint(sorted(found) == list(range(16)))",
        "True\n",
    ),
    "a larger stack for a deep recursion": Right(
        "import sys, threading\nsys.setrecursionlimit(200000)\nthreading.stack_size(128 << 20)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
        "t = threading.Thread(target=lambda: print(depth(50000)))\nt.start()\nt.join()",
        "50000\n",
    ),
    "a pool of threads": Right(
        "from concurrent.futures import ThreadPoolExecutor as P\n"
        "with P(8) as pool: print(sum(pool.map(lambda n: n * n, range(100))))",
        "328350\n",
    ),
    "a pool of threads that nobody shuts down": Right(
        "from concurrent.futures import ThreadPoolExecutor as P\nP(2).submit(print, 'pooled')", "pooled\n"
    ),
    "a timer": Right("import threading\nthreading.Timer(0.1, print, ['tick']).start()", "tick\n"),
    "a lock, a condition and an event": Right(
        "import threading\ndone = threading.Event()\nlock = threading.Condition()\n"
        "def work():\n  with lock: lock.notify()\n  done.set()\n"
        "with lock:\n  threading.Thread(target=work).start()\n  lock.wait(30)\nprint(done.wait(30))",
        "True\n",
    ),
    "what is registered for the end": Right(
        "import atexit\natexit.register(print, 'bye')\nprint('hello')", "hello\nbye\n"
    ),
    "what is registered for the end, in turn": Right(
        "import atexit\nfor n in range(3): atexit.register(print, n)", "2\n1\n0\n"
    ),
    "output that is written at the end": Right(
        "import atexit, io, os, sys\nbuffer = io.BytesIO()\nsys.stdout = io.TextIOWrapper(buffer, write_through=True)\n"
        "atexit.register(lambda: os.write(1, buffer.getvalue()))\nprint('buffered')",
        "buffered\n",
    ),
    "a file that is left open": Right("import os\nout = os.fdopen(1, 'w')\nout.write('left\\n')", "left\n"),
    "another wrapper around standard output": Right(
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint('é')", "é\n"
    ),
    "output without a line's end": Right("import sys\nsys.stdout.write('42')", "42"),
    "a finalizer": Right(
        "import weakref\nclass Thing: pass\nthing = Thing()\nweakref.finalize(thing, print, 'gone')\nprint('here')",
        "here\ngone\n",
    ),
    "an end by sys.exit": Right("import sys\nprint('a')\nsys.exit()", "a\n"),
    "an end by exit code 0": Right("print('a')\nraise SystemExit(0)", "a\n"),
    "an end by os._exit": Right("import os\nprint('a', flush=True)\nos._exit(0)", "a\n"),
    "a with statement at the end": Right(
        "from contextlib import ExitStack\nwith ExitStack() as s:\n  s.callback(print, 'closed')\n  print('open')",
        "open\nclosed\n",
    ),
    # Processes
    "a subprocess": Right(
        "import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)", "hi\n\n"
    ),
    "a subprocess that prints itself": Right("import subprocess\nsubprocess.run(['echo', 'hi'])", "hi\n"),
    "a shell": Right("import os\nprint(os.popen('expr 6 \\\\* 7').read().strip())", "42\n"),
    "another Python": Right(
        "import subprocess, sys\n"
        "print(subprocess.check_output([sys.executable, '-c', 'print(6 * 7)'], text=True).strip())",
        "42\n",
    ),
    "a child by fork": Right(
        "import os\npid = os.fork()\nif pid == 0:\n  print('child', flush=True)\n  os._exit(0)\n"
        "os.waitpid(pid, 0)\nprint('parent')",
        "child\nparent\n",
    ),
    "a pipe to a child": Right(
        "import os\nr, w = os.pipe()\nif os.fork() == 0:\n  os.write(w, b'sent')\n  os._exit(0)\n"
        "os.wait()\nprint(os.read(r, 9).decode())",
        "sent\n",
    ),
    "a process of multiprocessing": Right(
        "import multiprocessing as m\n"
        "def work(): print('there', flush=True)\n"
        "if __name__ == '__main__':\n  p = m.get_context('fork').Process(target=work)\n  p.start()\n"
        "  p.join()\n  print(p.exitcode)",
        "there\n0\n",
    ),
    "a queue of multiprocessing": Right(
        "import multiprocessing as m\nc = m.get_context('fork')\nq = c.Queue()\n"
        "p = c.Process(target=q.put, args=(5,))\np.start()\nprint(q.get(timeout=30))\np.join()",
        "5\n",
    ),
    "a pool of multiprocessing": Right(
        "import multiprocessing as m\n"
        "def square(n): return n * n\n"
        "p = m.get_context('fork').Pool(2)\n"  # closed and joined: `with` terminates it, which may hang in CPython
        "print(p.map(square, range(5)))\np.close()\np.join()",
        "[0, 1, 4, 9, 16]\n",
    ),
    "a pool of processes of concurrent.futures": Right(
        "from concurrent.futures import ProcessPoolExecutor as P\nimport multiprocessing as m\n"
        "with P(2, m.get_context('fork')) as pool: print(list(pool.map(abs, [-1, -2])))",
        "[1, 2]\n",
    ),
    "a signal": Right(
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('caught'))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)",
        "caught\n",
    ),
    "an alarm": Right(
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('rang'))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\nsignal.sigwait([signal.SIGALRM])\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "while not signal.sigpending(): pass\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])",
        "rang\n",
    ),
    "an end by KeyboardInterrupt that is caught": Right(
        "import os, signal\ntry:\n  os.kill(os.getpid(), signal.SIGINT)\n  signal.pause()\n"
        "except KeyboardInterrupt: print('caught')",
        "caught\n",
    ),
    "asyncio": Right(
        "import asyncio\nasync def work(n):\n  await asyncio.sleep(0.01)\n  return n\n"
        "async def main(): print(await asyncio.gather(*map(work, range(5))))\nasyncio.run(main())",
        "[0, 1, 2, 3, 4]\n",
    ),
    "asyncio with a thread": Right("import asyncio\nprint(asyncio.run(asyncio.to_thread(sum, [1, 2])))", "3\n"),
    "asyncio with a subprocess": Right(
        "import asyncio\nasync def main():\n"
        "  p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1)\n  print((await p.communicate())[0])\n"
        "asyncio.run(main())",
        "b'hi\\n'\n",
    ),
    "a pair of sockets": Right("import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))", "b'x'\n"),
    # Reading
    "input()": Right("a = int(input())\nb = int(input())\nprint(a + b)", "5\n", "2\n3\n"),
    "input() until it ends": Right(
        "try:\n  while True: print(input())\nexcept EOFError: print('end')", "a\nb\nend\n", "a\nb"
    ),
    "a fast input": Right(
        "import sys\ninput = sys.stdin.readline\nprint(sum(int(input()) for _ in range(3)))", "6\n", "1\n2\n3\n"
    ),
    "all of it": Right("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "4999950000\n", LARGE),
    "bytes of it": Right("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", "4999950000\n", LARGE),
    "a descriptor": Right("import os\nprint(len(os.read(0, 99)))", "4\n", "abc\n"),
    "open(0)": Right("print(*open(0).read().split()[::-1])", "c b a\n", "a b c\n"),
    "/dev/stdin": Right("print(open('/dev/stdin').read().strip())", "x\n", "x\n"),
    "lines of it": Right("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ba\ndc\n", "ab\ncd\n"),
    "fileinput": Right("import fileinput\nprint(sum(int(line) for line in fileinput.input()))", "3\n", "1\n2\n"),
    "no input": Right("import sys\nprint(repr(sys.stdin.read()))", "''\n"),
    "input that is not UTF-8's idea of a line": Right("print(len(input()))", "3\n", "a\x0bb\n"),
    # Printing
    "much of it": Right("print('x' * 500_000)", "x" * 500_000 + "\n"),
    "many lines": Right("for n in range(100_000): print(n)", LARGE),
    "print to standard error, too": Right("import sys\nprint('log', file=sys.stderr)\nprint('out')", "out\n"),
    "bytes": Right("import sys\nsys.stdout.buffer.write(b'raw\\n')", "raw\n"),
    "a flush and bytes": Right(
        "import sys\nprint('a', flush=True)\nsys.stdout.buffer.write(b'b\\n')\nsys.stdout.flush()\nprint('c')",
        "a\nb\nc\n",
    ),
    "emoji": Right("print('héllo 🎉')", "héllo 🎉\n"),
    "standard output that is given back": Right(
        "import io, sys\nsys.stdout = io.StringIO()\nprint('hidden')\nkept = sys.stdout.getvalue()\n"
        "sys.stdout = sys.__stdout__\nprint(kept.strip())",
        "hidden\n",
    ),
    "redirect_stdout": Right(
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out: print('x')\n"
        "print(out.getvalue().strip() * 2)",
        "xx\n",
    ),
    "print with another end": Right("print(*range(3), sep=',', end='!')", "0,1,2!"),
    "logging": Right(
        "import logging, sys\nlogging.basicConfig(stream=sys.stdout, format='%(message)s')\nlogging.warning('w')", "w\n"
    ),
    "os.write": Right("import os\nos.write(1, b'direct\\n')", "direct\n"),
    "pprint": Right("from pprint import pprint\npprint({'a': [1, 2]})", "{'a': [1, 2]}\n"),
    # Files
    "a file": Right("open('f', 'w').write('kept')\nprint(open('f').read())", "kept\n"),
    "a module of its own": Right("open('mine.py', 'w').write('value = 3')\nimport mine\nprint(mine.value)", "3\n"),
    "a temporary file": Right(
        "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n  f.write('t')\n  f.seek(0)\n  print(f.read())",
        "t\n",
    ),
    "a temporary folder": Right(
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as d: print(os.listdir(d))", "[]\n"
    ),
    "its own source": Right("print(open(__file__).read().count('open'))", "2\n"),
    "pathlib": Right(
        "from pathlib import Path\nPath('a/b').mkdir(parents=True)\n"
        "print(sorted(str(p) for p in Path('a').rglob('*')))",
        "['a/b']\n",
    ),
    "twenty megabytes on disk": Right(
        "import os\nopen('f', 'wb').write(bytes(20 << 20))\nprint(os.path.getsize('f'))", "20971520\n"
    ),
    "sqlite": Right(
        "import sqlite3\nd = sqlite3.connect('x.db')\nd.execute('create table t (a)')\n"
        "d.execute('insert into t values (1)')\nd.commit()\n"
        "print(d.execute('select * from t').fetchall())",
        "[(1,)]\n",
    ),
    "csv and json": Right(
        "import csv, io, json\nprint(json.dumps(list(csv.reader(io.StringIO('a,b')))))", '[["a", "b"]]\n'
    ),
    "zip files": Right(
        "import zipfile\nwith zipfile.ZipFile('z', 'w') as z: z.writestr('a', 'b')\n"
        "print(zipfile.ZipFile('z').read('a'))",
        "b'b'\n",
    ),
    "shared memory of multiprocessing": Right(
        "from multiprocessing.shared_memory import SharedMemory as S\ns = S(create=True, size=8)\n"
        "s.buf[0] = 7\nprint(s.buf[0])\ns.close()\ns.unlink()",
        "7\n",
    ),
    "mmap": Right("import mmap\nm = mmap.mmap(-1, 4096)\nm.write(b'x')\nprint(m[:1])", "b'x'\n"),
    "its home": Right(
        "import os\nprint(os.path.isdir(os.path.expanduser('~')) and os.access(os.path.expanduser('~'), os.W_OK))",
        "True\n",
    ),
    # Computing
    "three hundred megabytes": Right("x = bytearray(300 << 20)\nprint(len(x))", "314572800\n"),
    "a million numbers": Right("print(sum(sorted(range(1_000_000, 0, -1))[:10]))", "55\n"),
    "recursion": Right(
        "import sys\nsys.setrecursionlimit(10_000)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(5_000))", "5000\n"
    ),
    "large numbers": Right("print(len(str(2 ** 10_000)))", "3011\n"),
    "decimal and fractions": Right(
        "from decimal import Decimal as D\nfrom fractions import Fraction as F\n"
        "print(D('0.1') + D('0.2'), F(1, 3) + F(1, 6))",
        "0.3 1/2\n",
    ),
    "random with a seed": Right("import random\nrandom.seed(0)\nprint(random.randint(1, 100))", "50\n"),
    "a heap": Right(
        "import heapq\nh = [3, 1, 2]\nheapq.heapify(h)\nprint([heapq.heappop(h) for _ in range(3)])", "[1, 2, 3]\n"
    ),
    "a cache": Right(
        "from functools import lru_cache\n@lru_cache(None)\n"
        "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nprint(f(90))",
        "2880067194370816120\n",
    ),
    "a class, a dataclass and an enum": Right(
        "from dataclasses import dataclass\nfrom enum import Enum\n@dataclass\nclass A: x: int\n"
        "class B(Enum): C = 1\nprint(A(1), B.C)",
        "A(x=1) B.C\n",
    ),
    "pickles": Right("import pickle\nclass A: x = 4\nprint(pickle.loads(pickle.dumps(A())).x)", "4\n"),
    "copies": Right("import copy\na = [[1]]\nb = copy.deepcopy(a)\nb[0].append(2)\nprint(a, b)", "[[1]] [[1, 2]]\n"),
    "time": Right("import time\na = time.monotonic()\ntime.sleep(0.05)\nprint(time.monotonic() - a >= 0.05)", "True\n"),
    "dates": Right("from datetime import date, timedelta\nprint(date(2024, 2, 28) + timedelta(2))", "2024-03-01\n"),
    "regular expressions": Right(
        "import re\nprint(re.sub(r'(\\d+)', lambda m: str(int(m[1]) * 2), 'a1b22'))", "a2b44\n"
    ),
    "exec and eval of its own": Right("exec('x = 3')\nprint(eval('x + 1'))", "4\n"),
    "globals as a script has them": Right("print(__name__, __file__, 'x' in globals())", "__main__ program.py False\n"),
    "arguments as a script has them": Right("import sys\nprint(sys.argv)", "['program.py']\n"),
    "import __main__": Right("x = 5\nimport __main__\nprint(__main__.x)", "5\n"),
    "tracebacks that it prints": Right(
        "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: print(traceback.format_exc().splitlines()[-1])",
        "ZeroDivisionError: division by zero\n",
    ),
    "unittest": Right(
        "import io, unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertTrue(1)\n"
        "runner = unittest.TextTestRunner(io.StringIO())\n"
        "print(unittest.main(exit=False, argv=['x'], testRunner=runner).result.wasSuccessful())",
        "True\n",
    ),
    "typing and generics": Right(
        "from typing import TypeVar, Generic\nT = TypeVar('T')\nclass Box(Generic[T]): pass\n"
        "print(Box[int].__origin__ is Box)",
        "True\n",
    ),
    "inspect": Right("import inspect\ndef f(): pass\nprint(inspect.getsource(f).strip())", "def f(): pass\n"),
    "ctypes": Right("import ctypes\nprint(ctypes.CDLL(None).abs(-3))", "3\n"),
    "a resource limit that it looks at": Right(
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE))", "(0, 0)\n"
    ),
    "a coding line": Right("# -*- coding: latin-1 -*-\nprint('a')", "a\n"),
    "Windows line ends": Right("a = 1\r\nif a:\r\n  print(a)\r\n", "1\n"),
    "an empty program": Right("", ""),
}
A_HANDFUL = (
    "a thread that nobody joins",
    "what is registered for the end",
    "a file that is left open",
    "a pool of multiprocessing",
    "standard output that is given back",
    "pickles",
    "a module of its own",
    "a shell",
    "input() until it ends",
    "three hundred megabytes",
)
"""The tenth that every test run has: most of them failed once."""

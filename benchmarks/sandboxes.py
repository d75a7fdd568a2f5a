"""What a sandbox costs, for each tier that this machine has.

    python benchmarks/sandboxes.py [--calls 100]

Prints one JSON line. Milliseconds (median and 90th percentile): `fresh`, a program that prints a word, in a process of
its own; `reused`, an answer compared by math-verify in a worker that stays; `episode`, an isolated environment from its
start over one step to its end; and beside them `python`, the interpreter started anew for the same program with no
sandbox, and `fork`, a bare fork of this process. `hangs`: programs that never end, with a deadline of half a second:
how many there were, the milliseconds by which the latest was late, and how many were late by more than a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from skyrl.config import SkyRLGymConfig
from skyrl.envs.builtin.math_equal import MathEqual
from skyrl.envs.isolated import isolated
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox, why_unavailable
from skyrl.sandbox.tiers import TIERS, Tier

PROGRAM = "print('word')"
DEADLINE = 0.5
HANGS = {
    "a loop": "while True: pass",
    "a sleep": "import time\ntime.sleep(1000)",
    "deaf to signals": (
        "import signal, time\n"
        "for number in range(1, 32):\n"
        "  try: signal.signal(number, signal.SIG_IGN)\n"
        "  except OSError: pass\n"
        "time.sleep(1000)"
    ),
    "a gigabyte of print": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "grandchildren": (
        "import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n    os.setsid()\n    break\ntime.sleep(1000)"
    ),
    "a number": "print(9 ** 9 ** 9 ** 9)",
    "a stop of itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}
"""What a program may do never to end."""


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description="Measure sandboxes.")
    parser.add_argument("--calls", type=int, default=100)
    calls = parser.parse_args().calls
    available = [tier for tier in TIERS if not why_unavailable(tier)]
    python = [sys.executable, "-I", "-S", "-c", PROGRAM]
    results: dict[str, object] = {
        "fork": milliseconds(calls, _fork),
        "python": milliseconds(calls, lambda: subprocess.run(python, capture_output=True, check=True)),
    }
    for tier in available:
        results[tier] = measure(tier, calls)
    print(json.dumps({"benchmark": "sandboxes", "calls": calls, "load": os.getloadavg()[0], **results}))


def measure(tier: Tier, calls: int) -> dict[str, object]:
    """The three kinds of call."""
    sandbox, equal = Sandbox(tier), MathEqual(tier)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "task.py"
        file.write_text("def reward(completion, **others): return 1\n", encoding="utf-8")
        make = isolated(f"{file}:reward", SkyRLGymConfig(isolate_user_env=True, sandbox_tier=tier))

        def episode() -> None:
            env = make({})
            env.init(())
            env.step("an answer")
            env.close()

        results: dict[str, object] = {
            "fresh": milliseconds(calls, lambda: sandbox.run(PROGRAM)),
            "reused": milliseconds(calls, lambda: equal("1200", "1,200")),
            "episode": milliseconds(calls, episode),
            "hangs": hangs(sandbox, calls // 10),
        }
    sandbox.close()
    equal.close()
    return results


def milliseconds(calls: int, call: Callable[[], object]) -> dict[str, float]:
    """Of a call, once it is warm."""
    call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1000)
    return {"median": round(median(times), 2), "p90": round(sorted(times)[int(0.9 * len(times))], 2)}


def hangs(sandbox: Sandbox, times: int) -> dict[str, float]:
    """Each of `HANGS` so often, one after the other."""
    late = []
    for program in [*HANGS.values()] * times:
        start = time.perf_counter()
        sandbox.run(program, limits=ResourceLimits(seconds=DEADLINE))
        late.append(time.perf_counter() - start - DEADLINE)
    over = sum(seconds > 1.0 for seconds in late)
    return {"programs": len(late), "latest": round(max(late, default=0.0) * 1000, 1), "late_by_a_second": over}


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()

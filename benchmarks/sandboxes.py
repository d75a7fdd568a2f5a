"""What a sandbox costs, for each tier that this machine has.

    python benchmarks/sandboxes.py [--calls 100]

Prints one JSON line. Milliseconds (median and 90th percentile): `fresh`, a program that prints a word, in a process of
its own; `reused`, an answer compared by math-verify in a worker that stays; `episode`, an isolated environment from its
start over one step to its end; and beside them `python`, the interpreter started anew for the same program with no
sandbox, and `fork`, a bare fork of this process.
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
from skyrl.envs.isolated import isolated
from skyrl.envs.math_equal import MathEqual
from skyrl.processes.sandbox import Sandbox, why_unavailable
from skyrl.processes.tiers import TIERS, Tier

PROGRAM = "print('word')"


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description="Measure sandboxes.")
    parser.add_argument("--calls", type=int, default=100)
    calls = parser.parse_args().calls
    here = [tier for tier in TIERS if not why_unavailable(tier)]
    python = [sys.executable, "-I", "-S", "-c", PROGRAM]
    found: dict[str, object] = {
        "fork": milliseconds(calls, _fork),
        "python": milliseconds(calls, lambda: subprocess.run(python, capture_output=True, check=True)),
    }
    for tier in here:
        found[tier] = measure(tier, calls)
    print(json.dumps({"benchmark": "sandboxes", "calls": calls, "load": os.getloadavg()[0], **found}))


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

        found: dict[str, object] = {
            "fresh": milliseconds(calls, lambda: sandbox.run(PROGRAM)),
            "reused": milliseconds(calls, lambda: equal("1200", "1,200")),
            "episode": milliseconds(calls, episode),
        }
    sandbox.close()
    equal.close()
    return found


def milliseconds(calls: int, call: Callable[[], object]) -> dict[str, float]:
    """Of a call, once it is warm."""
    call()
    taken = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1000)
    return {"median": round(median(taken), 2), "p90": round(sorted(taken)[int(0.9 * len(taken))], 2)}


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()

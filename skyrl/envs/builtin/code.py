"""Programs that have to pass tests: one turn, only the last code block counts (the rule of SkyRL-Gym's lcb).

The program runs in a sandbox, in a new process for each test, and sees only the test's input. The expected output and
the comparison stay outside the sandbox, out of the program's reach.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import evolve

from skyrl.envs.builtin.program_tests import ProgramTest, tests_of
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth
from skyrl.envs.services.remote_sandbox import RunsPrograms
from skyrl.sandbox.sandbox import ResourceLimits

PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, math, operator, os, random, re, string, sys
from bisect import bisect_left, bisect_right, insort, insort_left, insort_right
from collections import Counter, OrderedDict, defaultdict, deque
from copy import deepcopy
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, merge, nlargest, nsmallest
from itertools import accumulate, chain, combinations, combinations_with_replacement, count, cycle, groupby, islice
from itertools import pairwise, permutations, product, repeat, starmap, takewhile, zip_longest
from math import atan2, ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, log10, perm, pi, prod, sqrt
from operator import iand, itemgetter, or_, sub, xor
from os.path import commonprefix
from random import randrange, shuffle
from re import search as re_search
from string import ascii_lowercase, ascii_uppercase
from time import time
from typing import Any, Callable, DefaultDict, Deque, Dict, FrozenSet, Generator, Iterable, Iterator, List, Optional
from typing import Sequence, Set, Tuple, Union
exit = quit = sys.exit
"""

_PACKAGES = (("np", "numpy"), ("pd", "pandas"))
"""Usual names of packages that are slow to import, and so only provided if the program mentions them."""

_PACKAGE = """
try:
    sys.path.append({folder!r})
    import {module} as {name}
except ImportError:
    pass
"""

_BLOCK = re.compile(r"```[\w+#.-]*[^\S\n]*\n(.*?)```", re.DOTALL)

_RUN = """
exec(compile({program!r}, "<answer>", "exec", dont_inherit=True))
"""
"""Source that runs a program which reads standard input, as `__main__`."""

_CALL = """
def _skyrl_call():
    import json, types
    answer = types.ModuleType("answer")
    answer.__dict__.update({{name: value for name, value in globals().items() if not name.startswith("_")}})
    sys.modules["answer"] = answer
    given = [json.loads(line) for line in sys.stdin.read().split("\\n")]
    exec(compile({program!r}, "<answer>", "exec", dont_inherit=True), answer.__dict__)
    methods = getattr(answer, "Solution", None)
    found = getattr(methods(), {name!r}) if hasattr(methods, {name!r}) else getattr(answer, {name!r})
    print("\\n" + json.dumps(found(*given), default=lambda each: each.tolist()))

_skyrl_call()
"""
"""Source that calls a function of the program, or a method of its class `Solution`.

Standard input holds the arguments, one per line as JSON; the last line of standard output is the result as JSON. The
program is a module, so code under `if __name__ == "__main__"` does not run."""


def last_code_block(answer: str) -> str | None:
    """Content of the last pair of code fences, without the name of a language; None if there is no pair.

    A fence opens a block only if nothing but a language name follows it on its line, so fences in prose open none.
    Takes time linear in the answer.
    """
    last = deque(_BLOCK.finditer(answer), maxlen=1)
    return last[0][1].strip() if last else None


@cache
def _folder_of(module: str) -> str | None:
    """Folder of an installed package; None if it is not installed."""
    spec = find_spec(module)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parents[1])


class CodeEnv(Env):
    """1 if the last code block passes every test, else 0. Also registered as `lcb`.

    `reward_spec.ground_truth` is a list of tests, or its JSON, in the forms of `program_tests.py`. They run one after
    the other, up to the first that fails.
    """

    def __init__(self, extras: Mapping[str, Any], sandbox: RunsPrograms, limits: ResourceLimits | None = None) -> None:
        """`limits` apply to each test; the output limit is raised for tests that expect more output."""
        super().__init__(extras)
        self._tests = tests_of(ground_truth(extras, "code", (str, list)), "code")
        self._sandbox, self._limits = sandbox, limits or ResourceLimits()
        self._passed = 0

    def step(self, action: str) -> EnvStep:
        program = last_code_block(action)
        for test in self._tests if program is not None else ():
            if not self._passes(str(program), test):
                break
            self._passed += 1
        return EnvStep(reward=float(self._passed == len(self._tests)), done=True)

    def get_metrics(self) -> dict[str, float]:
        return {"tests_passed": self._passed / len(self._tests)}

    def _passes(self, program: str, test: ProgramTest) -> bool:
        packages = [
            _PACKAGE.format(folder=folder, module=module, name=name)
            for name, module in _PACKAGES
            if re.search(rf"\b({name}|{module})\b", program) and (folder := _folder_of(module))
        ]
        run = _RUN if test.function is None else _CALL
        source = "".join([PRELUDE, *packages, run.format(program=program, name=test.function)])
        room = max(self._limits.output_bytes, 8 * len(str(test.expected)))
        ran = self._sandbox.run(source, test.stdin.encode(errors="replace"), evolve(self._limits, output_bytes=room))
        return ran.ended == "exit" and ran.code == 0 and test.passes(ran.stdout.decode(errors="replace"))

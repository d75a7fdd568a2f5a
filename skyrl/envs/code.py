"""Programs that have to pass tests: one turn, the last code block counts (the rule of SkyRL-Gym's lcb).

The program runs in a sandbox, a new process for each test, and sees the test's input alone. What it should have
printed or returned, and the comparison, stay here, out of its reach.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth, last_between
from skyrl.errors import TaskError
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox

MOST_TESTS = 100

_CALL = """

def _skyrl_call():
    import json, sys
    given = json.loads(sys.stdin.read())
    found = globals().get({name!r}) or getattr(globals()["Solution"](), {name!r})
    print(json.dumps(found(*given)))

if __name__ == "__main__":
    _skyrl_call()
"""


class CodeEnv(Env):
    r"""1 if the last code block passes every test, else 0.

    `reward_spec.ground_truth` is a list of tests, or its JSON: `{"input": "1 2\n", "output": "3\n"}` for standard
    input and output, `{"fn_name": "add", "input": [1, 2], "output": 3}` for a function, which may be a method of a
    class Solution.
    """

    def __init__(self, extras: Mapping[str, Any], sandbox: Sandbox, limits: ResourceLimits | None = None) -> None:
        """`limits` are for each test."""
        super().__init__(extras)
        self._tests = tests_of(ground_truth(extras, "code", (str, list)))
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

    def _passes(self, program: str, test: Mapping[str, Any]) -> bool:
        name = test.get("fn_name")
        if name is None:
            ran = self._sandbox.run(program, str(test["input"]).encode(), self._limits)
            printed = ran.stdout.decode(errors="replace")
            return ran.ended == "exit" and ran.code == 0 and _lines(printed) == _lines(str(test["output"]))
        ran = self._sandbox.run(program + _CALL.format(name=name), json.dumps(test["input"]).encode(), self._limits)
        last = ran.stdout.decode(errors="replace").strip().rpartition("\n")[2]
        return ran.ended == "exit" and ran.code == 0 and _same(last, test["output"])


def last_code_block(answer: str) -> str | None:
    """What stands in the last pair of code fences, without the name of a language; None if there is no pair."""
    inside = last_between(answer, "```", "```")
    if inside is None:
        return None
    first, newline, rest = inside.partition("\n")
    return rest if newline and (not first.strip() or first.strip().isalnum()) else inside


def tests_of(given: Any) -> Sequence[Mapping[str, Any]]:
    """The tests of a row. Raises `TaskError` for what cannot be one."""
    try:
        tests = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise TaskError(f"code: the tests under ground_truth are not JSON: {error}") from error
    if not isinstance(tests, list) or not 0 < len(tests) <= MOST_TESTS:
        raise TaskError(f"code: ground_truth has to be a list of 1 to {MOST_TESTS} tests")
    for number, test in enumerate(tests):
        if not isinstance(test, Mapping) or not {"input", "output"} <= set(test):
            raise TaskError(f"code: test {number} needs 'input' and 'output'")
        name = test.get("fn_name")
        if name is not None and not (isinstance(name, str) and name.isidentifier() and isinstance(test["input"], list)):
            raise TaskError(f"code: test {number} calls a function: fn_name has to be its name, input a list")
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same(printed: str, wanted: Any) -> bool:
    try:
        return bool(json.loads(printed) == wanted)
    except (ValueError, RecursionError):
        return False

"""Programs that have to pass tests: one turn, only the last code block counts (the rule of SkyRL-Gym's lcb).

The program runs in a sandbox, in a new process for each test, and sees only the test's input. The expected output and
the comparison stay outside the sandbox, out of the program's reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.envs.builtin.program_tests import ProgramTest, tests_of
from skyrl.envs.builtin.programs import as_call, as_script, last_code_block
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth
from skyrl.envs.services.remote_sandbox import RunsPrograms
from skyrl.sandbox.sandbox import ResourceLimits


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
        source = as_script(program) if test.function is None else as_call(program, test.function)
        room = max(self._limits.output_bytes, 8 * len(str(test.wanted)))
        ran = self._sandbox.run(source, test.given.encode(errors="replace"), evolve(self._limits, output_bytes=room))
        return ran.ended == "exit" and ran.code == 0 and test.passes(ran.stdout.decode(errors="replace"))

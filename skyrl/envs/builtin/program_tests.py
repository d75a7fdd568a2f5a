r"""Tests of programs, in the forms that datasets have.

{"input": "1 2\n", "output": "3\n"}                                    standard input and output
{"fn_name": "add", "input": [1, 2], "output": 3}                       a function, with its arguments
{"input": "1\n2", "output": "3", "testtype": "functional",             LiveCodeBench: each argument as JSON on a line;
"metadata": {"func_name": "add"}}                                     the first test may name the function for all
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from attrs import frozen

from skyrl.errors import TaskError

MOST_TESTS = 10_000
TOLERANCE = 1e-6
"""Absolute or relative error allowed for a number with a fraction, as in programming contests. Whole numbers must be
exact."""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@frozen(kw_only=True)
class ProgramTest:
    """One test: the input of a program, and the output or return value that is expected."""

    stdin: str
    """Standard input; for a function, one argument per line as JSON."""

    expected: Any
    """Expected text on standard output, or the expected return value of a function."""

    function: str | None = None
    """The function to call; None: the program runs as it is."""

    def passes(self, printed: str) -> bool:
        """Whether the printed output is right. A number too large to compare, for example, is wrong."""
        try:
            if self.function is None:
                return outputs_match(printed, self.expected)
            return values_match(json.loads(printed.rstrip("\n").rpartition("\n")[2]), self.expected)
        except (ArithmeticError, ValueError, RecursionError):
            return False


def tests_of(ground_truth: object, env: str) -> tuple[ProgramTest, ...]:
    """The tests of a row, a list or its JSON. Raises `TaskError` for an invalid one."""
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except ValueError as error:
        raise TaskError(f"{env}: the tests under ground_truth are not JSON: {error}") from error
    if not isinstance(tests, list) or not 0 < len(tests) <= MOST_TESTS:
        raise TaskError(f"{env}: ground_truth has to be a list of 1 to {MOST_TESTS} tests")
    for number, test in enumerate(tests):
        if not isinstance(test, Mapping) or not {"input", "output"} <= set(test):
            raise TaskError(f"{env}: test {number} needs 'input' and 'output'")
    named = _function_of(tests[0])
    try:
        return tuple(_test(test, named) for test in tests)
    except ValueError as error:
        raise TaskError(f"{env}: {error}") from error


def _test(test: Mapping[str, Any], named: str | None) -> ProgramTest:
    """One test of a row; `named` is the function of the first test. Raises `ValueError` that says what is wrong."""
    test_input, expected, name = test["input"], test["output"], test.get("fn_name")
    if name is not None:
        if not (isinstance(name, str) and name.isidentifier() and isinstance(test_input, list)):
            raise ValueError("a test that calls a function needs its name under fn_name, and a list under input")
        return ProgramTest(stdin="\n".join(map(json.dumps, test_input)), expected=expected, function=name)
    if test.get("testtype") == "functional":
        function = _function_of(test) or named
        if function is None or not function.isidentifier():
            raise ValueError("a test with testtype = functional needs the function's name under metadata.func_name")
        if not isinstance(test_input, str) or not isinstance(expected, str):
            raise ValueError("a test with testtype = functional has each argument, and the output, as JSON in a text")
        for line in test_input.split("\n"):
            json.loads(line)  # a test that cannot be read is the row's mistake, not the program's
        return ProgramTest(stdin=test_input, expected=json.loads(expected), function=function)
    return ProgramTest(stdin=_text(test_input), expected=_text(expected))


def _function_of(test: Mapping[str, Any]) -> str | None:
    """`metadata.func_name`; the metadata may be a JSON string, as in LiveCodeBench."""
    metadata = test.get("metadata")
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        return None
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None


def _text(value: object) -> str:
    """Standard input or output; a list is joined as lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def outputs_match(printed: str, expected: str) -> bool:
    """Whether two outputs have equally many lines, not counting blank lines at both ends, with the same tokens in each,
    compared as text or as numbers.
    """
    lines, expected_lines = printed.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(expected_lines) and all(map(_lines_match, lines, expected_lines))


def _lines_match(line: str, expected: str) -> bool:
    tokens, expected_tokens = line.split(), expected.split()
    return len(tokens) == len(expected_tokens) and all(map(_tokens_match, tokens, expected_tokens))


def _tokens_match(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
        return False
    if "e" in expected.lower() or expected.partition(".")[2].strip("0"):
        return _is_close(float(actual), float(expected))
    return Decimal(actual) == Decimal(expected)


def _is_close(actual: float, expected: float) -> bool:
    return math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def values_match(actual: object, expected: object) -> bool:
    """Whether two JSON values are equal; numbers with a fraction may differ by `TOLERANCE`."""
    if isinstance(expected, list):
        return isinstance(actual, list) and len(actual) == len(expected) and all(map(values_match, actual, expected))
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or actual.keys() != expected.keys():
            return False
        return all(values_match(actual[name], expected[name]) for name in expected)
    if isinstance(expected, float) and isinstance(actual, int | float) and not expected.is_integer():
        return _is_close(actual, expected)
    if isinstance(actual, bool) and not isinstance(expected, bool):
        return False  # in Python, True == 1
    return bool(actual == expected)

"""Problem codes: what other code asks about a problem, whatever its message says."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import load
from skyrl.errors import NO_SUCH_FIELD, ConfigError, Problem, ProblemCode
from skyrl.interop.skyrl.settings import refusal
from skyrl.interop.writing import Writing


def problem_of(override: str) -> Problem:
    with pytest.raises(ConfigError) as error:
        load([], [override])
    [problem] = error.value.problems
    return problem


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("trainer.xyzzy=1", "unknown field"),
        ("xyzzy=1", "unknown field"),
        ("trainer.epoch=1", "misspelled field"),
        ("trainer.epochs.more=1", "no table"),
        ("trainer.policy.megatron_config.freeze_moe_router=true", "not implemented"),
        ("trainer.strategy=fsdp3", "not a choice"),
        ("trainer.epochs=two", ""),
    ],
)
def test_a_refused_assignment_has_the_code_of_its_kind(override: str, code: str) -> None:
    problem = problem_of(override)
    assert problem.code == code
    assert (problem.code in NO_SUCH_FIELD) == problem.message.startswith("no such field")


@pytest.mark.parametrize(("kind", "printed"), [("sftt", "'sftt'"), ("a is not b", "'a is not b'"), (5, "5")])
def test_an_unknown_kind_is_refused_with_the_kinds_of_runs(kind: object, printed: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([], {"kind": kind})
    assert [problem.message for problem in error.value.problems] == [
        f"{printed} is not one of: rl, sft, reward_model, preference"
    ]


def test_a_foreign_setting_is_reported_by_the_code_of_its_problem() -> None:
    writing = Writing("script.sh")
    reworded = "worded in another way"
    outcomes: dict[str, Any] = {}
    codes: tuple[ProblemCode, ...] = ("not implemented", "unknown field", "misspelled field")
    for code in codes:
        line = refusal("trainer.x", 1, [Problem(path="trainer.x", message=reworded, code=code)], "1", added=True)
        outcomes[code] = (line.outcome, line.reason == reworded)
    assert outcomes == {
        "not implemented": ("not yet", True),
        "unknown field": ("refused", False),  # it may be a field of the user's own class
        "misspelled field": ("refused", True),
    }
    assert writing.write("A", "trainer.xyzzy", "${oc.env:N}")[1][0].code == "unknown field"
    assert writing.write("A", "trainer.epochs", "env:N") == (("trainer.epochs",), [])

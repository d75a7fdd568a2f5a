"""What `import skyrl` gives: a list of names, each imported when it is first used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

import skyrl
from skyrl.errors import ConfigError
from tests.fresh_process import run_program

PUBLIC = {
    *("Callback", "Control", "Run", "TrainingState", "__version__"),
    *("evaluate", "generate", "load", "train"),
}


def test_the_public_names_are_these() -> None:
    assert set(skyrl.__all__) == PUBLIC == set(dir(skyrl))


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_a_public_name_is_typed_and_documented(name: str) -> None:
    member = getattr(skyrl, name)
    assert inspect.getdoc(member)
    methods = [method for name, method in inspect.getmembers(member, inspect.isfunction) if not name.startswith("_")]
    functions = [member] if inspect.isfunction(member) else methods
    for function in functions:
        parameters = [
            parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"
        ]
        assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters), function
    if inspect.isfunction(member):
        assert get_type_hints(member).keys() > {"return"}  # which names can be looked up outside of type checkers, too


def test_another_name_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'skyrl' has no attribute 'trian'"):
        skyrl.trian  # type: ignore[attr-defined]  # noqa: B018  # a mistake that a checker sees, too


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, skyrl; print(*sorted(sys.modules))"
    imported = run_program(program).stdout.split()
    assert [name for name in imported if name.startswith("skyrl")] == ["skyrl"]
    assert not {"attrs", "attr", "cattrs", "torch", "numpy", "click"} & {*imported}


@pytest.mark.parametrize("call", [skyrl.train, skyrl.evaluate, skyrl.generate])
def test_a_mistake_is_placed_in_the_line_of_the_call(call: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean trainer\.epochs\?  {re.escape(__file__)}:\d+"):
        call(str(tmp_path), trainer__epoch=2)

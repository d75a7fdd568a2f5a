from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from skyrl.processes.calls import name_of, resolve_name, summary
from tests.processes.objects import Counter


def test_a_method_is_found_again_by_its_name() -> None:
    name = name_of(Counter.add)
    assert name == ("tests.processes.objects", "Counter.add")
    assert resolve_name(name) is Counter.add


def local() -> Any:
    def inside(counter: Counter) -> int:
        return counter.total

    return inside


@pytest.mark.parametrize("method", [lambda counter: 1, partial(Counter.add), Counter(0).add, local()])
def test_what_cannot_be_imported_has_no_name(method: Any) -> None:
    with pytest.raises(TypeError, match="methods are sent by name"):
        name_of(method)


def test_a_summary_is_one_line_of_bounded_length() -> None:
    assert summary(ValueError("two\nlines")) == "ValueError: two lines"
    assert summary(SystemExit()) == "SystemExit"
    assert len(summary(ValueError("x" * 10_000))) == 500

"""A test of many cases fails where one of them does, and names those that do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.leaves import each


def test_every_case_that_fails_is_named_and_no_other(request: pytest.FixtureRequest) -> None:
    @each([1, 2, 3, 0])
    def divides_six(number: int, tmp_path: Path) -> None:
        assert 6 % number == 0 and number != 2

    with pytest.raises(AssertionError) as failed:
        divides_six(request, tmp_path=Path())
    message = str(failed.value)
    assert [line.split(":")[:2] for line in message.splitlines() if line[:1].isdigit()] == [
        ["2", " AssertionError"],
        ["0", " ZeroDivisionError"],
    ]


@pytest.mark.parametrize(("sampled", "by_default"), [(1, [1, 2, 3, 4, 5]), (3, [1, 4])])
def test_where_no_case_fails_the_test_passes(
    sampled: int, by_default: list[int], request: pytest.FixtureRequest
) -> None:
    seen: list[int] = []
    each([1, 2, 3, 4, 5], sampled=sampled)(seen.append)(request)
    assert seen == ([1, 2, 3, 4, 5] if request.config.getoption("--long") else by_default)

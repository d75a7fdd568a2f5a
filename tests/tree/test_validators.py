"""One-field rules: what they take, and what they say."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from skyrl.errors import ConfigError
from skyrl.tree import validators

CASES: list[tuple[Any, list[Any], list[Any]]] = [
    # validator, taken, refused
    (validators.positive, [1, 1e-9], [0, -1]),
    (validators.non_negative, [0, 1], [-1e-9]),
    (validators.fraction, [0, 0.5, 1], [-0.1, 1.1]),
    (validators.positive_fraction, [0.1, 1], [0, 1.1]),
    (validators.fraction_below_one, [0, 0.9], [1]),
    (validators.port, [1, 65535], [0, 65536]),
    (validators.negative, [-1, -0.5], [0, 2]),
    (validators.positive_or_off, [-1, 2], [0, -2]),
    (validators.at_least(3), [3, 4], [2]),
    (validators.positive_or_minus_one("all"), [-1, 1], [0, -2]),
    (validators.number_of_items(2, lambda item: item > 0, "two"), [(1, 2)], [(1,), (1, 0), (1, 2, 3)]),
]


@pytest.mark.parametrize(("validator", "accepted", "refused"), CASES)
def test_a_rule_takes_what_it_should_and_refuses_the_rest(
    validator: Any, accepted: list[Any], refused: list[Any]
) -> None:
    @attrs.frozen
    class Owner:
        size: Any = attrs.field(default=None, validator=validator)

    assert Owner().size is None  # whether a field may be empty is its type's business
    for value in accepted:
        Owner(value)
    for value in refused:
        with pytest.raises(ConfigError, match=r"Owner cannot be built \(1 problem\):\s+size +.* is not ") as caught:
            Owner(value)
        assert caught.value.problems[0].path == "size"


def test_an_empty_text_is_called_empty() -> None:
    @attrs.frozen
    class Owner:
        column: str = attrs.field(validator=validators.not_empty)

    with pytest.raises(ConfigError, match=r"column +is empty: give it a value, or leave it out"):
        Owner("")


def test_a_field_that_another_setting_replaces_names_that_one() -> None:
    @attrs.frozen
    class Owner:
        clip: float | None = attrs.field(default=None, validator=validators.left_alone("set max_norm"))

    with pytest.raises(ConfigError, match=r"1\.0 is not allowed here: set max_norm"):
        Owner(1.0)

"""Reading and replacing one value of a tree."""

from __future__ import annotations

import attrs
import pytest

from skyrl.errors import ConfigError, UnknownFieldError
from skyrl.tree import evolve_at, frozen, get_at, required
from skyrl.tree.access import default_at
from tests.tree.trees import Model, Optimizer, Run


def test_a_value_is_read_by_its_path() -> None:
    assert get_at(Run(), "critic.optimizer.lr") == 5e-6


def test_below_a_table_that_is_null_everything_is_null() -> None:
    assert get_at(Run(), "judge.optimizer.lr") is None


def test_a_default_is_that_of_the_table_that_stands_there_or_of_its_class_where_none_does() -> None:
    assert default_at(Run, "critic.optimizer.lr") == 5e-6
    assert default_at(Run, "judge.optimizer.lr") == 1e-6


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError):
        get_at(Run(), "policy.nothing")


def test_a_new_tree_has_one_value_replaced_and_shares_the_rest() -> None:
    run = Run()
    changed = evolve_at(run, "critic.optimizer.decay", 0.5)
    assert changed.critic.optimizer == Optimizer(lr=5e-6, decay=0.5)
    assert changed.policy is run.policy
    assert run.critic.optimizer.decay == 0.01


def test_a_table_that_is_null_starts_from_its_defaults() -> None:
    assert evolve_at(Run(), "judge.optimizer.lr", 1).judge == Model(optimizer=Optimizer(lr=1.0))


def test_a_replaced_value_has_to_fit() -> None:
    with pytest.raises(ConfigError, match="'x' is not a number"):
        evolve_at(Run(), "policy.optimizer.lr", "x")


@frozen
class Range:
    low: int = 0
    high: int = 1

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"{self.low} is above {self.high}")


def test_a_class_that_judges_its_fields_together_judges_a_replaced_one_too() -> None:
    assert evolve_at(Range(), "low", 1) == Range(low=1)
    with pytest.raises(ValueError, match="5 is above 1"):
        evolve_at(Range(), "low", 5)


@attrs.frozen
class Foreign:
    size: int = attrs.field(default=1, converter=int)


def test_a_class_of_attrs_alone_converts_a_replaced_value_as_it_does() -> None:
    assert evolve_at(Foreign(), "size", "3") == Foreign(size=3)


@pytest.mark.parametrize(
    ("path", "hint"),
    [("polcy.optimizer.lr", "did you mean policy?"), ("policy.optimizer.l", "lr"), ("seed.x", "fields: none")],
)
def test_a_path_that_names_no_field_is_refused_with_the_near_one(path: str, hint: str) -> None:
    with pytest.raises(UnknownFieldError, match="no such field") as caught:
        evolve_at(Run(), path, 1)
    assert hint in caught.value.problems[0].hint


def test_a_component_asks_for_what_derivation_must_have_filled() -> None:
    assert required(0, "a.b") == 0
    with pytest.raises(ConfigError, match=r"a\.b +is not set") as caught:
        required(None, "a.b")
    assert caught.value.problems[0].path == "a.b"

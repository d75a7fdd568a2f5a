"""Trees as data: dictionaries that come back, differences, fingerprints."""

from __future__ import annotations

import enum
import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import cattrs
import pytest

from skyrl.errors import ConfigError
from skyrl.tree import FREE, differences, field, fingerprint, frozen, to_dict
from skyrl.tree.dump import flatten
from tests.tree.trees import Model, Optimizer, Run, paths_of


@frozen
class Adaptive(Optimizer):
    warmup: int = 10


@frozen
class Adapted:
    """Tables whose default is not the plain instance of the declared class."""

    optimizer: Optimizer = Adaptive(lr=2.0)
    other: Optimizer | None = None
    free: int = field(default=1, metadata=FREE)


class Color(enum.Enum):
    RED = "red"


@frozen
class Exotic:
    color: Color = Color.RED
    path: Path = Path("a/b")
    stages: tuple[Optimizer, ...] = (Optimizer(lr=1.0),)


WRITTEN = Run(
    stop=("a",), options={"a": [1, {"b": None}]}, judge=Model(path="j"), critic=Model(optimizer=Adaptive(warmup=3))
)


def through_json(value: Any) -> Any:
    """What is left after a file."""
    return json.loads(json.dumps(value, allow_nan=False))


def test_a_dictionary_holds_every_field_as_plain_data() -> None:
    assert to_dict(Model(extra={"a": (1,)})) == {
        "path": None,
        "optimizer": {"lr": 1e-6, "decay": 0.01, "betas": [0.9, 0.999]},
        "extra": {"a": [1]},
    }


def test_cattrs_gives_the_same_dictionary() -> None:
    assert cattrs.unstructure(WRITTEN) == to_dict(WRITTEN)


@pytest.mark.parametrize("run", [Run(), WRITTEN])
def test_a_tree_comes_back_through_json(run: Run) -> None:
    restored = cattrs.structure(through_json(cattrs.unstructure(run)), Run)
    assert restored == run
    assert repr(restored) == repr(run)


def test_a_subclass_is_named_and_comes_back() -> None:
    data = to_dict(Model(optimizer=Adaptive(warmup=3)))
    assert data["optimizer"]["class"] == "tests.tree.test_dump:Adaptive"
    assert cattrs.structure(data, Model) == Model(optimizer=Adaptive(warmup=3))


@pytest.mark.parametrize(
    "adapted",
    [
        Adapted(),
        Adapted(optimizer=Optimizer(lr=3.0)),
        Adapted(optimizer=Adaptive(lr=2.0, warmup=1), other=Adaptive()),
        Adapted(other=Optimizer()),
    ],
)
def test_the_class_of_a_table_comes_back_whatever_the_default_is(adapted: Adapted) -> None:
    restored = cattrs.structure(through_json(to_dict(adapted)), Adapted)
    assert restored == adapted
    assert type(restored.optimizer) is type(adapted.optimizer)


def test_only_a_class_that_is_not_expected_is_named() -> None:
    assert "class" not in to_dict(Adapted())["optimizer"]
    assert "class" not in to_dict(Run())["critic"]


def test_types_of_others_are_stored_by_their_cattrs_hooks() -> None:
    data = to_dict(Exotic())
    assert through_json(data) == {
        "color": "red",
        "path": "a/b",
        "stages": [{"lr": 1.0, "decay": 0.01, "betas": [0.9, 0.999]}],
    }
    assert cattrs.structure(data, Exotic) == Exotic()


def test_a_partial_dictionary_is_patched_onto_the_defaults() -> None:
    assert cattrs.structure({"critic": {"optimizer": {"decay": 0.5}}}, Run).critic.optimizer.lr == 5e-6


def test_a_wrong_dictionary_is_refused_with_everything_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match="Run cannot be built") as caught:
        cattrs.structure({"sed": 1, "steps": 0, "policy": {"optimizer": {"lr": "x", "decay": True}}, "name": 5}, Run)
    assert sorted(paths_of(caught.value)) == ["name", "policy.optimizer.decay", "policy.optimizer.lr", "sed", "steps"]


@pytest.mark.parametrize("data", [None, 5, "text", [], [("seed", 1)], Run()])
def test_what_is_no_dictionary_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not a table \(Run\)"):
        cattrs.structure(data, Run)


def test_classes_of_others_are_none_of_our_business() -> None:
    @attrs.frozen
    class Plain:
        size: int = 1

    assert cattrs.unstructure(Plain()) == {"size": 1}
    assert cattrs.structure({"size": "3"}, Plain) == Plain(3)  # cattrs casts, as it does


def test_the_dictionary_belongs_to_who_asked_for_it() -> None:
    to_dict(WRITTEN)["options"]["a"].append(9)
    assert WRITTEN.options == {"a": (1, {"b": None})}


# Differences


def test_differences_are_told_by_path() -> None:
    other = Run(seed=1, critic=Model(optimizer=Optimizer(lr=5e-6, decay=0.5)))
    assert differences(Run(), other) == {"seed": (42, 1), "critic.optimizer.decay": (0.01, 0.5)}


def test_differences_know_one_from_true_and_from_one_point_zero() -> None:
    true, integer, real = (Run(options={"a": value}) for value in (True, 1, 1.0))
    assert true == integer == real
    assert differences(true, integer) == {"options": ({"a": True}, {"a": 1})}
    assert differences(integer, real) == {"options": ({"a": 1}, {"a": 1.0})}
    assert differences(Run(shard=True), Run(shard=1)) == {"shard": (True, 1)}


def test_the_order_of_keys_is_no_difference() -> None:
    assert differences(Run(options={"a": 1, "b": 2}), Run(options={"b": 2, "a": 1})) == {}


def test_a_table_against_null_differs_in_its_leaves() -> None:
    assert differences(Run(), Run(judge=Model(path="j"))) == {
        "judge.path": (None, "j"),
        "judge.optimizer.lr": (None, 1e-6),
        "judge.optimizer.decay": (None, 0.01),
        "judge.optimizer.betas": (None, [0.9, 0.999]),
        "judge.extra": (None, {}),
    }


def test_differences_can_be_limited_to_what_counts() -> None:
    assert differences(Run(), Run(name="other"), roles=("identity", "numerics")) == {}


# Fingerprints


def test_a_fingerprint_can_be_redone_by_hand() -> None:
    fields = {"optimizer.betas": [0.9, 0.999], "optimizer.decay": 0.01, "optimizer.lr": 2.0, "optimizer.warmup": 10}
    text = json.dumps({"fields": fields | {"other": None}, "schema": 1}, sort_keys=True)
    assert fingerprint(Adapted()) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        (Run(name="other"), False),
        (Run(options=None), False),
        (Run(seed=1), True),
        (Run(policy=Model(path="other")), True),
        (Run(shard=1), True),
        (Run(options={}), True),
        (Run(critic=Model()), True),
    ],
)
def test_only_what_counts_changes_the_fingerprint(changed: Run, is_another: bool) -> None:
    assert (fingerprint(changed) != fingerprint(Run())) is is_another


@frozen
class Letters:
    text: str = "Übung"


def test_a_fingerprint_is_that_of_the_letters_and_not_of_their_escapes() -> None:
    text = '{"fields": {"text": "Übung"}, "schema": 1}'
    assert fingerprint(Letters()) == hashlib.sha256(text.encode()).hexdigest()


def test_the_order_of_keys_does_not_change_the_fingerprint() -> None:
    assert fingerprint(Run(options={"a": 1, "b": 2})) == fingerprint(Run(options={"b": 2, "a": 1}))


def test_a_negative_zero_is_a_zero() -> None:
    assert fingerprint(Model(optimizer=Optimizer(lr=-0.0))) == fingerprint(Model(optimizer=Optimizer(lr=0.0)))


def test_a_flat_tree_shows_a_missing_table_as_itself() -> None:
    assert flatten(Run())["judge"] is None
    assert "judge" not in flatten(WRITTEN)
    assert flatten(WRITTEN)["critic.optimizer.warmup"] == 3

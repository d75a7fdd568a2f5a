"""Only what differs from the default tree, what rules would give again, and paths with their values."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.errors import ConfigError
from skyrl.tree import evolve_at
from skyrl.tree.dump import flatten
from skyrl.tree.freeform import append, forget
from skyrl.tree.rules import derive, derived_paths
from skyrl.tree.sparse import as_toml_has_it, sparse
from tests.tree.test_named_classes import Named, Settings
from tests.tree.test_rules import RULES
from tests.tree.trees import Model, Optimizer, Run

POLICY = Model(path="a", optimizer=Optimizer(lr=0.1, betas=(0.5,)))


@pytest.mark.parametrize(
    ("run", "left_out", "data"),
    [
        (Run(), (), {}),
        (Run(seed=7, stop=("x",)), (), {"seed": 7, "stop": ["x"]}),
        (Run(policy=POLICY), (), {"policy": {"path": "a", "optimizer": {"lr": 0.1, "betas": [0.5]}}}),
        (Run(policy=POLICY), ("policy.path", "policy.optimizer.lr"), {"policy": {"optimizer": {"betas": [0.5]}}}),
        (Run(policy=POLICY, seed=7), ("policy",), {"seed": 7}),
        (Run(judge=Model()), (), {"judge": {}}),  # a table where there was none
        (Run(judge=POLICY), ("judge.path",), {"judge": {"optimizer": {"lr": 0.1, "betas": [0.5]}}}),
        (Run(mode=None), (), {"mode": None}),
    ],
)
def test_only_what_differs_from_the_default_is_written(run: Run, left_out: tuple[str, ...], data: Any) -> None:
    assert sparse(run, leave_out=left_out) == data


def test_differences_are_from_the_instance_that_is_given() -> None:
    before = Run(seed=7, policy=POLICY)
    assert sparse(before, before) == {}
    assert sparse(Run(policy=Model(path="b", optimizer=POLICY.optimizer)), before) == {
        "seed": 42,
        "policy": {"path": "b"},
    }


def test_toml_has_a_word_for_null_at_any_depth_of_a_table_whose_class_is_named() -> None:
    assert as_toml_has_it({"table": {"more": [None, {"a": None}, 1]}}, Named) == {
        "table": {"more": ["none", {"a": "none"}, 1]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run", "path"),
    [
        (Named(kind="settings", table=Settings(more={"a": None})), "table.more.a"),  # type: ignore[arg-type]  # as `ClassOf` has it
        (Named(table={"a": [None]}), "table.a.0"),  # nobody knows its class, so it is what was written
    ],
)
def test_of_a_tree_it_is_known_what_is_free_where_the_word_for_null_is_a_text(run: Named, path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        as_toml_has_it(sparse(run), run)
    assert [problem.path for problem in raised.value.problems] == [path]
    assert as_toml_has_it({"table": {"rate": 0.25}}, run) == {"table": {"rate": 0.25}}


def test_toml_has_a_word_for_null_where_the_field_may_be_null_and_has_no_such_word_itself() -> None:
    written = {"steps": None, "stop": None, "judge": None, "policy": {"path": None}}
    assert as_toml_has_it(written, Run) == {
        "steps": "none", "stop": "none", "judge": "none", "policy": {"path": "none"},
    }  # fmt: skip
    with pytest.raises(ConfigError) as raised:
        as_toml_has_it({"mode": None, "policy": {"extra": {"deep": {"er": None}}}}, Run)
    assert [problem.path for problem in raised.value.problems] == ["mode", "policy.extra.deep.er"]


def test_what_rules_would_give_again_is_derived_and_what_a_person_chose_is_not() -> None:
    derived = derive(Run(seed=21), RULES, {})[0]
    assert set(derived_paths(derived, RULES)) == {"steps", "judge", "policy.optimizer.decay"}
    assert set(derived_paths(evolve_at(derived, "steps", 5), RULES)) == {"judge", "policy.optimizer.decay"}
    assert derived_paths(Run(seed=0), RULES) == ()


def test_every_leaf_has_its_path_and_a_table_that_is_none_its_own() -> None:
    flat = flatten(Run(policy=POLICY))
    assert (flat["seed"], flat["policy.path"], flat["policy.optimizer.betas"], flat["judge"]) == (42, "a", [0.5], None)
    assert flatten(Run(policy=POLICY), {"identity"}).keys() == {"policy.path", "critic.path"} & flat.keys()
    assert flatten(Run(), {"free"}) == {"name": "run"}


@pytest.mark.parametrize(
    ("names", "default", "left"),
    [
        (("a", "b"), {}, {"a": {"c": 2}, "d": 3}),
        (("a", "b"), {"a": {"b": 9}}, {"a": {"b": 9, "c": 2}, "d": 3}),
        (("d",), {"d": (1, 2)}, {"a": {"b": 1, "c": 2}, "d": [1, 2]}),
        (("d",), None, {"a": {"b": 1, "c": 2}}),
    ],
)
def test_a_value_that_is_forgotten_is_what_the_default_has(names: tuple[str, ...], default: Any, left: Any) -> None:
    holder: dict[str, Any] = {"a": {"b": 1, "c": 2}, "d": 3}
    forget(holder, names, default)
    assert holder == left


@pytest.mark.parametrize(
    ("names", "default", "hint"),
    [
        (("x",), {}, "entries: a, d"),
        (("a", "x"), {"x": 1}, "entries: b, c"),
        (("x", "b"), {"x": {"b": 1}}, "entries: a, d"),
        (("d", "x"), {"d": {"x": 1}}, "entries: a, d"),  # nothing is in a number
    ],
)
def test_what_is_not_there_cannot_be_forgotten(names: tuple[str, ...], default: Any, hint: str) -> None:
    holder: dict[str, Any] = {"a": {"b": 1, "c": 2}, "d": 3}
    with pytest.raises(ConfigError) as caught:
        forget(holder, names, default)
    [problem] = caught.value.problems
    assert (problem.message, problem.hint) == ("there is no such entry to reset", hint)
    assert holder == {"a": {"b": 1, "c": 2}, "d": 3}


def test_items_are_added_to_a_list_and_to_nothing_else() -> None:
    holder: dict[str, Any] = {"a": [1], "b": 2}
    append(holder, "a", (2, 3))
    append(holder, "a", 4)
    append(holder, "c", "x")
    assert holder == {"a": [1, 2, 3, 4], "b": 2, "c": ["x"]}
    with pytest.raises(ConfigError, match="is not a list"):
        append(holder, "b", 1)

"""Patching the default instance: siblings stay, later wins, everything wrong is told, once and with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from skyrl.errors import Problem
from skyrl.tree import FrozenDict, field, frozen, get_at
from skyrl.tree.builder import TreeBuilder
from skyrl.tree.origins import Assignment, Origin
from skyrl.tree.types import display_value
from tests.tree.trees import Model, Optimizer, Run, arguments, built, only_problem, toml, values


@frozen
class Adaptive(Optimizer):
    decay: float = 0.5
    warmup: int = 10


@frozen
class Range:
    """A class that judges two of its fields together, as attrs allows."""

    low: int = 0
    high: int = 10

    def __attrs_post_init__(self) -> None:
        """The low end is below the high one."""
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} is not below high = {self.high}")


@frozen
class Foreign:
    """Fields with attrs' own validators and a converter."""

    size: int = field(default=1, validator=attrs.validators.ge(1))
    text: Any = field(default="a", validator=attrs.validators.instance_of(str))
    minutes: float = field(default=1.0, converter=lambda value: 60.0 if value == "1h" else value)
    range: Range = Range()


def assign(builder: TreeBuilder[Any], path: str, value: Any) -> TreeBuilder[Any]:
    """Assign one value from Python."""
    builder.assign(Assignment(path=tuple(path.split(".")), value=value, origin=Origin(kind="python")))
    return builder


# What an assignment leaves alone


def test_siblings_keep_the_defaults_of_the_instance_not_of_the_class() -> None:
    run = built(arguments("critic.optimizer.decay=0.2"))
    assert run.critic.optimizer == Optimizer(lr=5e-6, decay=0.2)
    assert run.policy == Run().policy


def test_a_table_in_a_file_leaves_its_siblings_alone(tmp_path: Path) -> None:
    run = built(toml(tmp_path, "[critic.optimizer]\ndecay = 0.2\n[policy.extra]\na = 1"))
    assert run.critic.optimizer == Optimizer(lr=5e-6, decay=0.2)
    assert run.policy == Model(path="start", extra={"a": 1})


def test_nothing_assigned_is_the_default_itself() -> None:
    default = Run()
    assert TreeBuilder(default).build() is default


def test_untouched_branches_are_shared() -> None:
    default = Run()
    builder = assign(TreeBuilder(default), "policy.optimizer.lr", 1.0)
    assert builder.build().critic is default.critic


def test_an_optional_table_starts_from_the_defaults_of_its_class() -> None:
    assert built(arguments("judge.path=other")).judge == Model(path="other")


def test_an_optional_table_that_was_set_to_null_starts_anew() -> None:
    assert built(arguments("judge.path=a", "judge=null", "judge.optimizer.lr=1")).judge == Model(
        optimizer=Optimizer(lr=1.0)
    )


def test_an_optional_table_can_be_switched_off_by_a_later_file(tmp_path: Path) -> None:
    assert built(toml(tmp_path, "[judge]\npath = 'a'", "judge = 'none'")).judge is None


# What wins


def test_a_later_assignment_wins(tmp_path: Path) -> None:
    assert built(arguments("seed=1", "seed=2")).seed == 2
    assert built(toml(tmp_path, "seed = 1", "seed = 2")).seed == 2


def test_a_list_replaces_a_list() -> None:
    assert built(arguments("stop=['a', 'b']", "stop=['c']")).stop == ("c",)


def test_tables_merge_key_by_key_and_deeply(tmp_path: Path) -> None:
    builder = toml(tmp_path, "[options]\na = 1\nin = {x = 1, y = [1]}", "[options]\nb = 2\nin = {y = [2], z = {}}")
    assert built(builder).options == {"a": 1, "in": {"x": 1, "y": (2,), "z": {}}, "b": 2}


def test_a_key_of_a_table_is_set_alone() -> None:
    builder = arguments('options={"a": 1, "in": {"x": 1}}', "options.in.y=2", 'options."dotted.key"=3')
    assert built(builder).options == {"a": 1, "in": {"x": 1, "y": 2}, "dotted.key": 3}


def test_a_value_gives_way_to_a_table_and_a_table_to_a_value() -> None:
    assert built(arguments("options.a=1", "options.a.b=2")).options == {"a": {"b": 2}}
    assert built(arguments("options.a.b=2", "options.a=1")).options == {"a": 1}


def test_a_table_takes_the_place_of_a_list_and_its_keys_are_no_indices() -> None:
    assert built(arguments("options.a=[1, 2]", 'options.a={"0": 5}')).options == {"a": {"0": 5}}
    assert built(arguments("options.a=[1, 2]", "options.a.0=5")).options == {"a": (5, 2)}


def test_an_empty_table_changes_no_table_and_is_one_where_there_was_none() -> None:
    assert built(values(options={})).options == FrozenDict()
    assert built(values(options={"a": 1})).options == {"a": 1}
    assert built(arguments("options.a=1", "options={}")).options == {"a": 1}
    assert built(arguments("options.a.b=1", "options.a={}", "options.c={}")).options == {"a": {"b": 1}, "c": {}}


def test_a_table_can_be_set_to_null() -> None:
    assert built(arguments("options.a=1", "options=null")).options is None


def test_keys_of_a_typed_table_have_its_type() -> None:
    builder = arguments("weights.a=1", 'weights={"b": 2}')
    assert repr(built(builder).weights) == "FrozenDict({'a': 1.0, 'b': 2.0})"
    assert only_problem(arguments("weights.a=x")).message == "'x' is not a number"


def test_an_instance_takes_the_place_of_a_table() -> None:
    builder = values(critic__optimizer=Optimizer(decay=0.5))
    assert built(builder).critic == Model(optimizer=Optimizer(lr=1e-6, decay=0.5))


# Null


@pytest.mark.parametrize("word", ["null", "none", "None"])
def test_null_on_the_command_line(word: str) -> None:
    run = built(arguments(f"steps={word}", f"policy.path={word}", f"options={word}", f"judge={word}", f"name={word}"))
    assert (run.steps, run.policy.path, run.options, run.judge) == (None, None, None, None)
    assert run.name == word


def test_null_in_toml_is_the_text_none_where_the_field_is_optional(tmp_path: Path) -> None:
    run = built(toml(tmp_path, "steps = 'none'\nname = 'none'\nmode = 'none'\njudge = 'none'\n[policy]\npath = 'none'"))
    assert (run.steps, run.policy.path, run.judge) == (None, None, None)
    assert (run.name, run.mode) == ("none", "none")


def test_other_words_are_not_null_in_toml(tmp_path: Path) -> None:
    assert built(toml(tmp_path, "[policy]\npath = 'null'")).policy.path == "null"
    assert only_problem(toml(tmp_path, "judge = 'null'")).message == "'null' is not a table (Model)"


def test_null_is_refused_where_a_value_must_be() -> None:
    assert only_problem(arguments("seed=null")).message == "'null' is not a whole number"
    assert only_problem(values(seed=None)).message == "null is not a whole number"
    assert only_problem(values(policy=None)).message == "null is not a table (Model)"


# What is refused


def test_a_wrong_value_is_told_with_path_and_argument() -> None:
    assert only_problem(arguments("seed=1", "policy.optimizer.lr=fast")) == Problem(
        path="policy.optimizer.lr", message="'fast' is not a number", location="argument 2"
    )


def test_a_wrong_value_is_told_with_file_and_line(tmp_path: Path) -> None:
    problem = only_problem(toml(tmp_path, "seed = 1\n\n[policy.optimizer]\nlr = '1e-6'"))
    assert problem == Problem(
        path="policy.optimizer.lr",
        message="'1e-6' is not a number",
        hint="remove the quotes",
        location=f"{tmp_path}/1.toml:4",
    )


def test_a_wrong_value_keeps_the_field_at_what_it_was() -> None:
    builder = arguments("seed=7", "seed=x")
    assert builder.build().seed == 7
    assert builder.broken == {"seed"}


def test_a_validator_refuses_in_files_and_arguments(tmp_path: Path) -> None:
    assert only_problem(arguments("steps=0")).message == "0 is not positive"
    assert only_problem(toml(tmp_path, "steps = -1")).message == "-1 is not positive"


def test_every_mistake_is_told_once(tmp_path: Path) -> None:
    text = "sed = 1\nsteps = 0\n[policy]\npath = 1\nfoo = 2\n"
    builder = toml(tmp_path, text + "[policy.optimizer]\nlr = 'x'\nbetas = [0.9, 'y']\ndecay = 0.3")
    run = builder.build()
    assert sorted((problem.path, problem.location[-1]) for problem in builder.problems) == [
        ("policy.foo", "5"),
        ("policy.optimizer.betas", "8"),
        ("policy.optimizer.lr", "7"),
        ("policy.path", "4"),
        ("sed", "1"),
        ("steps", "2"),
    ]
    assert run.policy.optimizer == Optimizer(decay=0.3)


def test_a_value_where_a_table_belongs_is_refused() -> None:
    assert only_problem(arguments("policy=5")).message == "5 is not a table (Model)"
    assert only_problem(arguments("policy=big")).message == "'big' is not a table (Model)"
    assert only_problem(values(policy=[1])).message == "[1] is not a table (Model)"


def test_a_name_below_a_value_is_refused() -> None:
    assert only_problem(arguments("seed.x=1")).message == "no such field: seed is a whole number"


def test_a_whole_table_of_text_is_read_key_by_key() -> None:
    builder = arguments('policy={"path": "p", "optimizer": {"lr": "x"}, "pth": 1}')
    assert builder.build().policy.path == "p"
    assert sorted(problem.path for problem in builder.problems) == ["policy.optimizer.lr", "policy.pth"]


def test_a_misspelled_name_and_what_it_may_have_meant_are_broken() -> None:
    builder = arguments("policy.optimizer.lrr=1")
    assert builder.broken == {"policy.optimizer.lrr", "policy.optimizer.lr"}
    assert only_problem(builder).message == "no such field; did you mean policy.optimizer.lr?"


def test_an_instance_of_an_undecorated_subclass_is_refused_since_its_fields_would_be_lost() -> None:
    class Lost(Optimizer):
        extra: int = 1

    assert "lacks the decorator @frozen" in only_problem(values(policy__optimizer=Lost())).message


@pytest.mark.parametrize("name", ["seed", "on", "stop"])
def test_an_empty_table_is_no_scalar_and_no_list(name: str) -> None:
    assert only_problem(values(**{name: {}})).message.startswith("{} is not ")


# What a class of somebody else's refuses


def test_attrs_own_validators_become_problems() -> None:
    builder = assign(assign(TreeBuilder(Foreign()), "size", 0), "text", 5)
    assert [problem.path for problem in builder.problems] == ["size", "text"]
    assert builder.problems[0].message == "'size' must be >= 1: 0"
    assert "must be <class 'str'>" in builder.problems[1].message


def test_a_fields_own_converter_runs_for_files_as_in_python() -> None:
    assert assign(TreeBuilder(Foreign()), "minutes", "1h").build() == Foreign(minutes="1h") == Foreign(minutes=60.0)  # type: ignore[arg-type]  # converted


def test_what_a_class_refuses_as_a_whole_keeps_the_table_and_breaks_it() -> None:
    builder = assign(assign(assign(TreeBuilder(Foreign()), "range.low", 5), "range.high", 3), "size", 2)
    assert builder.build() == Foreign(size=2)
    assert builder.problems == [
        Problem(path="range", message="low = 5 is not below high = 3", location=builder.problems[0].location)
    ]
    assert builder.broken == {"range"}


def test_a_class_judges_its_fields_when_all_are_assigned() -> None:
    assert assign(assign(TreeBuilder(Foreign()), "range.low", 20), "range.high", 30).build().range == Range(
        low=20, high=30
    )


# Subclasses


def test_a_class_tag_takes_an_imported_subclass() -> None:
    tagged = {"lr": 1.0, "warmup": 3, "class": "tests.tree.test_builder:Adaptive"}
    assert built(values(policy__optimizer=tagged)).policy.optimizer == Adaptive(lr=1.0, warmup=3)


def test_a_class_tag_keeps_what_the_instance_changed_and_takes_the_subclass_for_the_rest() -> None:
    builder = arguments("critic.optimizer.class=tests.tree.test_builder:Adaptive")
    assert built(builder).critic.optimizer == Adaptive(lr=5e-6, decay=0.5)


@pytest.mark.parametrize("tag", ["os:path", "antigravity:fly", "tests.tree.trees:Model", "", "Adaptive", 5, None])
def test_a_class_tag_never_imports_and_never_takes_another_class(tag: Any) -> None:
    import sys

    before = set(sys.modules)
    problem = only_problem(values(policy__optimizer={"class": tag, "lr": 2.0}))
    assert problem.path == "policy.optimizer.class"
    assert problem.message == f"{display_value(tag)} is not an imported subclass of tests.tree.trees:Optimizer"
    assert set(sys.modules) == before


def test_a_wrong_class_tag_hides_no_other_mistake() -> None:
    builder = values(policy__optimizer={"class": "x:Y", "lr": "fast", "decay": 0.5})
    assert builder.build().policy.optimizer == Optimizer(decay=0.5)
    assert sorted(problem.path for problem in builder.problems) == ["policy.optimizer.class", "policy.optimizer.lr"]


# Sources


def test_a_source_that_changes_after_loading_changes_nothing() -> None:
    source: dict[str, Any] = {"options": {"a": [1]}, "stop": ["a"], "policy": {"extra": {"b": {"c": 1}}}}
    run = built(values(**source))
    before = hash(run)
    source["options"]["a"].append(2)
    source["stop"].append("b")
    source["policy"]["extra"]["b"]["c"] = 2
    assert (run.options, run.stop, run.policy.extra) == ({"a": (1,)}, ("a",), {"b": {"c": 1}})
    assert hash(run) == before


def test_an_enormous_path_is_refused_and_nothing_breaks() -> None:
    deep = arguments("options." + ".".join("a" * 1_000) + "=1")
    assert only_problem(deep).path.startswith("options.a.a.a")
    assert get_at(deep.build(), "options") is None

"""The decorator of configuration classes, and what can be asked about one."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import attrs
import pytest

from skyrl.errors import ConfigError, Problem
from skyrl.tree import FREE, IDENTITY, FrozenDict, evolve_at, field, frozen
from skyrl.tree.classes import (
    class_name,
    docs_of,
    fields_of,
    is_config,
    known_class,
    leaf_paths,
    resume_role,
    table_paths,
)
from tests.tree.trees import Model, Optimizer, Run


@frozen
class Faster(Optimizer):
    """A subclass in a module that postpones its annotations, as this one does."""

    lr: float = 1.0
    """Another default."""

    window: tuple[int, ...] = (1, 2)
    """A field of its own."""


class Undecorated(Optimizer):
    lost: int = 1


def test_every_field_has_its_type_although_annotations_are_postponed() -> None:
    assert {name: attribute.type for name, attribute in fields_of(Faster).items()} == {
        "lr": float,
        "window": tuple[int, ...],
        "decay": float,
        "betas": tuple[float, ...],
    }
    assert Faster(window=[3]).window == (3,)  # type: ignore[arg-type]  # converted or refused


@pytest.mark.parametrize("wrong", [{"lr": "fast"}, {"window": [1.5]}, {"decay": True}, {"betas": 1}])
def test_python_refuses_what_a_file_would(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Faster cannot be built|Optimizer cannot be built") as caught:
        Faster(**wrong)
    assert [problem.path for problem in caught.value.problems] == list(wrong)


def test_a_validator_names_the_field_and_the_class() -> None:
    with pytest.raises(
        ConfigError, match=r"Optimizer cannot be built \(1 problem\):\s+lr +-1\.0 is not zero or positive"
    ):
        Optimizer(lr=-1)


def test_everything_that_does_not_fit_is_told_at_once() -> None:
    wrong: dict[str, Any] = {"lr": "fast", "decay": None, "betas": [0.9, "x"]}
    with pytest.raises(ConfigError) as caught:
        Optimizer(**wrong)
    assert [(problem.path, problem.message) for problem in caught.value.problems] == [
        ("lr", "'fast' is not a number"),
        ("decay", "null is not a number"),
        ("betas", "item 1: 'x' is not a number"),
    ]


def test_a_default_is_frozen_and_has_to_fit_like_any_other_value() -> None:
    @frozen
    class Defaults:
        names: tuple[str, ...] = ["a"]  # type: ignore[assignment]  # converted or refused
        table: Mapping[str, Any] = attrs.field(factory=lambda: {"a": [1]})
        rate: float = 1

    assert repr(Defaults()).endswith("Defaults(names=('a',), table=FrozenDict({'a': (1,)}), rate=1.0)")
    assert Defaults() == Defaults(names=("a",), table={"a": [1]}, rate=1.0)

    @frozen
    class Wrong:
        rate: float = "fast"  # type: ignore[assignment]  # converted or refused

    with pytest.raises(ConfigError, match="'fast' is not a number"):
        Wrong()


def test_an_unknown_name_is_a_type_error_as_for_any_function() -> None:
    make: Callable[..., Any] = Optimizer
    with pytest.raises(TypeError, match="rate  no such field"):
        make(rate=1.0)


@frozen
class Range:
    low: int = 0
    high: int = 1

    def own_problems(self) -> Iterator[Problem]:
        if self.low > self.high:
            yield Problem(path="low", message=f"{self.low} is above {self.high}")


def test_a_class_is_asked_about_its_fields_together_once_each_of_them_fits() -> None:
    assert Range(low=1).low == 1
    with pytest.raises(ConfigError, match="5 is above 1"):
        Range(low=5)
    with pytest.raises(ConfigError, match="'x' is not a whole number") as caught:
        Range(low=5, high="x")  # type: ignore[arg-type]  # refused
    assert "above" not in str(caught.value)


def test_a_notebook_is_shown_the_fields_and_their_defaults() -> None:
    signature = inspect.signature(Optimizer)
    assert str(signature) == "(*, lr: float = 1e-06, decay: float = 0.01, betas: tuple[float, ...] = (0.9, 0.999))"
    assert signature.parameters["lr"].default == Optimizer().lr


def test_equality_and_text_go_by_the_fields_unless_one_is_left_out() -> None:
    @frozen
    class Secretive:
        shown: int = 1
        key: str = attrs.field(default="", repr=False, eq=False)

    assert Secretive(key="k") == Secretive(key="l") != Secretive(shown=2)
    assert hash(Secretive(key="k")) == hash(Secretive(key="l"))
    assert repr(Secretive(key="k")).endswith("Secretive(shown=1)")
    assert Optimizer() != Faster()
    assert Optimizer().__eq__("Optimizer") is NotImplemented
    assert repr(Model(path="p")).startswith("Model(path='p', optimizer=Optimizer(lr=1e-06, decay=0.01, betas=(0.9")


def test_a_class_may_bring_its_own_equality_and_text() -> None:
    @frozen
    class Own:
        size: int = 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own)

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "mine"

    assert Own(size=1) == Own(size=2)
    assert (hash(Own()), repr(Own())) == (7, "mine")


def test_instances_cannot_be_changed() -> None:
    run: Any = Run()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        run.seed = 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        del run.seed
    with pytest.raises((AttributeError, TypeError)):
        run.new = 1


def test_fields_are_given_by_keyword_only() -> None:
    make: Callable[..., Any] = Optimizer
    with pytest.raises(TypeError):
        make(1.0)


def test_equal_instances_have_equal_hashes_also_after_a_copy() -> None:
    run = Run(options={"a": [1, {"b": None}]}, policy=Model(extra={"x": (1,)}))
    for twin in (copy.copy(run), copy.deepcopy(run), pickle.loads(pickle.dumps(run)), evolve_at(run, "seed", 42)):
        assert twin == run
        assert hash(twin) == hash(run)
        assert type(twin.options) is FrozenDict


def test_a_field_without_a_default_is_refused_since_files_are_patches_of_the_default_instance() -> None:
    with pytest.raises(TypeError, match=r"Bare\.size needs a default"):

        @frozen
        class Bare:
            size: int


def test_a_new_default_without_a_type_is_refused_since_it_would_not_be_a_field() -> None:
    with pytest.raises(TypeError, match=r"Quiet\.lr needs a type: write lr: <type> = <default>"):

        @frozen
        class Quiet(Optimizer):
            lr = 0.5


def test_an_annotation_that_does_not_exist_at_run_time_is_told() -> None:
    @frozen
    class Local:
        path: Nowhere | None = None  # type: ignore[name-defined]  # noqa: F821 - there is no such class

    with pytest.raises(TypeError, match=r"a field of .*Local is annotated with Nowhere"):
        Local()


def test_a_class_is_a_configuration_if_it_or_a_base_was_decorated() -> None:
    assert is_config(Optimizer)
    assert is_config(Faster)
    assert is_config(Undecorated)
    assert not is_config(Optimizer())
    assert not is_config(attrs.frozen(type("Plain", (), {})))
    assert not is_config(dict)


def test_a_class_that_is_defined_again_does_not_unmake_the_first() -> None:
    def define() -> type[Any]:
        @frozen
        class Again:
            size: int = 1

        return Again

    first, second = define(), define()
    assert is_config(first)
    assert is_config(second)
    assert known_class(class_name(second)) is second


def test_a_class_is_known_by_module_and_name_once_it_is_imported() -> None:
    assert class_name(Faster) == "tests.tree.test_classes:Faster"
    assert known_class("tests.tree.test_classes:Faster") is Faster
    assert known_class("tests.tree.test_classes:Undecorated") is None
    assert known_class("email.message:Message") is None


def test_docs_are_the_texts_below_the_fields_of_a_class_and_its_bases() -> None:
    assert docs_of(Faster) == {
        "lr": "Another default.",
        "window": "A field of its own.",
        "decay": "Weight decay.",
        "betas": "Decay rates.",
    }


def test_a_class_without_source_has_no_docs() -> None:
    module = types.ModuleType("made_up")
    sys.modules["made_up"] = module
    try:
        exec("from skyrl.tree import frozen\n@frozen\nclass X:\n    a: int = 1\n    '''Doc.'''", vars(module))
        assert docs_of(module.X) == {}
        assert module.X(a=2).a == 2
    finally:
        del sys.modules["made_up"]


def test_paths_lead_to_every_leaf_and_table_those_of_optional_tables_included() -> None:
    leaves = [path for path, _ in leaf_paths(Run)]
    assert leaves[:3] == ["seed", "name", "on"]
    assert {"policy.optimizer.lr", "critic.extra", "judge.optimizer.betas", "options"} <= set(leaves)
    assert set(table_paths(Run)) == {
        *("policy", "policy.optimizer", "critic", "critic.optimizer", "judge", "judge.optimizer"),
    }


def test_a_field_is_numerics_unless_it_says_otherwise() -> None:
    assert {name: resume_role(attribute) for name, attribute in fields_of(Model).items()} == {
        "path": "identity",
        "optimizer": "numerics",
        "extra": "numerics",
    }
    assert resume_role(fields_of(Run)["name"]) == "free"
    assert IDENTITY["role"] != FREE["role"]


def test_a_converter_of_the_fields_own_runs_before_the_type_is_looked_at() -> None:
    @frozen
    class Minutes:
        stop: float = field(default=1.0, converter=lambda value: 60.0 if value == "1h" else value)
        table: Mapping[str, Any] = field(default=FrozenDict(), converter=dict)

    assert Minutes(stop="1h", table=[("a", [1])]) == Minutes(stop=60.0, table={"a": [1]})  # type: ignore[arg-type]  # converted or refused
    with pytest.raises(ConfigError, match="'2h' is not a number"):
        Minutes(stop="2h")  # type: ignore[arg-type]  # converted or refused


@pytest.mark.parametrize(
    ("argument", "kwargs"),
    [
        ("alias", {"alias": "other"}),
        ("eq", {"eq": str.lower}),
        ("order", {"order": str.lower}),
        ("hash", {"hash": False}),
        ("on_setattr", {"on_setattr": attrs.setters.convert}),
        ("repr", {"repr": str.upper}),
    ],
)
def test_what_a_field_asks_of_attrs_in_vain_is_refused_by_name(argument: str, kwargs: dict[str, Any]) -> None:
    attribute: Any = cast(Any, field)(default="a", **kwargs)
    with pytest.raises(TypeError, match=rf"Asking\.name: field\({argument}=\.\.\.\) has no effect here"):

        @frozen
        class Asking:
            name: str = attribute


def test_a_default_that_cannot_be_made_is_tried_once() -> None:
    made = []

    def default() -> int:
        made.append(1)
        raise TypeError("no number")

    @frozen
    class Broken:
        number: int = attrs.field(factory=default)

    with pytest.raises(TypeError, match="no number") as caught:
        Broken()
    assert made == [1]
    assert caught.value.__context__ is None

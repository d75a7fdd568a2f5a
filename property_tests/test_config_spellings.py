"""TOML, JSON, command line and Python are spellings of one tree."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import cattrs
import cloudpickle
import pytest
import tomli_w
from hypothesis import assume, example, given
from hypothesis import strategies as st

from property_tests.trees import (
    Overrides,
    as_arguments,
    as_tables,
    as_toml_has_it,
    can_be_an_argument,
    can_be_in_toml,
    overrides,
    texts,
    value_of,
)
from skyrl.config import AlgorithmConfig, SkyRLTrainConfig, load, make_config
from skyrl.tree import differences, evolve_at, fingerprint, frozen, get_at, to_dict
from skyrl.tree.origins import dotted

Write = Callable[[str], str]


@frozen
class Bonus(AlgorithmConfig):
    bonus: float = 0.1


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a text to a file, the same one each time, and gives its name."""
    file = tmp_path_factory.mktemp("spellings") / "run.toml"

    def write_it(text: str) -> str:
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write_it


def the_same(one: Any, other: Any) -> bool:
    """In every value and its type."""
    return bool(one == other and differences(one, other) == {})


def by_hand(values: Overrides) -> SkyRLTrainConfig:
    """The tree, one replaced value after the other."""
    run = SkyRLTrainConfig()
    for path, value in values.items():
        run = evolve_at(run, path, value)
    return run


@given(overrides())
def test_python(values: Overrides) -> None:
    expected = by_hand(values)
    assert the_same(load([], values).config, expected)
    assert the_same(load([], as_tables(values)).config, expected)


@given(overrides())
def test_json(values: Overrides) -> None:
    tables = json.loads(json.dumps(as_tables(values)))
    assert the_same(cattrs.structure(tables, SkyRLTrainConfig), by_hand(values))


@given(overrides(null_inside=False), st.booleans())
def test_toml(write: Write, values: Overrides, multiline: bool) -> None:
    values = {path: value for path, value in values.items() if can_be_in_toml(path, value)}
    file = write(tomli_w.dumps(as_tables(as_toml_has_it(values)), multiline_strings=multiline))
    # multi-line strings are written with the line ends of the file, so that a lone carriage return does not survive
    assume(not multiline or "\r" not in repr(values).replace("\\r", "\r"))
    assert the_same(load([file]).config, by_hand(values))


@given(overrides())
def test_command_line(values: Overrides) -> None:
    values = {path: value for path, value in values.items() if can_be_an_argument(path, value)}
    assert the_same(load([], as_arguments(values)).config, by_hand(values))


@given(overrides())
def test_a_tree_comes_back_from_what_is_stored_of_it(values: Overrides) -> None:
    run = load([], values).config
    stored = json.loads(json.dumps(cattrs.unstructure(run), allow_nan=False))
    restored = cattrs.structure(stored, SkyRLTrainConfig)
    assert the_same(restored, run)
    assert fingerprint(restored) == fingerprint(run)
    assert to_dict(restored) == to_dict(run)


@pytest.mark.long
@given(overrides(), st.floats(0, 1))
def test_a_tree_with_a_class_of_ones_own_comes_back_too(values: Overrides, bonus: float) -> None:
    root = make_config(algorithm_cls=Bonus)
    run = load([], values | {"trainer.algorithm.bonus": bonus}, root).config
    assert the_same(cattrs.structure(cattrs.unstructure(run), root), run)
    in_place = evolve_at(by_hand(values), "trainer.algorithm", run.trainer.algorithm)
    restored = cattrs.structure(cattrs.unstructure(in_place), SkyRLTrainConfig)
    assert the_same(restored, in_place)
    assert isinstance(restored.trainer.algorithm, Bonus)


@given(overrides())
def test_copies_are_equal_and_have_the_same_hash(values: Overrides) -> None:
    run = load([], values).config
    for twin in (pickle.loads(pickle.dumps(run)), cloudpickle.loads(cloudpickle.dumps(run)), copy.deepcopy(run)):
        assert the_same(twin, run)
        assert hash(twin) == hash(run)


@given(st.lists(texts, min_size=1, max_size=3), texts)
@example(["0+"], "")
def test_a_key_of_a_free_form_table_has_a_path_whatever_it_is_called(names: list[str], value: str) -> None:
    table = "generator.chat_template_kwargs"
    path = dotted((*table.split("."), *names))
    run = load([], {path: value}).config
    expected: Any = value
    for name in reversed(names):
        expected = {name: expected}
    assert get_at(run, table) == expected
    assert load([], [f"{path}={json.dumps(value)}"]).config == run


@given(st.data())
def test_a_value_is_read_the_same_alone(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(["trainer.logger", "generator.sampling_params.stop", "trainer.rope_scaling"]))
    value = data.draw(value_of(path))
    assume(can_be_an_argument(path, value))
    assert get_at(load([], as_arguments({path: value})).config, path) == get_at(by_hand({path: value}), path)

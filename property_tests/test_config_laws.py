"""Laws of loading and derivation."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tomli_w
from hypothesis import assume, given
from hypothesis import strategies as st

from property_tests.trees import (
    LEAVES,
    Overrides,
    as_arguments,
    as_tables,
    as_toml_has_it,
    can_be_an_argument,
    can_be_in_toml,
    data,
    overrides,
    scalars,
)
from skyrl.config import SkyRLTrainConfig, load, resolve
from skyrl.config.derive.rules import RULES
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.tree import differences, get_at, thaw
from skyrl.tree.arguments import split_path
from skyrl.tree.dump import flatten
from skyrl.tree.origins import Origins
from skyrl.tree.types import coerce_exact

Layers = Callable[[list[Overrides]], list[str]]

TABLE = "generator.inference_engine.engine_init_kwargs"
keys = st.sampled_from(["a", "b", "c"])


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """Writes one TOML file for each set of overrides, and gives their names."""
    folder = tmp_path_factory.mktemp("layers")

    def write_them(sets: list[Overrides]) -> list[str]:
        names = [str(folder / f"{number}.toml") for number in range(len(sets))]
        for name, values in zip(names, sets, strict=True):
            with open(name, "wb") as file:
                tomli_w.dump(as_tables(as_toml_has_it(values)), file)
        return names

    return write_them


@st.composite
def paths_in_a_table(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Values at paths of one free-form table, none of which lies in another."""
    paths: list[str] = []
    for names in draw(st.lists(st.lists(keys, min_size=1, max_size=3), max_size=5)):
        path = ".".join([TABLE, *names])
        if not any(f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") for other in paths):
            paths.append(path)
    return [(path, draw(data(scalars | st.none()))) for path in paths]


@given(overrides(), st.randoms(use_true_random=False))
def test_overrides_of_different_paths_commute(values: Overrides, chance: random.Random) -> None:
    shuffled = list(values.items())
    chance.shuffle(shuffled)
    assert load([], dict(shuffled)).config == load([], values).config


@given(paths_in_a_table(), st.randoms(use_true_random=False))
def test_keys_of_a_free_form_table_commute(values: list[tuple[str, Any]], chance: random.Random) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)
    one, other = load([], dict(values)), load([], dict(shuffled))
    assert differences(one.config, other.config) == {}
    assert set(one.origins) == set(other.origins)


@given(st.lists(overrides(null_inside=False), max_size=3), overrides())
def test_the_last_origin_of_a_value_is_where_it_came_from(
    layers: Layers, files: list[Overrides], arguments: Overrides
) -> None:
    files = [{path: value for path, value in values.items() if can_be_in_toml(path, value)} for values in files]
    arguments = {path: value for path, value in arguments.items() if can_be_an_argument(path, value)}
    names = layers(files)
    loaded = load(names, as_arguments(arguments))
    sources = [*zip(names, files, strict=True), ("argument", arguments)]
    for path in {path for _, values in sources for path in values}:
        writers = [(name, values[path]) for name, values in sources if path in values]
        name, value = writers[-1]
        if isinstance(value, dict):
            continue  # tables merge: the law below
        origins = loaded.origins[path]
        assert origins[-1].location.startswith(name)
        assert get_at(loaded.config, path) == coerce_exact(value, LEAVES[path].type)
        if not any(isinstance(value, dict) for _, value in writers):
            assert len(origins) == len(writers)


@given(st.lists(st.tuples(st.lists(keys, min_size=1, max_size=3), data(scalars)), max_size=6))
def test_the_last_origin_of_every_key_of_a_free_form_table_gave_its_value(written: list[tuple[list[str], Any]]) -> None:
    arguments = [f"{'.'.join([TABLE, *names])}={json.dumps(value)}" for names, value in written]
    loaded = load([], arguments)
    root = len(TABLE.split("."))
    explained = {split_path(path)[root:]: chain[-1] for path, chain in loaded.origins.items()}
    table = thaw(get_at(loaded.config, TABLE))
    for path, value in leaves(table):
        names, given_value = written[int(explained[path].where) - 1]
        assert repr(value) == repr(thaw(coerce_exact(walk(given_value, path[len(names) :]), Any)))


def leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every path that holds no table, or an empty one."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def walk(value: Any, path: tuple[str, ...]) -> Any:
    """The value at a path inside tables."""
    for name in path:
        value = value[name]
    return value


def absurd(values: Overrides) -> bool:
    """Is there a whole number whose multiple might not fit into 64 bits?"""
    return any(isinstance(value, int) and abs(value) > 2**31 for value in values.values())


@given(overrides())
def test_resolving_twice_is_resolving_once(values: Overrides) -> None:
    assume(not absurd(values))
    once = resolve(load([], values).config)
    assert differences(once, resolve(once)) == {}


@given(overrides())
def test_resolving_changes_nothing_that_was_written(values: Overrides) -> None:
    assume(not absurd(values))
    loaded = load([], values)
    resolved, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    asks_for_derivation = {rule.writes for rule in RULES if rule.placeholder}
    before, after = flatten(loaded.config), flatten(resolved)
    changed = {path for path in before if path in after and repr(after[path]) != repr(before[path])}
    assert changed <= {rule.writes for rule in RULES}
    assert {path for path in changed & values.keys() if path not in asks_for_derivation} == set()
    unset = {rule.writes: rule.unset for rule in RULES}
    assert all((type(before[path]), before[path]) == (type(unset[path]), unset[path]) for path in changed)
    assert winners_are_rules(origins, changed)


def winners_are_rules(origins: Origins, paths: set[str]) -> bool:
    """Has a rule the last word on each of these paths?"""
    return all(origins[path][-1].kind == "rule" for path in paths)


@given(overrides())
def test_changing_the_inputs_later_changes_nothing(values: Overrides) -> None:
    kept = copy.deepcopy(values)
    run = load([], values).config
    before = hash(run)
    spoil(values)
    assert hash(run) == before
    assert run == load([], kept).config


def spoil(value: Any) -> None:
    """Change every list and table inside, in place."""
    if isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoiled"] = True
    elif isinstance(value, list):
        for item in value:
            spoil(item)
        value.append("spoiled")


def test_the_default_tree_is_hashable_and_stays_equal_to_itself() -> None:
    assert hash(SkyRLTrainConfig()) == hash(SkyRLTrainConfig())

"""YAML, JSON, sparse files, stored runs and other houses' files: one tree in every spelling, and no traceback."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import tomli_w
from hypothesis import assume, given
from hypothesis import strategies as st

from property_tests.trees import Overrides, as_arguments, as_tables, can_be_an_argument, data, overrides, scalars, texts
from skyrl.config import ConfigError, SkyRLTrainConfig, load
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.config.loading.stored import stored_form
from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.areal.keys import KEYS
from skyrl.interop.shell.scripts import read_script
from skyrl.interop.skyrl.scripts import convert_overrides
from skyrl.tree import differences
from skyrl.tree.sparse import as_toml_has_it, sparse
from skyrl.tree.yaml_file import yaml_text

Write = Callable[[str, str], str]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a text to a file with this suffix, the same one each time, and gives its name."""
    folder = tmp_path_factory.mktemp("sources")

    def write_it(suffix: str, text: str) -> str:
        file = folder / f"run.{suffix}"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write_it


def the_same(one: Any, other: Any) -> bool:
    """In every value and its type."""
    return bool(one == other and differences(one, other) == {})


def nothing_worse(read: Callable[[], Any]) -> None:
    """Our own errors, if any, with something to say."""
    with suppress(ConfigError):
        read()


@given(overrides())
def test_yaml(write: Write, values: Overrides) -> None:
    file = write("yaml", yaml_text(as_tables(values)))
    assert the_same(load([file]).config, load([], values).config)


@given(overrides())
def test_json(write: Write, values: Overrides) -> None:
    file = write("json", json.dumps(as_tables(values)))
    assert the_same(load([file]).config, load([], values).config)


@given(overrides())
def test_a_sparse_file_is_the_tree_again(write: Write, values: Overrides) -> None:
    run = load([], values).config
    assert the_same(load([write("json", json.dumps(sparse(run)))]).config, run)
    nulls = [path for path, value in values.items() if "null" in json.dumps(value)]
    if not nulls:
        data = as_toml_has_it(sparse(run), SkyRLTrainConfig)
        assert the_same(load([write("toml", tomli_w.dumps(data))]).config, run)


@given(st.dictionaries(texts, st.none(), min_size=1, max_size=3))
def test_every_null_that_toml_cannot_say_is_told_with_its_path(table: dict[str, None]) -> None:
    path = "generator.chat_template_kwargs"
    with pytest.raises(ConfigError) as caught:
        as_toml_has_it(sparse(load([], {path: table}).config), SkyRLTrainConfig)
    assert [problem.path for problem in caught.value.problems] == [f"{path}.{key}" for key in table]


@given(overrides())
def test_a_stored_run_is_the_run_again(write: Write, values: Overrides) -> None:
    assume(not any(isinstance(value, int) and abs(value) > 2**31 for value in values.values()))
    loaded = load([], values)
    run = resolve_with_origins(loaded.config, loaded.origins)[0]
    reloaded = load([write("json", json.dumps(stored_form(run)))])
    assert the_same(resolve_with_origins(reloaded.config, reloaded.origins)[0], run)


@given(overrides())
def test_what_is_forgotten_was_never_written(values: Overrides) -> None:
    values = {path: value for path, value in values.items() if can_be_an_argument(path, value)}
    words = [*as_arguments(values), *(f"~{path}" for path in values)]
    assert the_same(load([], words).config, SkyRLTrainConfig())


@given(st.lists(texts, max_size=3), st.lists(texts, min_size=1, max_size=3))
def test_adding_to_a_list_is_writing_the_longer_list(before: list[str], more: list[str]) -> None:
    path = "generator.sampling_params.stop"
    assume(all(before) and all(more))
    added = load([], [f"{path}={json.dumps(before)}", f"{path}+={json.dumps(more)}"]).config
    assert the_same(added, load([], {path: before + more}).config)


unicode_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
pieces = st.sampled_from(["a:", " b", ": ", "- ", "&x", "*x", "\n", "{", "}", "!t"])
words_of_both = st.tuples(st.sampled_from(["trainer.epochs", "generator.backend"]), texts).map("=".join)
keys_of_areal = st.sampled_from(sorted(key for key in KEYS if "*" not in key)) | texts


@given(unicode_texts | st.lists(pieces).map("".join))
def test_a_yaml_file_of_anything(write: Write, text: str) -> None:
    nothing_worse(lambda: load([write("yaml", text)]))


@given(unicode_texts | st.dictionaries(texts, data(scalars | st.none())).map(json.dumps))
def test_a_json_file_of_anything(write: Write, text: str) -> None:
    nothing_worse(lambda: load([write("json", text)]))


@given(st.lists(st.text(max_size=40) | words_of_both))
def test_overrides_of_another_house_each_have_a_fate(words: list[str]) -> None:
    assert len(convert_overrides(words).lines) == len(words)


@given(st.dictionaries(keys_of_areal, scalars | st.none(), max_size=6))
def test_settings_of_another_house_each_have_a_fate(keys: dict[str, Any]) -> None:
    lines = convert_keys(keys).lines
    assert [line.source for line in lines[: len(keys)]] == list(keys)
    silent = lines[len(keys) :]  # settings that the file leaves out: a default of AReaL's that we refuse
    assert all(line.is_refused for line in silent)
    assert {line.source for line in silent} <= {"actor.adv_norm", "actor.kl_ctl"} - keys.keys()


@given(st.text(max_size=200))
def test_a_script_of_anything(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(read_script(text).commands, tuple)

"""N mistakes are N problems, each where it was made; and nothing at all but `ConfigError` ever comes out."""

from __future__ import annotations

import datetime
import random
import string
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from property_tests.trees import LEAVES, RUNNABLE, Overrides, data, overrides, scalars, texts
from skyrl.config import SkyRLTrainConfig, compose, load
from skyrl.errors import ConfigError, Problem
from skyrl.tree.classes import fields_of, table_paths
from skyrl.tree.suggestions import suggestion
from skyrl.tree.types import config_class

Write = Callable[[bytes], str]

PATHS = [*LEAVES, *table_paths(SkyRLTrainConfig)]
NAMES = sorted({name for path in PATHS for name in path.split(".")})
LETTERS = string.ascii_lowercase + string.digits + "_"

plain_paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).map(".".join)
any_path = st.sampled_from(PATHS) | plain_paths | texts
strange = (
    st.none()
    | st.binary(max_size=3)
    | st.dates()
    | st.floats()
    | st.integers()
    | st.complex_numbers()
    | st.frozensets(st.integers(), max_size=2)
    | st.builds(object)
    | st.sampled_from([int, print, ..., SkyRLTrainConfig()])
    | st.text(max_size=5)
    | scalars
)
documents = st.recursive(
    scalars | st.dates() | st.datetimes() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*NAMES, "class"]) | texts, inner, min_size=1, max_size=4)
    ),
    max_leaves=15,
)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a file, the same one each time, and gives its name."""
    file = tmp_path_factory.mktemp("mistakes") / "run.toml"

    def write_it(content: bytes) -> str:
        file.write_bytes(content)
        return str(file)

    return write_it


def with_a_slip(name: str, chance: random.Random) -> str:
    """The name with one letter more, less or other, or two neighbours exchanged."""
    at, letter = chance.randrange(len(name)), chance.choice(LETTERS)
    return chance.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + letter + name[at:],
            name[:at] + letter + name[at + 1 :],
            name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
        ]
    )


def misspelled(path: str, chance: random.Random) -> tuple[type[Any], tuple[str, ...], int]:
    """The path with a slip in one of its names: the class that lacks that name, the path, and where the slip is."""
    names = path.split(".")
    while True:
        depth = chance.randrange(len(names))
        owner: Any = SkyRLTrainConfig
        for name in names[:depth]:
            owner = config_class(fields_of(owner)[name].type)
        slip = with_a_slip(names[depth], chance)
        if slip and slip not in fields_of(owner):
            return owner, (*names[:depth], slip, *names[depth + 1 :]), depth


def problems_of(files: Any, given_overrides: Any) -> list[Problem]:
    """What composing is refused for; nothing if it is not."""
    try:
        compose(files, given_overrides)
        return []
    except ConfigError as error:
        refusal = error
    assert str(refusal).replace("\n", "").isprintable()
    return list(refusal.problems)


def is_toml(text: str) -> bool:
    """Can it be parsed?"""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


# N mistakes


@st.composite
def mistakes(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Paths that problems are about, and lines of a TOML file with one mistake each."""
    chance = draw(st.randoms(use_true_random=False))
    lines = []
    for path in draw(st.lists(st.sampled_from(sorted(LEAVES)), unique=True, max_size=8)):
        kind = draw(st.sampled_from(["value", "name", "unknown"]))
        if kind == "value":
            lines.append((path, f"{path} = 1979-05-27"))
        elif kind == "name":
            _, names, depth = misspelled(path, chance)
            lines.append((".".join(names[: depth + 1]), f"{'.'.join(names)} = 1"))
        else:
            wrong = f"{path.rpartition('.')[0]}.zzz{len(lines)}"
            lines.append((wrong, f"{wrong} = 1"))
    return lines if len({path for path, _ in lines}) == len(lines) else []


@given(mistakes(), overrides(max_size=4, null_inside=False))
def test_n_mistakes_are_n_problems_on_their_lines(
    write: Write, planted: list[tuple[str, str]], others: Overrides
) -> None:
    text = "\n".join(line for _, line in planted)
    assume(is_toml(text))  # two misspelled names can make one key a value and a table
    name = write(text.encode())
    expected = [(path, f"{name}:{number}") for number, (path, _) in enumerate(planted, start=1)]
    mentioned = {path for path, _ in planted}
    rest = {path: value for path, value in RUNNABLE.items() if path not in mentioned}
    result = [(problem.path, problem.location) for problem in problems_of([name], rest)]
    assert result == expected
    with pytest.raises(ConfigError) as caught:
        load([name], {**others, "zzz": 1})
    assert len(caught.value.problems) == len(planted) + 1


@given(st.sampled_from(sorted(LEAVES)), st.randoms(use_true_random=False))
def test_a_slip_is_told_in_a_sentence_that_names_a_path_that_exists(path: str, chance: random.Random) -> None:
    _, names, _ = misspelled(path, chance)
    with pytest.raises(ConfigError) as caught:
        load([], {".".join(names): 1})
    [problem] = caught.value.problems
    sentence = f"{problem.message} {problem.hint}"
    assert any(candidate in sentence for candidate in PATHS)


def test_a_slip_of_one_letter_gets_the_right_suggestion_98_times_in_100() -> None:
    chance = random.Random(0)
    slips_of_each = max(1, settings.default.max_examples // 25)  # type: ignore[union-attr]  # a profile is loaded
    right = 0
    for path in PATHS * slips_of_each:
        owner, names, depth = misspelled(path, chance)
        _, meant = suggestion(SkyRLTrainConfig, owner, names, depth)
        right += path in meant[:1]
    share = right / (len(PATHS) * slips_of_each)
    print(f"{share:.2%} of {len(PATHS) * slips_of_each} slips, {slips_of_each} in each of {len(PATHS)} paths")
    assert share >= 0.98


# Anything at all


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_a_file_of_anything(write: Write, content: bytes) -> None:
    problems_of([write(content)], [])


@given(st.lists(st.text(alphabet="ab.=[]{}\"'#\\\n 1_-:", max_size=40), max_size=4))
def test_a_file_that_is_almost_toml(write: Write, lines: list[str]) -> None:
    problems_of([write("\n".join(lines).encode())], [])


@given(st.dictionaries(st.sampled_from([*NAMES, "class"]) | texts, documents, max_size=4))
def test_a_toml_file_of_anything(write: Write, document: dict[str, Any]) -> None:
    problems_of([write(tomli_w.dumps(document).encode())], [])


@given(st.lists(st.text(max_size=20) | st.tuples(any_path, st.text(max_size=20)).map("=".join), max_size=4))
def test_arguments_of_anything(arguments: list[str]) -> None:
    problems_of([], arguments)


@given(st.dictionaries(any_path, data(strange), max_size=4))
def test_overrides_of_anything(values: dict[str, Any]) -> None:
    problems_of([], values)


@given(st.dictionaries(any_path, data(strange), max_size=3))
def test_tables_of_anything(values: dict[str, Any]) -> None:
    problems_of([], {"trainer": values, "generator.sampling_params": values} | values)


@given(st.text(max_size=20))
def test_file_names_of_anything(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    problems_of([str(folder / "nowhere") + name], [])


def test_a_date_is_what_no_field_takes() -> None:
    accepted = []
    for path in LEAVES:
        try:
            load([], {path: datetime.date(1979, 5, 27)})
            accepted.append(path)
        except ConfigError:
            pass
    assert accepted == []

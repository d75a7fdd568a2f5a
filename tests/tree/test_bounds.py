"""Files and words that no person writes end in a sentence, in time: pipes, devices, diamonds, endless keys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyrl
from skyrl.errors import ConfigError, Problem, ResumeError, SkyRLError
from skyrl.runs.run_lock import stored_config
from skyrl.tree import files
from skyrl.tree.arguments import read_argument, split_path
from skyrl.tree.builder import MOST_PROBLEMS, MOST_SUGGESTIONS, TreeBuilder
from skyrl.tree.files import MOST_BYTES, MOST_LEVELS, MOST_PARTS, read_file, read_text
from skyrl.tree.origins import Assignment, Origin
from skyrl.tree.types import DEEPEST, MOST_VALUES, count_values
from tests.tree.trees import Run, arguments


def refusal(name: Path | str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        read_file(str(name))
    [problem] = caught.value.problems
    return problem


def built_from(value: Any) -> TreeBuilder[Run]:
    builder = TreeBuilder(Run())
    builder.assign(Assignment(path=(), value=value, origin=Origin(kind="python")))
    builder.build()
    return builder


def test_a_pipe_that_nobody_writes_to_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    assert "a pipe, not a regular file" in refusal(tmp_path / "run.toml").message


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_a_device_is_refused(device: str) -> None:
    assert "a device, not a regular file" in refusal(device).message


def test_a_file_beyond_the_bound_is_refused_and_one_at_it_is_read(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (MOST_BYTES + 1))
    assert refusal(large).message == "cannot be read: the file is larger than 256 KiB, the limit for a configuration"
    large.write_bytes(b"#" * MOST_BYTES)
    assert len(read_text(str(large))) == MOST_BYTES


def test_a_name_of_300_characters_is_told(tmp_path: Path) -> None:
    assert refusal(tmp_path / ("x" * 300)).message == "cannot be read: File name too long"


def test_a_file_in_a_folder_that_may_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", denied)  # root may read everything, and tests may run as root
    assert refusal("/closed/run.toml").message == "cannot be read: Permission denied"


def test_each_file_of_a_diamond_is_read_once_and_counts_at_its_first_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = files._read_file

    def counted(name: str) -> Assignment:
        read.append(name)
        return original(name)

    (tmp_path / "base0.toml").write_text("seed = 1\nname = 'base'")
    for level in range(1, 15):
        for side in ("left", "right"):
            text = f'extends = "base{level - 1}.toml"\n' + ("seed = 2\n" if (side, level) == ("left", 1) else "")
            (tmp_path / f"{side}{level}.toml").write_text(text)
        (tmp_path / f"base{level}.toml").write_text(f'extends = ["left{level}.toml", "right{level}.toml"]')
    monkeypatch.setattr(files, "_read_file", counted)
    builder = TreeBuilder(Run())
    builder.assign_all(read_file(str(tmp_path / "base14.toml")))
    assert len(read) == 15 + 14 * 2
    assert builder.build().seed == 2  # what left1 changes of base0 is not changed back for right1


def test_a_chain_of_files_has_a_bound(tmp_path: Path) -> None:
    for number in range(MOST_LEVELS + 2):
        (tmp_path / f"{number}.toml").write_text(f'extends = "{number + 1}.toml"')
    problem = refusal(tmp_path / "0.toml")
    assert (problem.path, problem.message) == ("extends", "the chain of extended files is longer than 100")


def test_near_names_are_looked_for_a_hundred_times() -> None:
    builder = TreeBuilder(Run())
    builder.assign_all([Assignment(path=("sead",), value=1, origin=Origin(kind="python"))] * (MOST_SUGGESTIONS + 50))
    has_suggestion = ["did you mean seed?" in problem.message for problem in builder.problems]
    assert has_suggestion == [True] * MOST_SUGGESTIONS + [False] * 50


def test_a_name_of_millions_of_letters_is_cut_short_in_what_is_said() -> None:
    [problem] = built_from({"x" * 1_000_000: 1}).problems
    assert problem.message == "this name has 1000000 characters; the limit is 1000"
    assert len(problem.path) < 500


def test_a_path_of_thousands_of_names_is_refused(tmp_path: Path) -> None:
    builder = TreeBuilder(Run())
    builder.assign(Assignment(path=("policy",) * 20_000, value=1, origin=Origin(kind="python")))
    assert builder.problems[0].message == "this path has 20000 names; the limit is 80"
    (tmp_path / "run.toml").write_text("seed = 1\n" + "a." * (MOST_PARTS + 1) + "b = 1")
    problem = refusal(tmp_path / "run.toml")
    assert problem.message == "not valid TOML: a key has more than 60 parts"
    assert problem.location.endswith("run.toml:2")


def test_a_text_with_many_dots_is_no_long_key(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"name = '{'One. ' * 2000}'")
    assert len(read_file(str(tmp_path / "run.toml"))[0].value["name"]) == 10_000


def test_a_key_that_stands_twice_among_thousands_is_named(tmp_path: Path) -> None:
    keys = [f'"k{number}": 1' for number in range(20_000)]
    (tmp_path / "run.json").write_text("{" + ", ".join([*keys, keys[-1]]) + "}")
    assert refusal(tmp_path / "run.json").message == "not valid JSON: the key 'k19999' appears twice in one table"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[" * 49 + "a," * 2 * MOST_VALUES])
def test_yaml_is_read_no_deeper_and_no_further_than_a_configuration_goes(opening: str, tmp_path: Path) -> None:
    """The composer of libyaml recurses with the text, until the process dies of it."""
    (tmp_path / "run.yaml").write_text(opening * ((MOST_BYTES - 1) // len(opening)))
    assert f"more than {MOST_VALUES} values or {DEEPEST} levels" in refusal(tmp_path / "run.yaml").message


@pytest.mark.parametrize("value", [["a"] * MOST_VALUES, {"a": [["b"] * 500] * 100}])
def test_values_beyond_the_bound_are_refused_as_a_whole(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"at most {MOST_VALUES} values in total"):
        built_from({"policy": {"extra": value}})


def test_as_many_values_as_the_bound_says_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.tree.builder.MOST_VALUES", 2)
    assert arguments("seed=1", "name=x").build() == Run(seed=1, name="x")
    with pytest.raises(ConfigError, match="values in total"):
        arguments("seed=1", "name=x", "on=false")


def test_values_are_counted_at_any_depth_and_no_further_than_the_bound() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert count_values({"a": [1, {"b": 2}], "c": 3}, 100) == 6
    assert count_values(endless, 100) == 101


def test_problems_beyond_a_thousand_are_not_looked_at() -> None:
    problems = built_from({f"x{number}": 1 for number in range(MOST_PROBLEMS + 50)}).problems
    assert [problem.message for problem in problems[MOST_PROBLEMS:]] == [
        "stopped after 1000 problems; the rest was not checked"
    ]


def test_a_list_that_is_changed_item_by_item_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.tree.builder.MOST_COPIED", 9)
    builder = TreeBuilder(Run(stop=("a", "b")))
    builder.assign_all(read_argument(word, 1) for word in ["stop+=c", "stop.0=d", "stop.1=e", "stop+=f"])  # 3, 3, 3, 4
    [problem] = builder.problems
    assert problem.message == "too many changes to single list items"
    assert builder.build().stop == ("d", "e", "c")


def test_an_argument_beyond_the_bound_is_refused_without_its_value() -> None:
    with pytest.raises(ConfigError, match=f"has {MOST_BYTES + 5} characters") as caught:
        read_argument("name=" + "x" * MOST_BYTES, 1)
    assert caught.value.problems[0].path == "name"
    with pytest.raises(ConfigError, match="the limit is"):
        split_path("a" * (MOST_BYTES + 1))


@pytest.mark.parametrize("word", ["\u0663", "3\u00a0", "\uff11"])
def test_digits_of_other_scripts_are_no_numbers(word: str) -> None:
    builder = TreeBuilder(Run())
    builder.assign(Assignment(path=("seed",), value=word, origin=Origin(kind="argument", where="1"), is_text=True))
    assert "is not a whole number" in builder.problems[0].message


def test_a_configuration_and_its_fingerprint_are_the_stored_form_with_or_without_more() -> None:
    stored = {"config": {}, "fingerprint": "abc"}
    assert files.is_stored_form(stored)
    assert files.is_stored_form({**stored, "schema_version": 1})
    assert not files.is_stored_form({"config": {}})


WHOLE = {
    # what reads a whole file without a bound, and whose file it is
    "source": "answers that this call has sampled",
    "confinement": "/proc",
    "arrow_files": "data that the user's own configuration names",
    "code_digests": "code that the user's own configuration names",
    "foreign_names": "of the package",
    "fork_server": "/proc",
    "curves": "of an installed package",
    "imports": "code that the user's own configuration names",
    "incoming_weights": "of weights, which this run wrote",
    "installation": "of installed packages",
    "logs": "the end of the log of a process of this run",
    "machine_facts": "of installed packages, and /proc",
    "memory_groups": "control groups",
    "names_on_disk": "in a folder that is refused if another user owns it",
    "onednn": "/proc",
    "orphans": "/proc",
    "stored_code": "in the folder of this user's state",
    "peer_trees": "of the package",
    "pretrained": "a wheel whose digest is known",
    "reasoning_rows": "what the run itself writes to this process",
    "report": "of the package",
    "row_store": "in a folder of this user's cache",
    "sglang_engine": "the log of a process of this run",
    "template_files": "of the package",
    "text2sql": "of the package",
    "trials": "in the folder of the user's own sweep",
    "environment": "of installed packages",
}


def test_what_strangers_may_have_written_is_read_up_to_a_bound() -> None:
    """Runs, checkpoints and models may be a stranger's: their texts are read by `stored_text`."""
    reads = re.compile(r"\.read_text\(|\.read_bytes\(|json\.load\(|\b(stream|file)\.read\(\)")
    package = Path(skyrl.__file__).parent
    modules = {file.stem for file in package.rglob("*.py") if reads.search(file.read_text(encoding="utf-8"))}
    assert modules == WHOLE.keys()


def large(file: Path) -> None:
    """A file of a terabyte with nothing in it."""
    file.touch()
    os.truncate(file, 1 << 40)


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero"), large])
def test_a_stored_configuration_that_never_ends_is_damaged(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(ResumeError, match=r"config.json is damaged \(it is "):
        stored_config(tmp_path / "config.json", "trainer.run_path")


def every_error() -> Iterator[type[SkyRLError]]:
    waiting = [SkyRLError]
    for kind in waiting:
        waiting += kind.__subclasses__()
        yield kind


@pytest.mark.parametrize("letter", ["\x1b[31m", "\x07", "\r", "\u202e", "\u2066", "\x9b"])
def test_no_message_of_an_exception_has_characters_that_a_terminal_obeys(letter: str) -> None:
    kinds = [kind for kind in every_error() if kind.__module__ == "skyrl.errors"]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind)
        error.args = (f"the source a{letter}b\nis damaged",)
        if isinstance(error, ConfigError):
            error.problems, error.title = (Problem(path="a", message=f"a{letter}b\nis damaged"),), "It cannot start"
        assert letter[0] not in str(error)
        assert f"a{repr(letter)[1:-1]}b\nis damaged" in str(error)

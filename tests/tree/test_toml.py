"""Reading TOML files: values, lines, and what is said about a file that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.errors import ConfigError, Problem
from skyrl.tree.files import read_file
from skyrl.tree.toml_lines import scan_lines


def refused(name: str) -> Problem:
    """What is said about a file."""
    with pytest.raises(ConfigError) as caught:
        read_file(name)[0]
    [problem] = caught.value.problems
    return problem


def test_a_file_is_one_assignment_to_the_root(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("a = 1\n[b]\nc = [1.5, 'x']")
    read = read_file(str(file))[0]
    assert (read.path, read.value) == ((), {"a": 1, "b": {"c": [1.5, "x"]}})
    assert read.origin.at("b").at("c").location == f"{file}:3"


def test_lines_are_counted_alike_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbfa = 1\r\n\r\n[b]\r\nc = '''\r\n'''\r\nd = 2\r\n")
    read = read_file(str(file))[0]
    assert read.value == {"a": 1, "b": {"c": "", "d": 2}}
    assert read.origin.at("b").at("d").location == f"{file}:6"


def test_the_home_folder_may_be_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text("a = 1")
    assert read_file("~/run.toml")[0].value == {"a": 1}


# Files that cannot be read


def test_a_missing_file(tmp_path: Path) -> None:
    name = str(tmp_path / "none.toml")
    assert refused(name) == Problem(path=name, message="cannot be read: no such file")


def test_a_folder(tmp_path: Path) -> None:
    assert refused(str(tmp_path)).message == "cannot be read: this is a folder, not a file"


def test_an_empty_name() -> None:
    assert refused("") == Problem(path="''", message="cannot be read: the name is empty")


def test_a_file_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(str(tmp_path / "file" / "run.toml")).message == "cannot be read: Not a directory"


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"a = '\xff'")
    assert refused(str(tmp_path / "run.toml")).message == "cannot be read: not UTF-8 text (byte 5)"


@pytest.mark.parametrize("name", ["a\0b", "x" * 5_000, "~nobody-of-that-name/run.toml"])
def test_a_name_that_no_file_can_have(name: str) -> None:
    assert refused(name).message.startswith("cannot be read: ")


@pytest.mark.parametrize(
    ("text", "location", "message"),
    [
        ("a = 1\nb = = 2", ":2:5", "not valid TOML: invalid value"),
        ("a = 1\na = 2\n", ":2:6", "not valid TOML: cannot overwrite a value"),
        ("lr = 1e-6e", ":1:10", "not valid TOML: expected newline or end of document after a statement"),
        ("a = yes", ":1:5", "not valid TOML: invalid value"),
        ("a = 2026-02-30", ":1:5", "not valid TOML: invalid date or datetime"),
        ('a = 1\nb = """\n', ":2:8", "not valid TOML: unterminated string"),
        ("[a", ":1:3", "not valid TOML: expected ']' at the end of a table declaration"),
        ("a = " + "[" * 20_000, "", "not valid TOML: nested too deeply"),
        ("a = " + "9" * 5_000, "", "not valid TOML: exceeds the limit"),
        ("\x00", ":1:1", "not valid TOML: "),
    ],
    ids=lambda text: text[:12].encode("unicode_escape").decode(),
)
def test_a_file_that_is_not_toml_is_told_with_line_and_column(
    tmp_path: Path, text: str, location: str, message: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    problem = refused(str(file))
    assert problem.location.startswith(f"{file}{location}")
    assert problem.message.startswith(message)


# Lines


def test_the_line_of_every_key_is_found() -> None:
    text = (
        "a = 1 # [not.a.table]\n"
        'b = "x # y [z]"\n'
        "[c]\n"
        "d = [\n"
        "  1, # ]\n"
        "  2,\n"
        "]\n"
        "e.f = 3\n"
        "[ c . 'g.h' ]\n"
        '"i\\u0041" = """\n'
        "[no]\n"
        'j = 1 \\""" and "" more"""\n'
        "k = '''\n"
        "l = 1\n"
        "'''\n"
        "m = {n = [1, {o = 2}], p = ']'}\n"
        "q = 1\n"
    )
    assert scan_lines(text) == {
        ("a",): 1,
        ("b",): 2,
        ("c",): 3,
        ("c", "d"): 4,
        ("c", "e"): 8,
        ("c", "e", "f"): 8,
        ("c", "g.h"): 9,
        ("c", "g.h", "iA"): 10,
        ("c", "g.h", "k"): 13,
        ("c", "g.h", "m"): 16,
        ("c", "g.h", "q"): 17,
    }


def test_quotes_at_the_end_of_a_long_string_belong_to_it() -> None:
    text = 'a = ["""x"""", "[",\n "y"]\nb = \'\'\'\'z\'\'\'\'\'\nc = 1\n'
    assert scan_lines(text) == {("a",): 1, ("b",): 3, ("c",): 4}


def test_a_table_that_only_follows_from_another_stands_where_that_one_does() -> None:
    assert scan_lines("[a.b]\n[c.d]\n[a]\n") == {("a",): 3, ("a", "b"): 1, ("c",): 2, ("c", "d"): 2}


def test_items_of_a_list_of_tables_share_the_line_of_the_first() -> None:
    assert scan_lines("[[a]]\nb = 1\n[[a]]\nb = 2\n") == {("a",): 1, ("a", "b"): 2}


def test_a_key_inside_a_value_has_the_line_of_the_key_that_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("x = 0\na = {b = {c = 1}}")
    assert read_file(str(file))[0].origin.at("a").at("b").at("c").location == f"{file}:2"
    assert read_file(str(file))[0].origin.at("nowhere").location == str(file)

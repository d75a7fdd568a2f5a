"""A file that is not TOML, YAML or JSON is shown with the line, a caret and the usual cause, and its place once."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.errors import ConfigError
from skyrl.tree.files import read_file

CASES: list[tuple[str, str, str, str]] = [
    # file, text, place, cause
    ("a.toml", "a = 1\nclip = False\n", "2:8", "TOML writes false"),
    ("a.toml", "clip = TRUE # on", "1:8", "TOML writes true"),
    ("a.toml", "clip = yes", "1:8", "TOML writes true or false, not yes"),
    ("a.toml", "x = None", "1:5", 'TOML has no None: write "none", or leave the field out'),
    ("a.toml", "x = null", "1:5", 'TOML has no null: write "none", or leave the field out'),
    ("a.toml", "[t]\na = 1\n[t]\nb = 2", "3:3", "[t] is written once, with all of its fields below it"),
    ("a.toml", "[t.u]\n[t.u]", "2:5", "[t.u] is written once, with all of its fields below it"),
    ("a.toml", 'path = "abc\nq = 1', "1:12", "the closing quote is missing"),
    ("a.toml", "path = 'abc", "1:12", "the closing quote is missing"),
    ("a.toml", "a = 1\na = 2\n", "2:6", "the key, or a table of this name, is written before"),
    ("a.toml", "a: 1", "1:2", "TOML writes a = ..."),
    ("a.toml", "a = .5", "1:5", "TOML writes a digit before the point: 0.5"),
    ("a.toml", "a = 5.", "1:6", "TOML writes a digit after the point: 5.0"),
    ("a.toml", "a = 007", "1:6", "TOML writes no zero before a whole number: 7"),
    ("a.toml", "a = [1, 2\nb = 3", "2:1", "a comma between two items, or the closing ], is missing"),
    ("a.toml", "a = data/x.jsonl  # rows", "1:5", 'text is written in quotes: "data/x.jsonl"'),
    ("a.toml", "a = \u201cx\u201d", "1:5", 'TOML has straight quotes: "..."'),
    ("a.toml", "a = 1,", "1:6", "TOML has no comma at the end of a line"),
    ("a.toml", "a = {b = 1, }", "1:13", "TOML has no comma before }"),
    ("a.yaml", "a:\n\tb: 1", "2:1", "YAML indents with spaces, not tabs"),
    ("a.yaml", "a: b: c", "1:5", "text with a colon and a space is put in quotes"),
    ("a.yaml", 'a: "x\nb: 1', "1:4", "the closing quote is missing"),
    ("a.yaml", "a: [1, 2\nb: 3", "1:4", "the closing bracket, or a comma, is missing"),
    ("a.yaml", "a: @x", "1:4", "text that begins with @ is put in quotes"),
    ("a.yaml", "k: - a", "1:4", "a list begins on a line of its own, or is written in [ ]"),
    ("a.json", '{"a": True}', "1:7", "JSON writes true"),
    ("a.json", '{"a": None}', "1:7", "JSON writes null"),
    ("a.json", '{"a": 1,}', "1:9", "JSON has no comma before }"),
    ("a.json", "{'a': 1}", "1:2", 'JSON has double quotes: "..."'),
    ("a.json", '{"a": 1 // one\n}', "1:9", "JSON has no comments"),
    ("a.json", "{a: 1}", "1:2", 'a key is written in quotes: "a"'),
    ("a.json", '{"a": "x}', "1:7", "the closing quote is missing"),
]


def refusal(name: str, text: str) -> ConfigError:
    Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_file(name)
    return caught.value


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "text", "location", "cause"), CASES)
def test_the_line_is_shown_with_a_caret_and_the_cause(name: str, text: str, location: str, cause: str) -> None:
    error = refusal(name, text)
    [problem] = error.problems
    line, column = map(int, location.split(":"))
    assert problem.location == f"{name}:{location}"
    source_line = f"{line} | {text.split(chr(10))[line - 1]}".replace("\t", " ").rstrip()
    assert problem.hint.splitlines() == [source_line, " " * (len(str(line)) + 2 + column) + "^", cause]
    assert str(error).count(name) == 1  # the place is said once
    assert "at line" not in str(error)


def test_the_message_is_aligned_below_its_own_column() -> None:
    Path("caps.toml").write_text("[trainer]\nbf16 = False\n")
    assert str(refusal("caps.toml", "[trainer]\nbf16 = False\n")).splitlines()[1:] == [
        "  caps.toml:2:8  not valid TOML: invalid value",
        "                 2 | bf16 = False",
        "                            ^",
        "                 TOML writes false",
    ]


def test_of_a_long_line_the_part_around_the_error_is_shown() -> None:
    [problem] = refusal("a.toml", f"a = '{'x' * 500}' False").problems
    line, caret, *_ = problem.hint.splitlines()
    assert len(line) < 90 and line[caret.index("^")] == "F"


@pytest.mark.parametrize(
    "text",
    [
        'api_key = "mine',
        "password = mine",
        "a = hf_" + "x1" * 12,
        "a = https://mine:mine@host/x",
        'webhook = "mine',
    ],
)
def test_a_line_with_a_secret_is_not_shown(text: str) -> None:
    assert "mine" not in str(refusal("a.toml", text)) and "x1x1" not in str(refusal("a.toml", text))


def test_an_error_without_a_known_cause_shows_its_line() -> None:
    [problem] = refusal("a.toml", "lr = 1e-6e").problems
    assert problem.hint.splitlines() == ["1 | lr = 1e-6e", "             ^"]

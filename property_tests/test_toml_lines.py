"""The line of every key of a TOML file is found, whatever stands around it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import tomli_w
from hypothesis import assume, given
from hypothesis import strategies as st

from property_tests.trees import data, scalars, texts
from skyrl.tree.origins import KeyLines
from skyrl.tree.toml_lines import scan_lines

Path = tuple[str, ...]
Lines = dict[Path, int]

NASTY = [
    "x = 1",
    "[table]",
    "# no comment",
    '"',
    "'",
    "a\\",
    '""',
    "''",
    "]",
    "}",
    "{[",
    "\\u0041",
    "",
]
"""What may stand in a text and look like something else."""

names = st.sampled_from(["a", "b", "c-d", "1", "e.f", "", "g h", '"', "'", "#", "ä", "="])


def quoted(name: str) -> str:
    """A key as TOML writes it."""
    bare = name and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if bare else json.dumps(name, ensure_ascii=False)


@st.composite
def values(draw: st.DrawFn) -> str:
    """A value as TOML writes it: on one line or on several."""
    text = draw(st.sampled_from(NASTY))
    lines = "\n".join(draw(st.lists(st.sampled_from([line for line in NASTY if "\\" not in line]), max_size=3)))
    forms = ["1", "true", "1979-05-27", json.dumps(text)]
    if "'" not in text:
        forms.append(f"'{text}'")
    if '"""' not in lines and not lines.endswith('"') and not lines.startswith('"'):
        forms += [f'"""{lines}"""', f'"""\n{lines}\\\n  """', f'"""{lines} x"""', f'"""{lines} ""x"""""']
    if "'''" not in lines and not lines.endswith("'") and not lines.startswith("'"):
        forms += [f"'''{lines}'''", f"'''\n{lines}''x'''''"]
    scalar = st.sampled_from(forms)
    comment = draw(st.sampled_from(["", " # ] }", "\n", "\n# [x]\n"]))
    inline = "{ " + f"k = {draw(st.sampled_from(forms[:4]))}, 'l.m' = []" + " }"
    listed = f"[{draw(scalar)},{comment and comment + chr(10)} {draw(scalar)}, {inline}]"
    return draw(scalar | st.just(inline) | st.just(listed))


@st.composite
def files(draw: st.DrawFn) -> tuple[str, Lines]:
    """The text of a TOML file, and the line of each of its headers and keys."""
    text, lines = "", {}
    paths: set[Path] = set()

    def is_free(path: Path) -> bool:
        return not any(path[: len(other)] == other or other[: len(path)] == path for other in paths)

    table: Path = ()
    for _ in range(draw(st.integers(0, 6))):
        text += draw(st.sampled_from(["", "\n", '# comment = 1 [x] "\n', "  \n\t\n"]))
        path = tuple(draw(st.lists(names, min_size=1, max_size=3)))
        indent = draw(st.sampled_from(["", "  ", "\t"]))
        end = draw(st.sampled_from(["", "  ", " # 'comment"])) + "\n"
        key = draw(st.sampled_from([".", " . "])).join(map(quoted, path))
        if draw(st.booleans()):
            if is_free(path):
                table = path
                paths.add(path)
                lines[path] = text.count("\n") + 1
                text += f"{indent}[{draw(st.sampled_from(['', ' ']))}{key}]{end}"
        elif is_free_inside(table, path, paths):
            paths.add((*table, *path, "\0"))
            for depth in range(1, len(path) + 1):
                lines.setdefault((*table, *path[:depth]), text.count("\n") + 1)
            text += f"{indent}{key} ={draw(st.sampled_from(['', ' ']))}{draw(values())}{end}"
    return text, lines


def is_free_inside(table: Path, path: Path, paths: set[Path]) -> bool:
    """May this key be written in this table?"""
    full_path = (*table, *path)
    others = [other for other in paths if other != table]
    return not any(
        other[: len(full_path)] == full_path or full_path[: len(other)] == other for other in others
    ) and not any(other[-1] == "\0" and other[: len(table) + 1] == full_path[: len(table) + 1] for other in others)


def key_paths(table: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    """Every key, those of tables in it included."""
    for name, value in table.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from key_paths(value, (*path, name))


def is_toml(text: str) -> bool:
    """Can it be parsed?"""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


@given(files())
def test_every_header_and_key_is_found_on_its_line(written: tuple[str, Lines]) -> None:
    text, lines = written
    assume(is_toml(text))  # now and then a key is written twice
    result = scan_lines(text)
    assert {path: result.get(path) for path in lines} == lines


@given(st.dictionaries(texts, data(scalars | st.dates()), max_size=5), st.booleans())
def test_every_key_of_a_written_file_is_found(document: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(document, multiline_strings=multiline).replace("\r\n", "\n")
    rows = text.split("\n")
    lines = KeyLines(lambda: scan_lines(text))
    for path in key_paths(tomllib.loads(text)):
        line = lines.line_of(path)
        assert line is not None
        assert 1 <= line <= len(rows)


@given(st.text(alphabet="a.=[]{}\"'#\\\n 1", max_size=60))
def test_any_text_is_scanned_to_its_end(text: str) -> None:
    assert not is_toml(text) or all(1 <= line <= text.count("\n") + 1 for line in scan_lines(text).values())

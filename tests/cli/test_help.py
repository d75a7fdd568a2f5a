"""Helps: sections, lines that are whole at 80 columns, and examples that the commands take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from skyrl.cli.command_line.commands import Commands
from skyrl.cli.main import SECTIONS, cli
from tests.command_pages import WIDTH, contexts

HELPS = {context.command_path: context.get_help() for context in contexts()}
EXAMPLES = {path: re.findall(r"^    (skyrl .+)$", text, re.MULTILINE) for path, text in HELPS.items()}
GROUPS = {context.command_path for context in contexts() if isinstance(context.command, Commands)}


def test_every_line_of_every_help_fits_80_columns() -> None:
    assert len(HELPS) > 40
    assert {path: line for path, text in HELPS.items() for line in text.splitlines() if len(line) > WIDTH} == {}


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_a_list_of_commands_has_one_whole_line_for_each(group: str) -> None:
    listed = HELPS[group].partition("Start:" if group == "skyrl" else "Commands:")[2].partition("  Examples:")[0]
    rows = [line for line in listed.splitlines() if line.startswith("  ")]
    names = [row.split()[0] for row in rows]
    expected = [path.split()[-1] for path in HELPS if path.rpartition(" ")[0] == group]
    assert names == expected
    assert [row for row in rows if not re.fullmatch(r"  \S+ {2,}[A-Z].*[^.]\.", row)] == []


def test_the_sections_are_those_of_the_command() -> None:
    titles = re.findall(r"^(\w[\w ]*):$", HELPS["skyrl"], re.MULTILINE)
    assert titles == ["Options", "Start", "Train", "Look at runs", "Operate", "Convert", "Services"]
    names = [name for section in SECTIONS.values() for name in section]
    assert sorted(names) == sorted(set(names)) == sorted(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize("path", [path for path in HELPS if path not in GROUPS - {"skyrl"}])
def test_every_command_has_an_example_that_it_takes(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if path == "skyrl completion":
        assert 'eval "$(skyrl completion bash)"' in HELPS[path]
        return
    assert EXAMPLES[path]
    for example in EXAMPLES[path]:
        _, *words = shlex.split(example.partition(" > ")[0])
        assert example.startswith(path)
        for word in words:  # what the command only takes if it is there
            if re.fullmatch(r"runs/\w+", word):
                (tmp_path / word).mkdir(parents=True, exist_ok=True)
            if word.endswith(".gguf"):
                (tmp_path / word).touch()
        taken(cli, words)


def taken(group: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """The commands read the words, and none is run."""
    context = group.make_context(group.name, list(words), parent)
    if isinstance(group, Commands):
        _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        taken(command, rest, context)

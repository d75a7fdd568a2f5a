"""Commands that take fields as PATH=VALUE, and explain this if a field is given as an option: `--lr 1e-5`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from typing import Any

import click

from skyrl.cli.command_line.lasting_imports import lasting_imports

Sections = Mapping[str, Mapping[str, tuple[str, str]]]


def examples(*lines: str) -> str:
    """The end of a command's help: worked examples, which are not wrapped."""
    return "\n".join(["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])


class FieldsCommand(click.Command):
    """A command that looks up unknown options among the fields of the tree."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; the message for an unknown option names the fields that may be meant."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            takes_fields = any(parameter.name == "arguments" for parameter in self.params)
            if not takes_fields or error.possibilities not in (None, [], ["--help"]):
                raise
            raise click.UsageError(_field_hint(error.option_name, words), ctx) from None
        except click.BadOptionUsage as error:
            error.ctx = error.ctx or ctx  # click leaves it out, and the message then lacks the command
            raise


class Commands(click.Group):
    """A group of `FieldsCommand`s. For a command of another group, the error message gives its full name.

    `sections` lists commands by title: the name of each, where it is defined in `skyrl.cli`, and a sentence on what it
    does. A command is imported when it is used.
    """

    command_class = FieldsCommand
    group_class = type

    def __init__(self, *args: Any, sections: Sections | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sections = sections or {}
        self._imported = {name: where for section in self._sections.values() for name, (where, _) in section.items()}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, whose columns are aligned with each other, in their own order."""
        if not self._sections:
            super().format_commands(ctx, formatter)
            return
        width = max(map(len, self._imported))
        for title, section in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", sentence) for name, (_, sentence) in section.items()])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands: in the order of the sections, or sorted."""
        return list(self._imported) or sorted(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported if it has not been; None if there is none."""
        if cmd_name not in self.commands and cmd_name in self._imported:
            module, _, attribute = self._imported[cmd_name].partition(":")
            with lasting_imports():
                self.add_command(getattr(import_module(f"skyrl.cli.{module}"), attribute), cmd_name)
        return super().get_command(ctx, cmd_name)

    def each_command(self, ctx: click.Context) -> Iterator[tuple[str, click.Command]]:
        """Every command with its name."""
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None  # it is listed
            yield name, command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does; the message for a command of another group says where it is."""
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            root = ctx.find_root()
            if isinstance(root.command, Commands) and (
                meant := _command_lines(args[0], root, root.command, str(root.info_name))
            ):
                raise click.UsageError(f"No such command {args[0]!r}; did you mean: {' or '.join(sorted(meant))}?", ctx)
        return super().resolve_command(ctx, args)


def _command_lines(name: str, root: click.Context, group: Commands, words: str) -> list[str]:
    """Command lines for the commands of this name in the group and its subgroups; `words` lead to the group."""
    lines = []
    for command_name, command in group.each_command(root):
        if command_name == name and not command.hidden:
            lines.append(f"{words} {command_name}")
        elif isinstance(command, Commands):
            lines += _command_lines(name, root, command, f"{words} {command_name}")
    return lines


def _field_hint(option: str, words: list[str]) -> str:
    """The message for an unknown option, with the argument that sets the field of that name."""
    from skyrl.config.foundation.foreign_names import names_elsewhere
    from skyrl.config.settings.root import SkyRLTrainConfig
    from skyrl.tree.suggestions import suggestion

    field = option.lstrip("-").replace("-", "_")
    _, paths = suggestion(SkyRLTrainConfig, SkyRLTrainConfig, tuple(field.split(".")), 0, names_elsewhere)
    given = "VALUE"
    for word, following in pairwise([*words, ""]):  # `--lr=1e-5` or `--lr 1e-5`
        name, equals, value = word.partition("=")
        if name == option:
            given = value if equals else following or "VALUE"
            break
    meant = " or ".join(f"{path}={given}" for path in paths)
    return f"no such option: {option}. Fields are set as PATH=VALUE" + (f": {meant}" if meant else "")

"""The help of every command at 80 columns, for docs/commands.md."""

from __future__ import annotations

from collections.abc import Iterator

import click

from skyrl.cli.command_line.commands import Commands
from skyrl.cli.main import cli

WIDTH = 80


def contexts() -> Iterator[click.Context]:
    """A context for each command that is shown, groups included, in the order of the sections."""
    pending = [_context(cli, "skyrl", None)]
    while pending:
        context = pending.pop(0)
        yield context
        if isinstance(context.command, Commands):
            inside = context.command.each_command(context)
            pending[:0] = [_context(command, name, context) for name, command in inside if not command.hidden]


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings = {**command.context_settings}
    if parent is not None:
        settings["help_option_names"] = parent.help_option_names
    return click.Context(command, parent, name, terminal_width=WIDTH, max_content_width=WIDTH, **settings)


def page() -> str:
    """Each command as a section, the help as it is printed."""
    return "\n".join(f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in contexts())

"""`skyrl completion`: the scripts with which shells complete commands, files, dotted paths and values."""

from __future__ import annotations

import click

from skyrl.cli.command_line.commands import examples


@click.command(epilog=examples('eval "$(skyrl completion bash)"   # in ~/.bashrc'))
@click.pass_context
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes the shell complete commands, files, dotted paths and values."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows each of the shells that may be chosen
    script = kind(context.find_root().command, {}, "skyrl", "_SKYRL_COMPLETE").source()
    click.echo(script.replace(*_WITHOUT_SPACE[shell]) if shell in _WITHOUT_SPACE else script)


_WITHOUT_SPACE = {
    "bash": (
        "COMPREPLY+=($value)",
        "COMPREPLY+=($value)\n            [[ $value == *[.=] ]] && compopt -o nospace",
    ),
    "zsh": ("compadd -U -V", "compadd -S '' -U -V"),
}
"""Shell -> text of click's script, and its replacement that adds no space after `trainer.` and `trainer.epochs=`. Fish
needs none.
"""

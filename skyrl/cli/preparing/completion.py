"""`skyrl completion`: the scripts with which shells complete commands, files, dotted paths and values."""

from __future__ import annotations

import click

from skyrl.cli.command_line.commands import examples

_FILES_OF_ZSH = "local word=$PREFIX; compset -P '*[=@]'; _path_files -f; IPREFIX= PREFIX=$word"
"""Completes the file behind `data.train_data=` and `@`, and then lets other completions see the whole word again."""


@click.command(epilog=examples('eval "$(skyrl completion bash)"   # in ~/.bashrc'))
@click.pass_context
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes the shell complete commands, files, dotted paths and values."""
    from click.shell_completion import get_completion_class

    from skyrl.cli.command_line.bash_words import register

    register()
    kind = get_completion_class(shell)
    assert kind is not None  # click knows each of the shells that may be chosen
    script = kind(context.find_root().command, {}, "skyrl", "_SKYRL_COMPLETE").source()
    if shell == "zsh":  # no space after `trainer.` and `trainer.epochs=`; fish adds none
        script = script.replace("compadd -U -V", "compadd -S '' -U -V").replace("_path_files -f", _FILES_OF_ZSH)
    click.echo(script)

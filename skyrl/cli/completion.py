"""`skyrl completion`: the script with which a shell completes commands, files and dotted paths, name by name."""

from __future__ import annotations

import click

_CONTINUES = {
    "bash": (
        "COMPREPLY+=($value)",
        "COMPREPLY+=($value)\n            [[ $value == *[.=] ]] && compopt -o nospace",
    ),
    "zsh": ("compadd -U -V", "compadd -S '' -U -V"),
}
"""Shell -> text of click's script, and our replacement that adds no space after `trainer.` and `trainer.epochs=`. Fish
needs none.
"""


def script(command: click.Command, shell: str) -> str:
    """The completion script that the shell evaluates."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows each of the shells that may be chosen
    source = kind(command, {}, "skyrl", "_SKYRL_COMPLETE").source()
    return source.replace(*_CONTINUES[shell]) if shell in _CONTINUES else source

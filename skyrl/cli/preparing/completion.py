"""`skyrl completion`: the scripts with which shells complete commands, files, dotted paths and values.

bash splits words at `=`, `:` and `@`: of `trainer.strategy=fs` it makes three.
"""

from __future__ import annotations

import os
from typing import ClassVar

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class, split_arg_string

from skyrl.cli.command_line.commands import examples

_FILES_OF_ZSH = "local word=$PREFIX; compset -P '*[=@]'; _path_files -f; IPREFIX= PREFIX=$word"
"""Completes the file behind `data.train_data=` and `@`, and then lets other completions see the whole word again."""


_SCRIPT = """\
%(complete_func)s() {
    local IFS=$'\\n' completion value file -
    set -f
    COMPREPLY=()
    for completion in $(env COMP_LINE="$COMP_LINE" COMP_POINT=$COMP_POINT COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1"); do
        value=${completion#*,}
        case ${completion%%%%,*} in
            plain) COMPREPLY+=("$value") ;;
            dir) compopt -o dirnames ;;
            file)  # beside other words, bash would leave files out
                if (( ${#COMPREPLY[@]} == 0 )); then compopt -o default; continue; fi
                while read -r file; do
                    [[ -d $file ]] && file+=/
                    COMPREPLY+=("$(printf '%%q' "$file")")
                done < <(compgen -f -- "$value") ;;
        esac
    done
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[.=:/] ]] && compopt -o nospace
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class BashWords(BashComplete):
    """Answers the script above: words are split by spaces alone, and completions begin where bash's word begins."""

    source_template: ClassVar[str] = _SCRIPT
    _typed = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, and the beginning of the one at it."""
        if "COMP_LINE" not in os.environ:  # asked by the script of an earlier version, which click wrote
            return super().get_completion_args()
        line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1:].isspace() else ""
        breaks = [index for index, letter in enumerate(incomplete) if letter in os.environ["COMP_WORDBREAKS"]]
        self._typed = incomplete[: breaks[-1] + 1] if breaks else ""
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """A line for the script: `plain,fsdp`."""
        value = str(item.value)
        return f"{item.type},{value.removeprefix(self._typed)}"


def register() -> None:
    """Use this class for bash."""
    click.shell_completion.add_completion_class(BashWords, "bash")


@click.command(epilog=examples('eval "$(skyrl completion bash)"   # in ~/.bashrc'))
@click.pass_context
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes the shell complete commands, files, dotted paths and values."""
    register()
    kind = get_completion_class(shell)
    assert kind is not None  # click knows each of the shells that may be chosen
    script = kind(context.find_root().command, {}, "skyrl", "_SKYRL_COMPLETE").source()
    if shell == "zsh":  # no space after `trainer.` and `trainer.epochs=`; fish adds none
        script = script.replace("compadd -U -V", "compadd -S '' -U -V").replace("_path_files -f", _FILES_OF_ZSH)
    click.echo(script)

"""The words of a command line: files, and the changes to make to them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from skyrl.cli.command_line.lasting_imports import lasting_imports
from skyrl.cli.command_line.messages import say_problems
from skyrl.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from skyrl.config import Composed, Loaded, SkyRLTrainConfig
    from skyrl.config.derive.run_kind import RunKind
    from skyrl.tree.imports import Followed
    from skyrl.tree.rules import Check

P = ParamSpec("P")
T = TypeVar("T")


def complete_word(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions: dotted paths of the tree, up to the next dot, their values, presets, and files. Imports only the
    classes of the tree.
    """
    from click.shell_completion import CompletionItem

    from skyrl.tree.files import PRESET

    path, equals, value = incomplete.partition("=")
    if equals:
        known = [] if value.startswith("@") else values_of(path.removesuffix("+"), context.params.get("arguments"))
        matching = [CompletionItem(f"{path}={item}") for item in known if item.startswith(value)]
        return matching or [CompletionItem(value.removeprefix("@"), type="file")]
    if incomplete.startswith(PRESET):
        from skyrl.config.loading.presets import PRESETS

        return [CompletionItem(preset) for name in PRESETS if (preset := f"{PRESET}{name}").startswith(incomplete)]
    prefix, ends = ("~", "") if incomplete.startswith("~") else ("", "=")
    paths = paths_from(incomplete.removeprefix("~"), ends, context.params.get("arguments"))
    files = [] if prefix or (paths and "." in incomplete) else [CompletionItem(incomplete, type="file")]
    return [*(CompletionItem(prefix + path) for path in paths), *files]


def complete_path(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions for a PATH argument: dotted paths only."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(path) for path in paths_from(incomplete, ends="", every_kind=True)]


def values_of(path: str, arguments: Sequence[str] | None = None) -> list[str]:
    """The values that a field may have, or names that it knows; empty if it has none, or does not exist.

    The field is that of the kind of run that the preceding `arguments` describe.
    """
    from skyrl.config.loading.load import chosen_root
    from skyrl.tree.classes import leaf_paths, names_of
    from skyrl.tree.types import choices_of

    try:
        attribute = dict(leaf_paths(chosen_root(*split_words(arguments or ())))).get(path)
    except ConfigError:  # words that will be refused
        return []
    return [] if attribute is None else [*choices_of(attribute.type), *names_of(attribute)]


def paths_from(
    start: str, ends: str = "=", arguments: Sequence[str] | None = None, *, every_kind: bool = False
) -> list[str]:
    """Completions of `start`: tables followed by a dot, fields followed by `ends`.

    The fields are those of the kind of run that the preceding `arguments` describe, or of every kind if `every_kind`.
    """
    from skyrl.config.loading.kinds import KINDS, root_of
    from skyrl.config.loading.load import chosen_root
    from skyrl.tree.classes import leaf_paths

    depth = start.count(".")
    try:
        roots = [*map(root_of, KINDS)] if every_kind else [chosen_root(*split_words(arguments or ()))]
    except ConfigError:  # words that will be refused
        return []
    completions = dict.fromkeys(
        ".".join(names[: depth + 1]) + ("." if len(names) > depth + 1 else ends)
        for names in (path.split(".") for root in roots for path, _ in leaf_paths(root))
        if len(names) > depth
    )
    return [completion for completion in completions if completion.startswith(start)]


ARGUMENTS = click.argument(
    "arguments", nargs=-1, metavar="FILE... [PATH=VALUE...]", type=click.UNPROCESSED, shell_complete=complete_word
)
STRICT = click.option("--strict", is_flag=True, help="Treat warnings as errors.")


def _trust(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from skyrl.config.loading.user_code import trusting_stored_code

        context.with_resource(trusting_stored_code())


TRUST = click.option(
    "--trust",
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="Run the code that a stored run names. Your own run needs it only in another folder or after a change.",
)

TARGET = click.argument("target", metavar="MODEL|RUN|CHECKPOINT")
CHANGES = click.argument(
    "arguments", nargs=-1, metavar="[FILE...] [PATH=VALUE...]", type=click.UNPROCESSED, shell_complete=complete_word
)
"""The words of a command that also runs without a file."""

STEP = click.option(
    "--step", type=click.IntRange(min=1), help="Step of the checkpoint of RUN to use [default: its trained model]."
)


def reads_code(otherwise: Followed) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Option --no-code of a command that reads a configuration and, without the option, follows the import paths that
    `otherwise` names.
    """
    usual = {
        "all": "the modules that your files name are imported",
        "classes": "only modules of a `class` are imported",
    }

    def decorate(command: Callable[P, T]) -> Callable[P, T]:
        @click.option(
            "--no-code",
            is_flag=True,
            help=f"Import no module that a file names, as for files of others; without it, {usual[otherwise]}.",
        )
        @wraps(command)
        def reading(*args: P.args, **options: P.kwargs) -> T:
            from skyrl.tree.imports import following

            with following("nothing" if options.pop("no_code") else otherwise):
                return command(*args, **options)

        return reading

    return decorate


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and arguments (`path=value`, `~path`, `@file`), each in order. A word with an equals sign is not a file.

    `~/run.toml` is a file in the home folder: it has a slash, or the suffix of a configuration file. Raises
    `ConfigError` for an assignment with spaces around its equals sign, and `UserError` without a current folder, which
    relative paths need.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder was deleted or unmounted: change to one that exists") from None
    _refuse_spaces(arguments)
    files = [
        word for word in arguments if "=" not in word and not word.startswith(("+", "-", "@")) and not _forgets(word)
    ]
    return files, [word for word in arguments if word not in files]


def _refuse_spaces(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for `trainer.epochs = 2`, `trainer.epochs =2` and `trainer.epochs= 2`: shells split them."""
    problems: list[Problem] = []
    rest = [*arguments, "", ""]
    for word, second, third in zip(rest, rest[1:], rest[2:], strict=False):
        path, equals, value = word.partition("=")
        match word, second, third:
            case _, "=", _ if not equals:
                value = third
            case _, _, _ if not equals and second.startswith("="):
                value = second[1:]
            case _, _, _ if equals and not value and second and "=" not in second and not Path(second).exists():
                value = second
            case _:
                continue
        if re.fullmatch(r"[\w.]+", path) and not Path(path).exists():
            hint = f"write the value without a space: {path}={value}"
            message = "there are spaces around its equals sign"
            problems.append(Problem(path=path, message=message, hint=hint))
    if problems:
        raise ConfigError(problems)


def _forgets(word: str) -> bool:
    is_file = "/" in word or Path(word).suffix in (".toml", ".yaml", ".yml", ".json")
    return word.startswith("~") and not is_file


def refuse_nothing(arguments: Sequence[str], to_do: str) -> None:
    """Raise `UsageError` if no configuration is given; `to_do` names what the command does, such as `check`."""
    if not arguments:
        raise click.UsageError(f"there is nothing to {to_do}: give a file, a preset or PATH=VALUE arguments")


def load_words(arguments: Sequence[str]) -> Loaded[SkyRLTrainConfig]:
    """The tree as written, with the environment of the command."""
    with lasting_imports():
        from skyrl.config.loading.load import load

    return load(*split_words(arguments), environ=os.environ)


def compose_arguments(
    arguments: Sequence[str], *, strict: bool = False, also: Callable[[RunKind], Sequence[Check[Any]]] | None = None
) -> Composed[SkyRLTrainConfig]:
    """The run that the words describe, resolved and checked; warnings are printed. Raises `ConfigError`."""
    with lasting_imports():
        from skyrl.config.loading.load import compose

    composed = compose(*split_words(arguments), strict=strict, also=also, environ=os.environ)
    warn(composed.warnings)
    return composed


def compose_rl(arguments: Sequence[str], refusal: str) -> SkyRLTrainConfig:
    """The resolved tree of a reinforcement-learning run. Raises `UserError` with `refusal` for another kind of run."""

    def only_rl(kind: RunKind) -> Sequence[Check[Any]]:
        if kind.name != "rl":
            raise UserError(f"kind = {kind.name}: {refusal}")
        return ()

    return compose_arguments(arguments, also=only_rl).config


def warn(warnings: Sequence[Problem]) -> None:
    """Print warnings."""
    if warnings:
        say_problems(warnings, "Warnings")

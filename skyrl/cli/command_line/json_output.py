"""Option --json: what a command found, as one JSON object of one form for all commands.

    {"command": "ckpt list", "ok": true, "result": ..., "problems": []}

`ok` is whether the exit code is 0. `result` is described by schemas/commands.schema.json for each command, and null if
there is none. `problems` has errors and warnings. A number that is not finite is null.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import click

from skyrl.errors import ConfigError, Problem, SkyRLError

P = ParamSpec("P")
T = TypeVar("T")


def json_option(command: Callable[P, T]) -> Callable[P, T]:
    """Option --json, which the command receives as `as_json`. Errors are printed as JSON, too, beside their message."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/commands.md).")
    @wraps(command)
    def reporting(*args: P.args, **options: P.kwargs) -> T:
        try:
            return command(*args, **options)
        except SkyRLError as error:
            if options["as_json"]:
                known = error.problems if isinstance(error, ConfigError) else [Problem(path="", message=str(error))]
                print_result(None, ok=False, problems=known)
            raise

    return reporting


def print_result(result: object, *, ok: bool = True, problems: Sequence[Problem] = ()) -> None:
    """Print the object of the command that is running."""
    import attrs

    left_out = attrs.fields(Problem).value  # a refused value may be a secret
    entries = [attrs.asdict(problem, filter=attrs.filters.exclude(left_out)) for problem in problems]
    name = click.get_current_context().command_path.partition(" ")[2]
    output = {"command": name, "ok": ok, "result": _finite(result), "problems": entries}
    click.echo(json.dumps(output, indent=2, ensure_ascii=False, allow_nan=False))


def print_either(result: object, text: str, *, as_json: bool, ok: bool = True) -> None:
    """Print what a command found: the object of `--json`, or the text. Unless it is `ok`, the command exits with 2."""
    if as_json:
        print_result(result, ok=ok)
    else:
        click.echo(text)
    if not ok:
        sys.exit(2)


def print_usage_error(error: click.UsageError) -> None:
    """Print the object for a mistake in the arguments of a command that has --json; nothing for any other command."""
    context = error.ctx
    if context is None or not any(parameter.name == "as_json" for parameter in context.command.params):
        return
    parameter = error.param if isinstance(error, click.BadParameter) else None
    path = parameter.opts[0] if isinstance(parameter, click.Option) else ""
    with context.scope(cleanup=False):
        print_result(None, ok=False, problems=[Problem(path=path, message=error.format_message())])


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value

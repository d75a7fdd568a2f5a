"""Tasks of the package reasoning-gym, as sources of rows: `reasoning_gym://chain_sum?skip=100&rows=1000&min_terms=2`.

A task is a stream of rows, determined by its settings and seed. A source takes the `rows` different questions of the
stream that follow the first `skip` different ones, so that two sources of one stream share no question. All other
parameters are settings of the task, each as JSON or as plain text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl, quote

from attrs import frozen

from skyrl.errors import DataError
from skyrl.installation import install_command
from skyrl.tree.frozen import thaw
from skyrl.tree.names import nearest
from skyrl.tree.types import display_value

REASONING_GYM = "reasoning_gym"
"""Name of the environment, and of the package's module."""

SCHEME = f"{REASONING_GYM}://"

_OWN = {"skip": 0, "rows": 1000, "system_prompt": None, "names_environment": True}
"""Parameters of a source that are not settings of its task, with their defaults."""

_OF_THE_STREAM = ("seed", "size")
"""Settings of every task that the source decides, not its table."""


@frozen(kw_only=True)
class TaskRows:
    """Rows of one task: the contents of a source."""

    task: str
    skip: int
    rows: int
    system_prompt: str | None
    """Name of one of the package's system prompts; None for no system message."""

    settings: Mapping[str, Any]
    """Settings of the task, `seed` and `size` among them. `size` is the largest number of rows of the stream."""

    names_environment: bool = True
    """Whether the rows name `reasoning_gym` as their environment. False if it is one of several rewards, which a row
    that names its environment would leave out."""

    def source(self) -> str:
        """The address under which `data.train_data` names these rows."""
        own: dict[str, object] = {"skip": self.skip, "rows": self.rows, "system_prompt": self.system_prompt}
        own |= {} if self.names_environment else {"names_environment": False}
        written = (f"{name}={quote(_text(value))}" for name, value in {**own, **self.settings}.items())
        return f"{SCHEME}{self.task}?{'&'.join(written)}"


def task_rows(source: str) -> TaskRows:
    """The rows that a source names. Raises `DataError` for a parameter with a wrong value."""
    task, _, query = source.removeprefix(SCHEME).partition("?")
    parameters = {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    own = {name: parameters.pop(name, default) for name, default in _OWN.items()}
    for name in ("skip", "rows"):
        if not isinstance(own[name], int) or own[name] < (name == "rows"):
            raise DataError(f"{source}: {name} is {display_value(own[name])}, not a number of rows")
    if not isinstance(own["names_environment"], bool):
        raise DataError(f"{source}: names_environment is {display_value(own['names_environment'])}, not true or false")
    size = 4 * (own["skip"] + own["rows"])
    return TaskRows(task=task, settings={"seed": 0, "size": size, **parameters}, **own)


def _text(value: object) -> str:
    """A value as JSON; a text that JSON does not read as something else, as it is."""
    return value if isinstance(value, str) and _value(value) == value else json.dumps(thaw(value))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_installed() -> bool:
    """Whether the package can be imported."""
    return find_spec(REASONING_GYM) is not None


def missing_package_message() -> str:
    """The sentence about a missing package."""
    return f"the package reasoning-gym is not installed: {install_command('reasoning-gym')}"


def task_problems(task: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings that the package refuses, as pairs (setting, reason); an empty setting stands for the task. Imports
    the package.
    """
    from reasoning_gym.factory import DATASETS

    tasks = [name for name in DATASETS if name != "composite"]
    if task not in tasks:
        near = nearest(task, tasks)
        suggestion = f"did you mean {near}?" if near else f"its tasks are {', '.join(sorted(tasks))}"
        yield "", f"reasoning-gym has no task {task!r}; {suggestion}"
        return
    kind = DATASETS[task][1]
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    known = [name for name in defaults if name not in _OF_THE_STREAM]
    wrong = False
    for name, value in settings.items():
        if name not in defaults:
            near = nearest(name, known)
            wrong = True
            yield name, f"{task} has no setting {name!r}; {f'did you mean {near}?' if near else ', '.join(known)}"
        elif not _is_like(value, defaults[name]):
            wrong = True
            yield name, f"{display_value(value)} is not of the type of its default, {display_value(defaults[name])}"
    if wrong:
        return
    try:
        config = kind(**thaw(settings))
        if hasattr(config, "validate"):
            config.validate()
    except Exception as error:  # noqa: BLE001 - tasks assert, compare and call whatever they are given
        reason = str(error) or type(error).__name__
        named = [name for name in settings if name in reason]
        yield named[0] if len(named) == 1 else "", f"{task} refuses its settings: {reason}"


def _is_like(value: object, default: object) -> bool:
    """Whether a value has the type of a default that is a truth value, number or text; any value, for another one."""
    match default:
        case bool():
            return isinstance(value, bool)
        case int() | float():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case str():
            return isinstance(value, str)
    return True


def prompt_refusal(name: str | None) -> str | None:
    """The reason why the package has no system prompt of this name; None if it has. Imports the package."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name is None or name in SYSTEM_PROMPTS:
        return None
    return f"reasoning-gym has no system prompt {name!r}, only {', '.join(SYSTEM_PROMPTS)}"


def refusal(source: str) -> str | None:
    """The reason why a source has no rows, in a sentence; None if no reason is found. Raises `DataError` as `task_rows`
    does.
    """
    rows = task_rows(source)
    if not is_installed():
        return f"{source}: {missing_package_message()}"
    reasons = (reason for _, reason in task_problems(rows.task, rows.settings))
    reason = next(reasons, None) or prompt_refusal(rows.system_prompt)
    return reason and f"{source}: {reason}"

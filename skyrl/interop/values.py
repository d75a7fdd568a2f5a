"""Reads foreign files as flat keys, and foreign text as values, in the way OmegaConf does.

References to the environment (`${oc.env:NAME}` of OmegaConf, `$NAME` of a shell) become `env:NAME` as a whole value,
which is read when the run starts. The home folder becomes `~`. If the file gives a default, it is used, since a
conversion must not depend on the environment in which it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.config.loading.recognition import refuse_other_tables
from skyrl.errors import ConfigError
from skyrl.interop import not_converted
from skyrl.interop.shell.variables import LONGEST
from skyrl.tree.files import read_file
from skyrl.tree.origins import dotted

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_DEEPEST = 10
_MOST = 10_000
"""Most settings of a file after references to tables are followed."""


def flat_file(name: str, *, of: str = "") -> dict[str, Any]:
    """A YAML, JSON or TOML file as dotted keys; for TRL, whose arguments may be tables, by its own keys. Raises
    `ConfigError`, also for a file of another program.

    `of` is the program that the file belongs to (areal, verl, trl, prime-rl), by its name in `skyrl config convert
    --from`.
    """
    if is_script(name):
        raise not_converted(name, "is not a YAML, JSON or TOML file")
    value = read_file(name)[-1].value
    refuse_other_tables(name, value, of=of)
    if not isinstance(value, Mapping):
        raise not_converted(name, "contains no table of settings")
    if of == "trl":
        return {str(key): setting for key, setting in value.items()}
    return flat_lists(value) if of in ("areal", "prime-rl") else dict(flat(value))


def flat_lists(table: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key and value of every leaf, also of the tables in lists: `places[0].cores`."""
    keys: dict[str, Any] = {}
    for key, value in flat(table):
        if isinstance(value, list) and value and all(isinstance(item, Mapping) and item for item in value):
            for number, item in enumerate(value):
                keys |= {f"{key}[{number}].{name}": setting for name, setting in flat_lists(item).items()}
        else:
            keys[key] = value
    return keys


def flat(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf and every empty table."""
    for key, value in table.items():
        names = (*path, str(key)) if path else tuple(str(key).split("."))
        if isinstance(value, Mapping) and value:
            yield from flat(value, names)
        else:
            yield dotted(names), value


def yaml_value(text: str) -> Any:
    """The value of an override's text: a number, a list, a table, null, or text. Text that is not valid YAML stays
    text.
    """
    from skyrl.tree.yaml_file import parse_yaml

    # OmegaConf reads `{a:1}` as a table, YAML needs a space after the colon.
    spaced = re.sub(r"([{,]\s*[\w.]+):(?=\S)", r"\1: ", text) if text.startswith("{") else text
    try:
        return parse_yaml("value", "value: " + spaced)[0]["value"]
    except (ConfigError, KeyError, TypeError):
        return text


def without_references(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with `${a.b}` replaced by the value of that key, and a mapping from each such key to its original."""
    values = _expand_tables(values)
    copies = {
        key: match[1] for key, value in values.items() if (match := _whole_reference(value)) and match[1] in values
    }
    references = References(values)
    return {key: references.filled(value) for key, value in values.items()}, copies


def _expand_tables(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values, with the settings of a table in place of a reference to the whole table: `${actor.optimizer}`."""
    for _ in range(_DEEPEST):
        copied: dict[str, Any] = {}
        for key, value in values.items():
            match = _whole_reference(value)
            table = f"{match[1]}." if match and match[1] not in values and not key.startswith(f"{match[1]}.") else ""
            inside = [name for name in values if name.startswith(table)] if table else []
            copied |= {
                f"{key}.{name.removeprefix(table)}": "${" + name + "}"
                if REFERENCE.fullmatch("${" + name + "}")
                else values[name]
                for name in inside
            } or {key: value}
        if copied.keys() == values.keys() or len(copied) > _MOST:
            break
        values = {**copied, **{key: value for key, value in values.items() if key in copied}}
    return values


class References:
    """The values of a file, which may refer to each other as `${a.b}`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._filled: dict[str, Any] = {}
        self._open: set[str] = set()

    def filled(self, value: object) -> Any:
        """`value` with each reference replaced by the value of that key. References that are unknown or circular, or
        whose expansion is too long, are left unchanged.
        """
        if isinstance(value, list):
            return [self._text(item) if isinstance(item, str) else item for item in value]
        if match := _whole_reference(value):
            return self._resolve(match[1], value)
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        if len(text) > LONGEST or "${" not in text:
            return text
        filled = REFERENCE.sub(lambda match: str(self._resolve(match[1], match[0])), text)
        return filled if len(filled) <= LONGEST else text

    def _resolve(self, key: str, unchanged: object) -> Any:
        if key not in self._values or key in self._open or len(self._open) > _DEEPEST:
            return unchanged
        if key not in self._filled:
            self._open.add(key)
            self._filled[key] = self.filled(self._values[key])
            self._open.discard(key)
        return self._filled[key]


def is_script(name: str) -> bool:
    """Whether the file is a shell script, or other text that contains overrides."""
    return Path(name).suffix.lower() not in (".yaml", ".yml", ".json", ".toml")


def _whole_reference(value: object) -> re.Match[str] | None:
    return REFERENCE.fullmatch(value) if isinstance(value, str) else None


_OMEGACONF = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*(?:,([^{}]*))?\}")
_SHELL = re.compile(r"\$(?:(?P<open>\{)?([A-Za-z_]\w*)(?(open)\}))")
_SHELL_START = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\}|:?[-=+?]|$)")
_LEFT = re.compile(r"\$\{[^{}]*\}?|\$\(|\$[A-Za-z_]\w*|\$[\d@*#]")
_FREE_TEXTS = ("run_name", "project_name", "experiment_name")
"""Fields whose text does not affect training: an unevaluated shell command may remain in them."""


@frozen
class Read:
    """A value with its references to the environment in our form, or the reason why it cannot be used."""

    value: Any
    refused: str = ""
    """Why the value cannot be used; empty if it can."""


def read_environment(value: object, key: str) -> Read:
    """`value` of the foreign setting `key`, with its references in our form, or the reason why they have none."""
    if isinstance(value, list):
        items = [read_environment(item, key) for item in value]
        refused = next((item.refused for item in items if item.refused), "")
        return Read([item.value for item in items], refused)
    if not isinstance(value, str) or "$" not in value:
        return Read(value)
    full_match = _OMEGACONF.fullmatch(value)
    if full_match and full_match[2] is not None:
        return Read(yaml_value(full_match[2].strip()))
    match = full_match or _SHELL.fullmatch(value)
    name = match[1 if full_match else 2] if match else ""
    if name and name != "HOME":
        return Read(f"env:{name}")
    text = _OMEGACONF.sub(lambda match: _inside(match, value), value)
    left = _LEFT.search(text)
    if left is None or (left[0] == "$(" and key.endswith(_FREE_TEXTS)):
        return Read(text)
    return Read(value, _reason(left[0]))


def _inside(match: re.Match[str], text: str) -> str:
    """The replacement of one `${oc.env:...}` within a longer text; unchanged if there is none."""
    if match[2] is not None:
        return match[2].strip()
    is_home = match[1] == "HOME" and text.startswith(match[0])
    return "~" if is_home else match[0]


def _reason(left: str) -> str:
    if left == "$(":
        return "only a shell can evaluate $(...): replace it with its value"
    if match := _OMEGACONF.match(left) or _SHELL_START.match(left):
        return (
            f"{match[1]} is set outside of the file, and env:{match[1]} works only as a whole value: replace it with "
            "its value"
        )
    if left.startswith("${"):
        return f"{left[:60]} is evaluated by another program: replace it with its value"
    return f"{left} is an argument of the script: replace it with its value"

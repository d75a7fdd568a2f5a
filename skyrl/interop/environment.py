"""Converts references to the environment in foreign files: `${oc.env:NAME}` of OmegaConf, `$NAME` of a shell.

Here `env:NAME` as a whole value is read from the environment when the run starts. The home folder becomes `~`. If the
file gives a default, it is used, since a conversion must not depend on the environment in which it runs.
"""

from __future__ import annotations

import re
from typing import Any

from attrs import frozen

from skyrl.interop.values import yaml_value

_OMEGACONF = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*(?:,([^{}]*))?\}")
_SHELL = re.compile(r"\$(?:(?P<open>\{)?([A-Za-z_]\w*)(?(open)\}))")
_SHELL_START = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\}|:?[-=+?]|$)")
_LEFT = re.compile(r"\$\{[^{}]*\}?|\$\(|\$[A-Za-z_]\w*|\$[\d@*#]")
_NAMES = ("run_name", "project_name", "experiment_name")
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
    if left is None or (left[0] == "$(" and key.endswith(_NAMES)):
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

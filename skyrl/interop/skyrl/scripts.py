"""Converts SkyRL's scripts and files, of the Hydra era and later, to our tables.

Old names are handled by the migrations of the tree itself; this module handles the syntax: shell scripts, Hydra's `+`
and `~`, and YAML values. Scripts and files of `main_sft` have a separate tree: see `skyrl/sft.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import evolve

from skyrl.interop import not_converted
from skyrl.interop.launches import PeerPrograms, launch_of, reads_images
from skyrl.interop.report import Conversion, Line
from skyrl.interop.skyrl.defaults import defaults_of_classes, other_defaults, version_notice
from skyrl.interop.skyrl.programs import KNOWN, settings_of
from skyrl.interop.skyrl.settings import convert_one
from skyrl.interop.skyrl.sft import convert_settings, is_sft
from skyrl.interop.values import References, flat_file, is_script, without_references, yaml_value
from skyrl.interop.writing import Writing, apply
from skyrl.tree.files import read_text

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][^=\s]*=.*|~[A-Za-z_]\w*(?:\.\w+)+", re.DOTALL)
_OURS = re.compile(
    r"[+~]{0,2}(data|trainer|generator|environment|optimizer_config|placement|model)\.\w[^=\s]*=.*", re.DOTALL
)
_LAUNCHER = PeerPrograms(name="SkyRL", programs=KNOWN, is_setting=lambda word: _OURS.fullmatch(word) is not None)


def convert_skyrl(name: str, *, number: int | None = None) -> Conversion:
    """Convert a shell script or a YAML file. `number` chooses among several commands of a script. Raises `ConfigError`
    if the file cannot be read, and if the script starts no run, or several and none is chosen.
    """
    if is_script(name):
        launch = launch_of(read_text(name), name, _LAUNCHER, number)
        overrides, launch = launch.split(lambda word: _OVERRIDE.fullmatch(word) is not None)
        settings = dict(override.partition("=")[::2] for override in overrides)
        model = settings.get("model.path", "")  # of supervised training, whose rows have images then
        if reads_images(model) and settings.get("language_model_only", "") != "true":
            raise not_converted(
                name, f"line {launch.line} trains {model} on rows with images, which skyrl does not do yet"
            )
        return launch.finished(convert_overrides(overrides, name, program=launch.program))
    values, _ = without_references(flat_file(name))
    if is_sft(values):
        return convert_settings([*values.items()], name)
    writing = Writing(name)
    for key, value in values.items():
        convert_one(writing, key, value, values)
    return _finished(writing, values)


def convert_overrides(overrides: Iterable[str], where: str = "overrides", *, program: str = "") -> Conversion:
    """Convert a list of `path=value`, in the form accepted by Hydra or a later SkyRL. The last value of a path wins.
    `program` is the module that takes them.
    """
    read = [_Override(override) for override in overrides]
    values = {entry.key: entry.value for entry in read if not entry.takes_away}
    references = References(values)
    if is_sft(values):
        settings = [
            _taken_away(element) if element.takes_away else (element.key, references.filled(element.value))
            for element in read
        ]
        return convert_settings(settings, where)
    writing, known = Writing(where), settings_of(program)
    implied = dict(known.implied(values)) if known else {}
    others = {**implied, **values}
    for path, value in implied.items():
        writing.write("implied", path, value)
    for item in read:
        if item.takes_away:
            writing.note(_taken_away(item))
            continue
        filled = references.filled(item.value)
        become = known and known.becomes(item.key, filled, values)
        if become:
            apply(writing, item.key, filled, become)
        else:
            convert_one(writing, item.key, filled, others, item.text, added=item.is_added)
    converted = _finished(writing, values, implied)
    written = {path for line in converted.lines for path in line.targets}
    silent = [(path, value) for path, value in implied.items() if path not in written]
    lines = [Line(outcome="kept", source=program, value=value, targets=(path,)) for path, value in silent]
    return evolve(converted, defaults=(*lines, *converted.defaults), remarks=(known.remark,) if known else ())


class _Override:
    """A parsed override: `path=value`, `+path=value` or `~path`."""

    def __init__(self, override: str) -> None:
        name, equals, self.text = override.partition("=")
        self.override = override
        self.key = name.lstrip("+~")
        self.takes_away = name.startswith("~") or not equals
        self.is_added = name.startswith("+")
        self.value = yaml_value(self.text)


def _taken_away(override: _Override) -> Line:
    reason = "removes a Hydra default, and there are none here"
    return Line(outcome="refused", source=override.override, reason=reason)


def _finished(
    writing: Writing, settings: Mapping[str, Any], implied: Mapping[str, Any] = MappingProxyType({})
) -> Conversion:
    """Finish the conversion of the `settings`, beside those that the program implies. SkyRL computes on GPUs, so
    a configuration that names no device gets `cuda`.
    """
    values = {**implied, **settings}
    if "trainer.device" not in values and values:
        writing.write("trainer.device", "trainer.device", "cuda")
    tables = {path.rpartition(".")[0] for path in implied}
    omitted = defaults_of_classes(settings)
    written = {path: value for path, value in omitted.items() if path.rpartition(".")[0] not in tables}
    for path, value in written.items():
        writing.write(path, path, value)
    converted = writing.finish(lambda run: tuple(other_defaults(writing, "rl", values, convert_one)) if values else ())
    lines = (Line(outcome="kept", source=path, value=value, targets=(path,)) for path, value in written.items())
    return evolve(converted, notice=version_notice("rl", settings), defaults=tuple(lines))

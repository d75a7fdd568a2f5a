"""Translates one setting of another system: to paths of ours, or to the reason why there are none.

Tables of entries map settings to paths and functions; `systems.py` converts whole files by them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from skyrl.config.settings.learners import sets_dropout
from skyrl.tree.files import stored_text

ALGORITHM = "trainer.algorithm."
OPTIMIZER = "trainer.policy.optimizer_config."
ENGINE = "generator.inference_engine."
SAMPLING = "generator.sampling_params."
EVALUATION = "generator.eval_sampling_params."
SHAPING = ALGORITHM + "reward_shaping."

Values = Mapping[str, Any]
"""All settings of a file, by their dotted keys."""


@frozen(kw_only=True)
class Translation:
    """The outcome for one setting: paths to write, or why there are none."""

    writes: dict[str, Any] = field(factory=dict)
    cluster: dict[str, Any] = field(factory=dict)
    """Paths to write in the description of the cluster (`cluster.toml`)."""

    command: str = ""
    """Command of skyrl that does what the setting asks for."""

    note: str = ""
    """Remark about the written value, for the report."""

    redundant: str = ""
    """Why nothing has to be written."""

    unsupported: str = ""
    """The missing capability."""

    refused: str = ""
    """Why the value is not valid, or has no equivalent here."""


Entry = str | Translation | Callable[[Any], Translation]
"""How a setting translates independently of others: the path of ours that gets its value, always the same outcome, or
a function of the value.
"""

Dependent = Callable[[str, Any, Values], Translation | None]
"""How a setting translates whose meaning depends on others: a function of its key, its value and all settings, which
returns None if the next entry decides.
"""


def redundant(reason: str) -> Translation:
    """Outcome of a setting for which nothing has to be written."""
    return Translation(redundant=reason)


def unsupported(capability: str) -> Translation:
    """Outcome of a setting that needs a capability which is not implemented."""
    return Translation(unsupported=capability)


def refused(reason: str) -> Translation:
    """Outcome of a setting whose value is not valid, or has no equivalent here."""
    return Translation(refused=reason)


def translate(entry: Entry, value: object) -> Translation:
    """The outcome that an entry has for a value; null writes nothing to a path."""
    if isinstance(entry, str):
        return redundant("not set") if value is None else Translation(writes={entry: value})
    return entry if isinstance(entry, Translation) else entry(value)


def translations(values: Values, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Our paths with their values, of those settings that `entries` are of; none of a value that only the foreign
    program can compute, which is reported with its setting.
    """
    written = [translate(entry, values[key]).writes for key, entry in entries.items() if is_plain(values.get(key))]
    return {path: value for writes in written for path, value in writes.items()}


def is_plain(value: object) -> bool:
    """Whether a value is data, as opposed to an expression of a program."""
    return isinstance(value, bool | int | float | str | list | Mapping)


_SUPERVISED_PATHS = {
    "trainer.epochs": "num_epochs",
    "trainer.max_training_steps": "num_steps",
    "data.train_data": "train_datasets",
    "data.val_data": "eval_datasets",
    "generator.chat_template_kwargs": "chat_template_kwargs",
}
"""Our paths in an RL run -> those in a supervised one, where more than `trainer` or `trainer.policy` is left out."""


def of_one_model(translation: Translation) -> Translation:
    """The outcome in the tree of a supervised run, which has one model, from that in an RL run for its policy."""
    writes = {
        _SUPERVISED_PATHS.get(path, path.removeprefix("trainer.").removeprefix("policy.")): value
        for path, value in translation.writes.items()
    }
    return evolve(translation, writes=writes)


def entry_of_one_model(entry: Entry) -> Entry:
    """The entry of a supervised run, from that of an RL run."""
    return lambda value: of_one_model(translate(entry, value))


def independent(entry: Entry) -> Dependent:
    """The entry of a setting that translates independently, for a table of those that depend on others."""
    return lambda key, value, values: translate(entry, value)


def idle(when: Callable[[Values], object], reason: str) -> Dependent:
    """Entry of a setting that has no effect in files of which `when` holds; in others the next entry decides."""
    return lambda key, value, values: redundant(reason) if when(values) else None


def dependent_of_one_model(convert: Dependent) -> Dependent:
    """The same for a setting whose meaning depends on others."""

    def become(key: str, value: Any, values: Values) -> Translation | None:
        translation = convert(key, value, values)
        return None if translation is None else of_one_model(translation)

    return become


def maps_to(*paths: str, convert: Callable[[Any], Any]) -> Entry:
    """Entry that writes the converted value to each of the paths; null writes nothing."""
    return lambda value: (
        redundant("not set") if value is None else Translation(writes=dict.fromkeys(paths, convert(value)))
    )


def numeric(*paths: str) -> Entry:
    """Entry that writes the number to each of the paths; null writes nothing."""
    return maps_to(*paths, convert=number)


def non_empty(path: str) -> Entry:
    """Entry that writes the value to the path; empty text and null write nothing."""
    return lambda value: translate(path, None if value == "" else value)


def fixed(*values: object, does: str, otherwise: str) -> Callable[[Any], Translation]:
    """Entry of which `values` match the built-in behaviour (`does`), and others need what is missing (`otherwise`)."""

    def become(value: object) -> Translation:
        if any(type(value) is type(usual) and value == usual for usual in values):
            return redundant(does)
        return unsupported(otherwise)

    return become


def missing(capability: str, *inactive: object) -> Entry:
    """Entry of a setting whose capability is missing; null and the values `inactive` do not need it."""
    return fixed(None, *inactive, does="no effect at this value", otherwise=capability)


def when_on(path: str, value: object, note: str = "") -> Entry:
    """Entry of a switch, which writes the value to the path if it is on."""
    return lambda on: Translation(writes={path: value}, note=note) if on else redundant("off")


def sources(path: str) -> Entry:
    """Entry that writes one data source, or a list of them, to our list at the path."""
    return lambda value: Translation(writes={path: value if isinstance(value, list) else [value]})


def dropout(path: str, model: str, key: str, value: object, values: Values) -> Translation:
    """Convert a switch that turns dropout off. If it is false, our field at `path` becomes true for a model whose own
    configuration has dropout, since learners refuse it for any other. `model` is the setting with the model's folder.
    """
    if value is not False:
        return redundant("dropout is off by default")
    try:
        settings = json.loads(stored_text(Path(str(values.get(model))).expanduser() / "config.json"))
        drops = any(sets_dropout(name, value) for name, value in settings.items())
    except (OSError, ValueError, AttributeError):
        return redundant(f"acts only if the model's configuration sets dropout, as few do: then set {path}")
    if drops:
        return Translation(writes={path: True})
    return redundant("no effect: the model's configuration sets no dropout")


def number(value: object) -> Any:
    """The number in a text, else the value unchanged. Some systems write `1e-5`, which YAML 1.1 reads as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class UnexpectedValue(Exception):
    """A value of another kind than a setting can have. The message says what is expected."""


def real(value: object) -> float:
    """The number, which may be written as text. Raises `UnexpectedValue` for anything else."""
    result = number(value)
    if isinstance(result, bool) or not isinstance(result, int | float) or not isfinite(result):
        raise UnexpectedValue("expected a number")
    return result


def table(value: object) -> Mapping[str, Any]:
    """The table; null is an empty one. Raises `UnexpectedValue` for anything else."""
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise UnexpectedValue("expected a table")


def word(value: object, names: Iterable[str]) -> str:
    """The text, which should be one of `names`. Raises `UnexpectedValue` for anything that is no text."""
    if isinstance(value, str):
        return value
    raise UnexpectedValue(f"expected one of {', '.join(names)}")


def is_off(value: object) -> bool:
    """Whether a setting is off: null, false, 0, or empty."""
    return value in (None, False, 0, "", "null", "None") or value == [] or value == {}


def count(value: object, *, default: int = 1) -> int:
    """The count in the file if it is a positive whole number, else `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

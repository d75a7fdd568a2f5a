"""SkyRL's scripts and files, of the Hydra era and later, as our tables.

The names of each era are the migrations of the tree itself; here are the texts: shell scripts, Hydra's `+` and `~`,
values as YAML has them.
"""

from __future__ import annotations

from skyrl.interop.report import Conversion, Line
from skyrl.interop.shell import overrides_in
from skyrl.interop.values import flat_file, is_script, text_of, without_references, yaml_value
from skyrl.interop.writing import Writing

_OWN_FIELD = (
    "a field of its author's own: give it a class of yours (docs/configuration.md, 'Fields of your own'), and name it "
    'with class = "module:Name"'
)


def convert_skyrl(name: str) -> Conversion:
    """A shell script, or a YAML file. Raises `ConfigError` if it cannot be read."""
    if is_script(name):
        return convert_overrides(overrides_in(text_of(name)), name)
    values, _ = without_references(flat_file(name))
    writing = Writing(name)
    for key, value in values.items():
        _convert(writing, key, value, "")
    return writing.finish()


def convert_overrides(overrides: list[str], where: str = "overrides") -> Conversion:
    """A list of `path=value`, as Hydra or a later SkyRL took them. The last of several for one path wins."""
    writing = Writing(where)
    for override in overrides:
        key, equals, text = override.partition("=")
        bare = key.lstrip("+~")
        if key.startswith("~") or not equals:
            writing.note(
                Line(outcome="refused", source=override, why="it takes a default of Hydra's away; ours has none")
            )
        else:
            _convert(writing, bare, yaml_value(text), text, added=key.startswith("+"))
    return writing.finish()


def _convert(writing: Writing, key: str, value: object, text: str, *, added: bool = False) -> None:
    if value is None and text == "":
        why = "the script gives no value here: a variable of its is empty"
        writing.note(Line(outcome="refused", source=key, value=text, why=why))
        return
    paths, problems = writing.write(key, key, value)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors and text and not isinstance(value, str | list | dict):  # `run_name=1e5`: a text that looks like a number
        again, others = writing.write(key, key, text, text=True)
        if again:
            writing.undo_problems(errors)
            paths, problems, errors = again, others, []
    if errors:
        reason = "; ".join(" ".join(filter(None, (each.message, each.hint))) for each in errors)
        is_unknown = any(each.message.startswith("no such field of") for each in errors)
        is_later = any("not implemented yet" in each.hint for each in errors)
        why = f"{reason}: {_OWN_FIELD}" if is_unknown and (added or not errors[0].hint) else reason
        writing.note(Line(outcome="not yet" if is_later else "refused", source=key, value=value, why=why))
    elif not paths:
        writing.note(Line(outcome="needless", source=key, value=value, why=problems[0].hint if problems else ""))
    else:
        outcome = "renamed" if any(path.partition(".")[0] and not _within(path, key) for path in paths) else "kept"
        why = "; ".join(problem.hint for problem in problems if problem.hint)
        writing.note(Line(outcome=outcome, source=key, value=value, targets=paths, why=why))  # type: ignore[arg-type]  # a Literal


def _within(path: str, key: str) -> bool:
    return path == key or path.startswith(key + ".")

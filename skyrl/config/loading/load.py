"""Reads files and arguments into a tree that can run.

`load(files, overrides)` returns the tree as written, and the origin of each value; `compose(files, overrides)` returns
the resolved and checked tree, which `skyrl run` starts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Generic

from attrs import evolve, frozen
from typing_extensions import TypeVar

from skyrl.config.derive.run_kind import RunKind
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.foreign_names import names_elsewhere, value_elsewhere
from skyrl.config.loading.check import check
from skyrl.config.loading.kinds import KINDS, kind_of, root_of
from skyrl.config.loading.migrations import MIGRATIONS
from skyrl.config.loading.presets import PRESETS
from skyrl.config.loading.recognition import refuse_other_files, refuse_other_tables
from skyrl.config.loading.resolve import Loaded, resolve_with_origins
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, Problem
from skyrl.tree import get_at
from skyrl.tree.arguments import read_argument, read_python
from skyrl.tree.builder import ReadContext, TreeBuilder, is_empty_file
from skyrl.tree.classes import fields_of
from skyrl.tree.files import EXTENDS, STORED_FILES, is_stored_form, read_file, stored_file
from skyrl.tree.names import nearest
from skyrl.tree.origins import Assignment, Origins
from skyrl.tree.rules import Check, find_problems, join_choices
from skyrl.tree.types import display_value

C = TypeVar("C", bound=RunConfig, default=SkyRLTrainConfig)

Files = Sequence[str | PathLike[str]] | str | PathLike[str]
Overrides = Sequence[str | tuple[str, Any]] | Mapping[str, Any]
"""`["trainer.epochs=2"]` as on a command line, or `{"trainer.epochs": 2}` or a list of such pairs from Python."""

MOST_OVERRIDES = 5_000
"""Maximum number of overrides of one configuration: five times the leaves of the largest tree."""


@frozen(kw_only=True)
class Composed(Generic[C]):
    """A run that can start."""

    written: C
    """The tree as its author wrote it, with defaults filled in."""

    config: C
    """The resolved tree."""

    origins: Origins
    warnings: tuple[Problem, ...]

    @property
    def locations(self) -> dict[str, str]:
        """Dotted path -> place where it was written, such as `run.toml:14`; without defaults and derived values."""
        last = {path: chain[-1] for path, chain in self.origins.items() if chain}
        return {path: origin.location for path, origin in last.items() if origin.kind not in ("default", "rule")}


def load(
    files: Files = (),
    overrides: Overrides = (),
    root: type[C] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Loaded[C]:
    """Patch files, then overrides, onto the default tree; a later value wins, leaf by leaf.

    `root` is the class of the tree; by default it follows from the last `kind` in a file or override, and is
    reinforcement learning if there is none. A file is TOML, YAML or JSON, the folder of a run, or `preset:NAME`.
    `environ` holds the variables for `env:NAME`. Raises `ConfigError` listing every unreadable file, unknown name and
    value that does not fit.
    """
    builder = _builder(files, overrides, root, environ)
    config = builder.build()
    errors = [problem for problem in builder.problems if problem.severity == "error"]
    if errors:
        raise ConfigError(_sort_by_place(errors), title="This configuration cannot be used")
    return Loaded(config=config, origins=builder.origins, warnings=tuple(_sort_by_place(builder.problems)))


def compose(
    files: Files = (),
    overrides: Overrides = (),
    root: type[C] | None = None,
    *,
    strict: bool = False,
    also: Callable[[RunKind], Sequence[Check[Any]]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Composed[C]:
    """Load, resolve and check: one `ConfigError` lists everything that is wrong.

    `strict` turns warnings into errors; `also` gives further checks for a kind of run, such as those of this machine.
    """
    builder = _builder(files, overrides, root, environ, starts=True)
    written = builder.build()
    config, origins, broken = resolve_with_origins(written, builder.origins, builder.broken)
    if any(chain[-1].is_stored for chain in origins.values()):  # before any check could import what they name
        from skyrl.config.loading.stored_code import code_that_is_only_stored, may_run

        stored = code_that_is_only_stored(config, origins)
        if refused := [problem for problem in stored if not may_run(config, problem.path, origins)]:
            raise ConfigError(_sort_by_place([*builder.problems, *refused]))
    further = also(kind_of(config)) if also else ()
    problems = [*builder.problems, *check(config, origins, broken), *find_problems(config, further, origins, broken)]
    warnings = tuple(_sort_by_place(problem for problem in problems if problem.severity == "warning"))
    errors = problems if strict else [problem for problem in problems if problem.severity == "error"]
    if errors:
        explained = (_with_default_named(_with_paths_beside(error, config), config) for error in errors)
        raise ConfigError(_sort_by_place(explained))
    return Composed(written=written, config=config, origins=origins, warnings=warnings)


def _builder(
    files: Files,
    overrides: Overrides,
    root: type[C] | None,
    environ: Mapping[str, str] | None,
    *,
    starts: bool = False,
) -> TreeBuilder[C]:
    """The tree of the layers. `starts`: it is that of a run, of which something has to be written."""
    layers = _layers(files, overrides)
    kind = _kind_of(layers)
    chosen: type[Any] = root or _root_meant(kind, layers)
    context = ReadContext(
        environ=environ,
        presets=PRESETS,
        migrations=MIGRATIONS,
        elsewhere=names_elsewhere,
        is_open=True,
        remembers=True,
    )
    builder: TreeBuilder[C] = TreeBuilder(chosen(), context)
    for layer in _join_split_arguments(layers, chosen):
        _take(builder, layer, chosen)
    if starts and layers and all(layer.is_empty for layer in layers):  # nothing is written at all
        builder.problems = [evolve(problem, severity="error") for problem in builder.problems]
    if root is None and kind in tuple(KINDS):  # the last one counts, whichever kind the files before it are of
        builder.problems = [
            problem for problem in builder.problems if problem.path != "kind" or problem.value not in tuple(KINDS)
        ]
        builder.broken.discard("kind")
    builder.problems = [_suggest_our_value(_explain_wrong_kind(item, chosen)) for item in builder.problems]
    if root is None and kind is None and chosen is not SkyRLTrainConfig:
        names = ", ".join(name for name in _top_names(layers) if name not in fields_of(SkyRLTrainConfig))
        message = f"is missing, so this is read as a reinforcement-learning run, which has no {names}"
        others = join_choices([f'"{name}"' for name in KINDS if name != "rl"], "or")
        builder.problems.append(Problem(path="kind", message=message, hint=f"write kind = {others}"))
    return builder


def _suggest_our_value(problem: Problem) -> Problem:
    """The problem, with our name for a value that only other systems have."""
    if problem.code != "not a choice":
        return problem
    return evolve(problem, hint=value_elsewhere(problem.path, str(problem.value)) or problem.hint)


def _layers(files: Files, overrides: Overrides) -> list[_Layer]:
    if not isinstance(overrides, str) and len(overrides) > MOST_OVERRIDES:
        message = f"{len(overrides)} overrides, but at most {MOST_OVERRIDES} are allowed: write them into a file"
        raise ConfigError([Problem(path="", message=message)], title="This configuration cannot be used")
    layers = [_file_layer(fspath(file)) for file in ([files] if isinstance(files, str | PathLike) else files)]
    words: Iterable[str | tuple[str, Any]] = [overrides] if isinstance(overrides, str) else overrides
    if isinstance(overrides, Mapping):
        words = [(str(path), value) for path, value in overrides.items()]
    for number, override in enumerate(words, start=1):
        if isinstance(override, str) and override.startswith("@"):
            layers.append(_file_layer(override[1:], f"argument {number}"))
        else:
            layers.append(_word_layer(override, number))
    return layers


def _explain_wrong_kind(problem: Problem, root: type[Any]) -> Problem:
    """The problem, reworded if one kind of run was mistaken for another."""
    if problem.path == "kind" and problem.code == "not a choice" and problem.value not in tuple(KINDS):
        return evolve(problem, message=f"{display_value(problem.value)} is not one of: {', '.join(KINDS)}", hint="")
    name = problem.path.partition(".")[0]
    if name in fields_of(root) or problem.code != "unknown field":
        return problem
    if name == EXTENDS:
        hint = "it belongs in a file; here, name the file or the preset itself, as in preset:cuda"
        return evolve(problem, hint=hint)
    others = [kind for kind in KINDS if name in fields_of(root_of(kind))]
    if others:
        hint = f"{name} belongs to kind = {join_choices(others, 'and')}, and this is kind = {root().kind}"
        return evolve(problem, hint="; ".join(filter(None, (problem.hint, hint))))
    return problem


@frozen(kw_only=True)
class _Layer:
    """A file or an override: its assignments, or the reason why it cannot be read."""

    assignments: Sequence[Assignment] = ()
    error: ConfigError | None = None
    file: str = ""
    location: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it is a file without an entry."""
        return bool(self.assignments) and all(map(is_empty_file, self.assignments))


def _file_layer(name: str, place: str = "") -> _Layer:
    try:
        return _Layer(assignments=_read_file(name), file=name, location=place)
    except ConfigError as error:
        return _Layer(error=error, file=name, location=place)


def _read_file(name: str) -> list[Assignment]:
    file = stored_file(name)
    try:
        assignments = read_file(file, PRESETS)
    except ConfigError:  # what it is instead, if that is known, says more than where it is no TOML
        refuse_other_files(name)
        raise
    if not all(_has_our_names(item.value) for item in assignments):
        refuse_other_files(name)
        for assignment in assignments:
            refuse_other_tables(name, assignment.value)
    is_of_a_run = file != name or os.path.basename(name) == STORED_FILES[1]
    if is_of_a_run and not all(is_stored_form(entry.value) for entry in assignments):
        raise ConfigError([Problem(path=file, message="is not the stored configuration of a run")])
    return assignments


def _has_our_names(tables: object) -> bool:
    """Whether a file has entries, and all top-level names are those of a reinforcement-learning or a stored run."""
    ours = fields_of(SkyRLTrainConfig)
    return is_stored_form(tables) or (
        isinstance(tables, Mapping) and bool(tables) and all(str(name).partition(".")[0] in ours for name in tables)
    )


def _word_layer(override: str | tuple[str, Any], number: int) -> _Layer:
    try:
        if isinstance(override, tuple):
            return _Layer(assignments=read_python(dict([override]), _caller()))
        return _Layer(assignments=[read_argument(str(override), number)])
    except ConfigError as error:
        return _Layer(error=error)


def chosen_root(files: Files, overrides: Overrides = ()) -> type[RunConfig]:
    """Class of the tree that files and overrides are read into, whatever else is wrong with them."""
    layers = _layers(files, overrides)
    return _root_meant(_kind_of(layers), layers)


def _kind_of(layers: Sequence[_Layer]) -> str | None:
    """The last `kind` written in any layer; None if there is none."""
    kind = None
    for assignment in (item for layer in layers for item in layer.assignments):
        value = assignment.value
        if assignment.path == () and isinstance(value, Mapping):
            stored = value.get("config")
            value = (stored if isinstance(stored, Mapping) and "fingerprint" in value else value).get("kind")
        elif assignment.path != ("kind",):
            continue
        if value is not None:
            kind = str(value).strip().strip('"')
    return kind


def _root_meant(kind: str | None, layers: Sequence[_Layer]) -> type[RunConfig]:
    """Root class that `kind` names, or nearly names; without a `kind`, the one that the field names belong to.

    A wrong `kind` is reported as an error, and the rest is read as the kind that was probably meant.
    """
    if kind is not None:
        return root_of(kind if kind in KINDS else nearest(kind, tuple(KINDS)) or "rl")
    names = _top_names(layers)
    if len(names) < 2 or any(name in fields_of(SkyRLTrainConfig) for name in names):  # one name may be a slip
        return SkyRLTrainConfig
    known = {root: sum(name in fields_of(root) for name in names) for root in map(root_of, KINDS)}
    return max(known, key=lambda root: known[root]) if max(known.values()) > 1 else SkyRLTrainConfig


def _top_names(layers: Sequence[_Layer]) -> tuple[str, ...]:
    """Tables and fields of the root that are written in any layer."""
    names: dict[str, None] = {}
    for assignment in (item for layer in layers for item in layer.assignments):
        value = assignment.value
        if assignment.path:
            names[assignment.path[0]] = None
        elif isinstance(value, Mapping) and "fingerprint" not in value:
            names |= dict.fromkeys(str(name).partition(".")[0] for name in value)
    return tuple(names)


def _take(builder: TreeBuilder[Any], layer: _Layer, root: type[Any]) -> None:
    """Assigns the values of a layer, or records why it cannot."""
    if layer.error is not None and not layer.file:
        builder.problems.extend(layer.error.problems)
        builder.broken.update(problem.path.lstrip("+") for problem in layer.error.problems)
        return
    try:
        if layer.error is not None:
            raise layer.error
        assignments = layer.assignments
        if layer.file and any(is_stored_form(item.value) for item in assignments):
            from skyrl.config.loading.stored import as_layer

            assignments = [
                as_layer(assignment, root) if is_stored_form(assignment.value) else assignment
                for assignment in assignments
            ]
        builder.assign_all(assignments)
    except ConfigError as error:
        name = layer.file
        builder.problems.extend(
            evolve(problem, location=problem.location or layer.location, hint=problem.hint or _hint_of(name, root))
            for problem in error.problems
        )
        builder.broken.add("")  # without the file, the rest cannot be judged


def _join_split_arguments(layers: Sequence[_Layer], root: type[Any]) -> Iterator[_Layer]:
    """All layers; `trainer.epochs 2`, whose words were both taken for files, becomes one mistake with both words in its
    hint.
    """
    is_value = False
    for layer, after in pairwise([*layers, _Layer()]):
        if is_value and layer.error is not None:
            is_value = False
            continue
        is_value = layer.error is not None and _is_path(layer.file, root) and after.error is not None
        if is_value and layer.error is not None:
            hint = f"write the value without a space: {layer.file}={after.file}"
            problems = [evolve(problem, hint=hint) for problem in layer.error.problems]
            layer = evolve(layer, error=ConfigError(problems, title=layer.error.title))
        yield layer


def _hint_of(name: str, root: type[Any]) -> str:
    """Remedy for what was taken for a file and is the path of a field, or an override; empty if it is neither."""
    path, equals, _ = name.partition("=")
    if equals and path.partition(".")[0].strip("~+ ") in fields_of(root):
        return f"this is an override: overrides are the second argument, as in compose(FILES, [{name!r}])"
    return f"write the value without a space: {name}=VALUE" if _is_path(name, root) else ""


def _is_path(name: str, root: type[Any]) -> bool:
    return name.partition(".")[0] in fields_of(root) and "." in name and "=" not in name


def _caller() -> str:
    """`file:line` of the innermost caller outside of skyrl, and of what calls for it."""
    frame, ours = sys._getframe(1), ("skyrl", "attr", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _with_paths_beside(problem: Problem, run: RunConfig) -> Problem:
    """The problem, with a hint if it is about a path that exists beside the file in which it was written."""
    file = Path(problem.location.rpartition(":")[0])
    folder = file.parent
    if problem.hint or not file.is_file() or folder.resolve() == Path.cwd():
        return problem
    missing = (text for text in _texts(run, problem.path) if not (os.path.isabs(text) or os.path.exists(text)))
    existing_path = next((folder / text for text in missing if (folder / text).exists()), None)
    if existing_path is None:
        return problem
    return evolve(
        problem, hint=f"{existing_path} exists: run the command in {folder}; paths start at the working directory"
    )


def _with_default_named(problem: Problem, run: RunConfig) -> Problem:
    """The problem, with a hint if it is about a value that nobody wrote, such as the name of a missing file."""
    if problem.hint or problem.location or not any(_texts(run, problem.path)):
        return problem
    return evolve(problem, hint=f"this is the default: set {problem.path}")


def _texts(run: RunConfig, path: str) -> Iterator[str]:
    """The texts of a field that may be paths, without what may follow one: `reward.py:score`, `rows.jsonl:train`."""
    try:
        value = get_at(run, path)
    except (AttributeError, KeyError):
        return
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and text and "://" not in text and len(text) < 1000 and "\0" not in text:
            yield text.partition(":")[0]


def _sort_by_place(problems: Iterable[Problem]) -> list[Problem]:
    """Sorts problems: files in the order of their lines, then arguments, then values that were never written. Of equal
    ones, which several checks have found, one is kept.
    """
    distinct = {(item.path, item.message, item.hint, item.location): item for item in problems}
    return sorted(distinct.values(), key=lambda problem: _sort_key(problem.location))


def _sort_key(location: str) -> tuple[int, str, int]:
    location = re.sub(r" \(env:\w+\)$", "", location)
    if argument := re.fullmatch(r"argument ([0-9]+)", location):
        return (1, "", int(argument[1]))
    if line := re.fullmatch(r"(.*):([0-9]+)", location, re.DOTALL):
        return (0, line[1], int(line[2]))
    return (2, location, 0)

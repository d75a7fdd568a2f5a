"""From files and arguments to a tree that can run.

    load(files, overrides)      the tree as written, and where each value came from
    compose(files, overrides)   that, resolved and checked: what `skyrl run` starts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, cast

from attrs import frozen
from typing_extensions import TypeVar

from skyrl.config.check import check
from skyrl.config.resolve import resolve_with_origins
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, Problem
from skyrl.tree.arguments import read_argument, read_python
from skyrl.tree.draft import Draft
from skyrl.tree.origins import Assignment, Origins
from skyrl.tree.toml import read_toml

C = TypeVar("C", bound=SkyRLTrainConfig, default=SkyRLTrainConfig)
Overrides = Sequence[str] | Mapping[str, Any]
"""`["trainer.epochs=2"]` as on a command line, or `{"trainer.epochs": 2}` from Python."""


@frozen(kw_only=True)
class Loaded(Generic[C]):
    """A tree and, beside it, dotted path -> origins of each value, winner last."""

    config: C
    origins: Origins


@frozen(kw_only=True)
class Composed(Generic[C]):
    """A run that can start."""

    written: C
    """As its author wrote it, defaults filled in."""

    config: C
    """Resolved."""

    origins: Origins
    warnings: tuple[Problem, ...]


def load(files: Sequence[str] = (), overrides: Overrides = (), root: type[C] | None = None) -> Loaded[C]:
    """Patch files, then overrides, onto the default tree; a later value wins, leaf by leaf.

    Raises `ConfigError` listing every unreadable file, unknown name and value that does not fit.
    """
    draft = _draft(files, overrides, root)
    config = draft.build()
    if draft.problems:
        raise ConfigError(_by_place(draft.problems), title="This configuration cannot be used")
    return Loaded(config=config, origins=draft.origins)


def compose(
    files: Sequence[str] = (),
    overrides: Overrides = (),
    root: type[C] | None = None,
    *,
    strict: bool = False,
) -> Composed[C]:
    """Load, resolve and check, so that one `ConfigError` lists everything that is wrong; `strict` makes warnings errors."""
    draft = _draft(files, overrides, root)
    written = draft.build()
    config, origins = resolve_with_origins(written, draft.origins, draft.broken)
    found = [*draft.problems, *check(config, origins, draft.broken)]
    warnings = tuple(_by_place(problem for problem in found if problem.severity == "warning"))
    errors = found if strict else [problem for problem in found if problem.severity == "error"]
    if errors:
        raise ConfigError(_by_place(errors))
    return Composed(written=written, config=config, origins=origins, warnings=warnings)


def _draft(files: Sequence[str], overrides: Overrides, root: type[C] | None) -> Draft[C]:
    draft = Draft(root() if root else cast(C, SkyRLTrainConfig()))
    for file in files:
        _collect(draft, lambda file=file: [read_toml(file)])  # type: ignore[misc]
    if isinstance(overrides, Mapping):
        _collect(draft, lambda: read_python(overrides))
    else:
        for number, argument in enumerate(overrides, start=1):
            _collect(draft, lambda a=argument, n=number: [read_argument(a, n)])  # type: ignore[misc]
    return draft


def _collect(draft: Draft[C], read: Callable[[], Iterable[Assignment]]) -> None:
    """Assign what `read` gives; what it refuses joins the draft's problems."""
    try:
        draft.assign_all(read())
    except ConfigError as error:
        draft.problems.extend(error.problems)


def _by_place(problems: Iterable[Problem]) -> list[Problem]:
    """Files first, in the order of their lines, then arguments, then what was never written."""
    return sorted(problems, key=lambda problem: _sort_key(problem.place))


def _sort_key(place: str) -> tuple[int, str, int]:
    if place.startswith("argument "):
        return (1, "", int(place.removeprefix("argument ")))
    name, _, line = place.rpartition(":")
    return (0, name, int(line)) if line.isdigit() else (2, place, 0)

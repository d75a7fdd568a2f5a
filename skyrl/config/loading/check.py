"""`check()`: problems of a resolved tree, and written values that have no effect.

The checks themselves are in `checks/`, one small function for each rule that involves several fields; `kinds.py` lists
those of each kind of run. What a single field may hold is a validator on the field; what depends on the machine (files,
keys, GPUs) is checked when a run starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from skyrl.config.checks.texts import empty_text_problems, text_problems, texts_of
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import kind_of
from skyrl.errors import Problem
from skyrl.tree import differences, get_at
from skyrl.tree.masking import HIDDEN
from skyrl.tree.origins import DEFAULT, Origin, Origins, dotted, place_of, written_paths
from skyrl.tree.rules import Condition, find_problems, paths_read, touches


def check(config: RunConfig, origins: Origins | None = None, broken: Collection[str] = ()) -> list[Problem]:
    """All problems of a resolved tree, errors and warnings, each with its place.

    `origins` tell what was written; without them, values that differ from the default count as written. `broken` are
    paths whose written values could not be used: nothing that reads them is checked.
    """
    empty = list(empty_text_problems(config, origins or {}, broken))
    broken = {*broken, *(problem.path for problem in empty)}
    problems = [*empty, *find_problems(config, kind_of(config).checks, origins or {}, broken)]
    of_any_kind = (_masked_secret_problems, text_problems, _folders_of_another_run)
    more = (problem for check_all in of_any_kind for problem in check_all(config, origins or {}, broken))
    return [*problems, *more, *without_effect(config, origins, broken)]


def without_effect(run: RunConfig, origins: Origins | None, broken: Collection[str] = ()) -> list[Problem]:
    """Warnings for written values without effect in this run; none where that depends on a broken value, or on code
    that was not imported.

    Without `origins`, values that differ from the default tree count as written.
    """
    written = written_paths(_changed(run) if origins is None else origins)
    kind = kind_of(run)
    unknown = {*broken, *kind.unread_code(run)}
    ineffective = {
        effect.path: effect
        for effect in kind.effects
        if effect.path in written
        and outcome(effect.condition, run, unknown) is False
        and not _names_runs_of_file(effect.path, run, origins or {})
    }
    return [
        Problem(
            path=path,
            message=f"has no effect in this run: it acts only when {effect.condition.words}",
            location=place_of(path, origins or {}),
            severity="warning",
        )
        for path, effect in ineffective.items()
        if not any(around.covers(path) for around in ineffective.values() if around is not effect)
    ]


def _names_runs_of_file(path: str, run: RunConfig, origins: Origins) -> bool:
    """Whether the path is a file's name for its runs, and this run was given another folder on the command line."""
    kind = kind_of(run)
    name, folder = (origins.get(kind.path(field), (DEFAULT,))[-1].kind for field in ("run_name", "run_path"))
    return path == kind.path("run_name") and (name, folder) == ("file", "argument")


def has_effect(run: RunConfig, path: str) -> bool:
    """Whether the value at a dotted path, or at one inside it, does anything in this resolved tree. It does if that
    depends on code that was not imported.
    """
    kind = kind_of(run)
    unknown = kind.unread_code(run)
    return all(outcome(effect.condition, run, unknown) is not False for effect in kind.effects if effect.covers(path))


def outcome(condition: Condition, config: object, unknown: Collection[str]) -> bool | None:
    """Whether the condition holds; None if it reads one of the `unknown` paths."""
    if unknown and touches(paths_read(condition.holds, config), unknown):
        return None
    return condition.holds(config)


def _changed(run: RunConfig) -> Origins:
    """Origins as if every value that differs from its default, and cannot have been derived, had been written in
    Python.
    """
    derived = [rule.table or rule.writes for rule in kind_of(run).rules]
    changed = differences(type(run)(), run)
    return {path: (Origin(kind="python"),) for path in changed if not touches([path], derived)}


def _folders_of_another_run(run: RunConfig, origins: Origins, broken: Collection[str]) -> Iterator[Problem]:
    """Problems if only `run_path` is overridden: checkpoints and exports must not stay in the previous folder."""
    kind = kind_of(run)
    chosen = kind.path("run_path")
    chain = origins.get(chosen, ())
    if not chain or chain[-1].kind in ("default", "rule"):
        return
    before = [(item.source, str(item.value)) for item in chain[:-1] if item.kind not in ("default", "rule")]
    for path in (kind.path("ckpt_path"), kind.path("export_path"), kind.path("log_path")):
        written = origins.get(path, (chain[-1],))[-1]
        if touches([path, chosen], broken) or written.kind in ("default", "rule") or written.source == chain[-1].source:
            continue
        folders = [folder for source, folder in before if source == written.source]
        # Where `run_path` was not written, the folder was named after the run.
        for folder in folders or [f"runs/{get_at(run, kind.path('run_name'))}"]:
            if _is_below(str(written.value), folder) and not _is_below(str(written.value), str(chain[-1].value)):
                yield Problem(
                    path=path,
                    message=f"{written.value} is in the folder of another run: {chosen} was {folder} there",
                    hint=f"leave it out, so that it follows {chosen}, or override it, too",
                    location=written.location,
                )


def _is_below(path: str, folder: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def _masked_secret_problems(run: RunConfig, origins: Origins, broken: Collection[str]) -> Iterator[Problem]:
    """Problems for secrets of a stored run, which were masked when it was stored and have to be given again."""
    for path in (dotted(text.path) for text in texts_of(run) if HIDDEN in text.value):
        if not touches([path], broken):
            hint = "take it from a variable: env:NAME"
            message = f"{HIDDEN} is a placeholder for a secret: give the secret again"
            yield Problem(path=path, message=message, hint=hint, location=place_of(path, origins))

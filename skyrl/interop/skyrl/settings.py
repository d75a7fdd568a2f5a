"""Converts SkyRL's settings one at a time, and reports the outcome."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.errors import Problem
from skyrl.interop.environment import read_environment
from skyrl.interop.report import Line
from skyrl.interop.skyrl.newer_settings import RL
from skyrl.interop.writing import Writing, apply
from skyrl.tree.access import default_at

_OWN_FIELD = (
    "a custom field: define it in your own class (docs/configuration.md, 'Fields of your own'), and set "
    'class = "module:Name"'
)
_NULL = "empty, which SkyRL reads as null and treats as false"
_EMPTY = "the script gives no value: one of its variables is empty"
_NAMES = ("run_name", "project_name", "ckpt_path", "export_path")
"""Suffixes of settings for names and folders, where empty text means that there is none."""

_OVERLONG = "trainer.algorithm.reward_shaping.overlong."
_EXAMPLES = {
    f"trainer.algorithm.{prefix}{name}": _OVERLONG + ours
    for prefix in ("overlong_buffer.", "overlong_buffer_")
    for name, ours in (("len", "buffer_len"), ("penalty_factor", "penalty_factor"))
}
"""Fields that SkyRL's own examples define, and that exist in our tree."""


def convert_one(
    writing: Writing,
    key: str,
    value: object,
    text: str | None = None,
    *,
    added: bool = False,
    others: Mapping[str, object] | None = None,
) -> None:
    """Write one setting, or record why not. `text` is the value as written in a script; None for a file. `others` are
    all settings of the source.
    """
    read = read_environment(value, key)
    if read.refused:
        writing.note(Line(outcome="refused", source=key, value=value, reason=read.refused))
        return
    if reason := _idle_reason(key, value, others or {}):
        writing.note(Line(outcome="needless", source=key, value=value, reason=reason))
        return
    if newer := RL.translated(key, read.value, others or {}):
        apply(writing, key, value, newer)
        return
    text = text if read.value == value else None
    paths, problems = writing.write(key, _EXAMPLES.get(key, key), read.value)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors and text and not isinstance(value, str | list | dict):  # `run_name=1e5`: a text that looks like a number
        new_paths, text_problems = writing.write(key, key, text, text=True)
        if new_paths:
            writing.undo_problems(errors)
            paths, problems, errors = new_paths, text_problems, []
    if errors and value is None and text == "":  # SkyRL reads null, which counts as false for a boolean
        new_paths, _ = writing.write(key, key, False)
        if new_paths and isinstance(default_at(writing.root, new_paths[0]), bool):
            writing.undo_problems(errors)
            paths, problems, errors = new_paths, [Problem(path=key, message="", hint=_NULL)], []
    if errors:
        writing.note(refusal(key, value, errors, text, added=added))
    elif not paths:
        writing.note(Line(outcome="needless", source=key, value=value, reason=problems[0].hint if problems else ""))
    else:
        outcome = "renamed" if any(path.partition(".")[0] and not _is_inside(path, key) for path in paths) else "kept"
        reason = "; ".join(problem.hint for problem in problems if problem.hint)
        writing.note(Line(outcome=outcome, source=key, value=value, targets=paths, reason=reason))  # type: ignore[arg-type]  # a Literal


def _idle_reason(key: str, value: object, others: Mapping[str, object]) -> str:
    """Why a setting has no effect, given the others; empty if it has an effect."""
    if value in (None, "") and key.endswith(_NAMES):
        return "empty, so the default applies"
    if key == "generator.retokenize_chat_history" and others.get("generator.step_wise_trajectories") is True:
        return "step_wise_trajectories re-tokenizes every turn"
    return ""


def refusal(key: str, value: object, errors: list[Problem], text: str | None = None, *, added: bool = False) -> Line:
    """The report line of a setting that our tree does not accept, with all its problems."""
    if value is None and text == "":
        return Line(outcome="refused", source=key, value="", reason=_EMPTY)
    reason = "; ".join("; ".join(filter(None, (problem.message, problem.hint))) for problem in errors)
    is_unknown = any(problem.code == "unknown field" for problem in errors)
    is_later = any(problem.code == "not implemented" for problem in errors)
    full_reason = f"{reason}; {_OWN_FIELD}" if is_unknown and (added or not errors[0].hint) else reason
    return Line(outcome="not yet" if is_later else "refused", source=key, value=value, reason=full_reason)


def _is_inside(path: str, key: str) -> bool:
    return path == key or path.startswith(key + ".")

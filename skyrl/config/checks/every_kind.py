"""Parts of checks that every kind of run has: each is given the values, and their paths in the tree of that kind."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.models import ModelConfig
from skyrl.errors import Problem


def a_model_is_named(model: ModelConfig, path: str) -> Iterator[Problem]:
    """There is something to train; `path` is that of the table of the model."""
    if not model.path:
        hint = "give a local folder or a hub name, such as Qwen/Qwen2.5-1.5B-Instruct"
        yield Problem(path=f"{path}.path", message="no model to train", hint=hint)


def recovery_begins_where_resuming_does(
    recover: str | None, resume: str | None, *, path: str, written: str
) -> Iterator[Problem]:
    """`recover_mode` may not contradict `resume_mode`; `path` is that of the former, `written` says what is written
    for the latter, such as `resume_from = empty`.
    """
    agree = {None: (resume,), "disabled": ("latest", "none", None), "fault": ("latest", "none", None)}
    if resume not in agree.get(recover, ("latest",)):
        message = f"{recover} says where the run begins, and {written} says otherwise"
        yield Problem(path=path, message=message, hint="leave one of them out")

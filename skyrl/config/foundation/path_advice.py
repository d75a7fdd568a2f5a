"""Advice on relative paths that exist beside the configuration file, but not in the working directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from attrs import evolve

from skyrl.config.foundation.entry import RunConfig
from skyrl.errors import Problem
from skyrl.tree import get_at


def with_paths_beside(problem: Problem, run: RunConfig) -> Problem:
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


def _texts(run: RunConfig, path: str) -> Iterator[str]:
    """The texts of a field that may be paths, without what may follow one: `reward.py:score`, `rows.jsonl:train`."""
    try:
        value = get_at(run, path)
    except (AttributeError, KeyError):
        return
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and text and "://" not in text and len(text) < 1000 and "\0" not in text:
            yield text.partition(":")[0]

"""Templates of `skyrl init`: folders of files in `templates/`, copied with the task's name in them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from skyrl.config.checks.texts import REFERENCE, refused_file_name
from skyrl.errors import UserError

TEMPLATES = {
    "reward": "a reward function: one answer to each prompt",
    "environment": "an environment class: several turns, each answered",
    "tools": "an environment with tools that the policy calls",
    "agent": "a program that calls the policy over OpenAI's protocol",
    "sft": "supervised fine-tuning on chats",
}
"""Name of each template -> what it is for."""


def write_template(template: str, folder: Path) -> list[str]:
    """Copy the files of a template into a new folder, whose name becomes the name of the run. Returns the names of the
    files.

    Raises `UserError` if the folder is not empty, or its name is not valid for a run.
    """
    if refusal := refused_file_name(str(folder)):
        raise UserError(f"{refusal}: choose a shorter one")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another folder")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another name")
    name = folder.absolute().name
    if not name.isprintable() or set(name) & set('"\\/'):
        raise UserError(f"{name!r} cannot be the name of a run: quotes, backslashes and control characters")
    if REFERENCE.search(name):
        raise UserError(f"{name!r} cannot be the name of a run: nothing replaces the variable in it")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(files("skyrl.starter").joinpath("templates", template).iterdir(), key=lambda each: each.name):
        if source.is_file():
            text = source.read_text(encoding="utf-8").replace("{name}", name)
            (folder / source.name).write_text(text, encoding="utf-8")
            written.append(source.name)
    return written

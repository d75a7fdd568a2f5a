"""Templates of `skyrl init`: folders of files in `templates/`, copied with the task's name in them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from skyrl.config.checks.texts import REFERENCE, refused_file_name
from skyrl.errors import UserError
from skyrl.storage.atomic import atomic_folder

TEMPLATES = {
    "reward": "a reward function: one answer to each prompt",
    "environment": "an environment class: several turns, each answered",
    "tools": "an environment with tools that the policy calls",
    "agent": "a program that calls the policy over OpenAI's protocol",
    "sft": "supervised fine-tuning on chats",
    "lm": "a reward function for a pretrained language model, which is fetched from the package index",
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
    sources = files("skyrl.starter").joinpath("templates", template).iterdir()
    texts = {source.name: source.read_text(encoding="utf-8") for source in sources if source.is_file()}
    with atomic_folder(folder) as scratch:
        for file, text in texts.items():
            (scratch / file).write_text(text.replace("{name}", name), encoding="utf-8")
    return sorted(texts)

"""Templates of `skyrl init`: folders of files in `templates/`, copied with the task's name in them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from skyrl.config.checks.texts import REFERENCE, refused_file_name
from skyrl.config.loading.kinds import root_of
from skyrl.errors import UserError
from skyrl.storage.atomic import atomic_folder
from skyrl.tree.schema import json_schema

TEMPLATES = {
    "reward": "a reward function: one answer to each prompt",
    "environment": "an environment class: several turns, each answered",
    "tools": "an environment with tools that the policy calls",
    "agent": "a program that calls the policy over OpenAI's protocol",
    "sft": "supervised fine-tuning on chats",
    "preference": "DPO and variants on pairs of answers",
    "lm": "a reward function for a pretrained language model, which is fetched from the package index",
}
"""Name of each template -> what it is for."""


_LOOK = "`skyrl view runs/{name}` shows what the model answered, `skyrl eval runs/{name}` scores it, and "
_CALLS = (
    " The small model has seen only this tool, in the example chats of `prepare.py`: for another tool,\n"
    "   give it examples of your own there and run it again, or take a model that calls tools."
)

SCHEMA = "skyrl.schema.json"
"""File with the schema of the configuration, which the first line of `run.toml` names."""


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
    templates = files("skyrl.starter").joinpath("templates")
    sources = [source for source in templates.joinpath(template).iterdir() if source.is_file()]
    texts = {source.name: source.read_text(encoding="utf-8") for source in sources}
    readme = templates.joinpath("README.md").read_text(encoding="utf-8")
    look = "" if "kind =" in texts["run.toml"] else _LOOK
    for placeholder, words in {"{about}": TEMPLATES[template], "{task}": _task(texts), "{look}": look}.items():
        readme = readme.replace(placeholder, words)
    texts["README.md"] = readme
    texts[".gitignore"] = templates.joinpath("gitignore").read_text(encoding="utf-8")
    texts[SCHEMA] = _schema(texts["run.toml"])
    with atomic_folder(folder) as scratch:
        for file, text in texts.items():
            (scratch / file).write_text(text.replace("{name}", name), encoding="utf-8")
    return sorted(texts)


def _task(texts: Mapping[str, str]) -> str:
    """The sentence on how to change the task: the file of it, and that of its test."""
    tests = [name for name in texts if name.startswith("test_")]
    own = [name for name in texts if name.endswith(".py") and name not in (*tests, "prepare.py")]
    if not own:
        return "The model learns from the rows alone: write rows of your own, as below."
    calls = _CALLS if "shelf_example" in texts["prepare.py"] else ""
    run_tests = "".join(f"; `pytest` runs `{test}`" for test in tests)
    return f"Edit `{own[0]}`, whose reward decides what is learned{run_tests}.{calls}"


def _schema(run: str) -> str:
    """The schema of configurations of the kind of run that a file describes."""
    kind = tomllib.loads(run).get("kind", "rl")
    return json.dumps(json_schema(root_of(kind)), ensure_ascii=False) + "\n"

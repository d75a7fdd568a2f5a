"""Recognises what is given in place of a configuration: a model, a script, data, or a file of another program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from skyrl.errors import ConfigError, Problem

_TITLE = "This is not a configuration of skyrl"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_ROWS = (".parquet", ".jsonl", ".csv", ".arrow")
_SHELLS = (".sh", ".bash", ".zsh", ".sbatch", ".slurm")
_OF_A_MODEL = ("config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json")

_SCRIPT = "this is a shell script, not a configuration"
_TRL_COMMANDS = ("grpo", "sft", "dpo", "rloo", "reward")
_TRL = "these are arguments of TRL, which skyrl does not convert"
_BY_HAND = "begin with examples/quickstart/grpo.toml; `skyrl config docs` and docs/configuration.md describe the fields"


def refuse_other_files(name: str) -> None:
    """Raise `ConfigError` for a folder or a file that holds a model, rows, or a script, as far as its name and its
    first bytes tell.
    """
    found = _model_at(name) or _rows_in(name)
    if found is None and (text := _script_in(name)):
        found = _foreign_script(text) or (_SCRIPT, f"skyrl config convert {name} --from skyrl -o run.toml")
    _refuse(name, found)


def refuse_other_sources(name: str) -> None:
    """Raise `ConfigError` for what no conversion reads: a model, rows, a script that starts verl or TRL."""
    found = _model_at(name, is_run=False) or _rows_in(name)
    if found is None and (text := _script_in(name)):
        found = _foreign_script(text)
    _refuse(name, found)


def refuse_other_tables(name: str, tables: object, *, areal: bool = False) -> None:
    """Raise `ConfigError` for the content of a file that another program's names stand at the top of.

    `areal`: the file may be one of AReaL's.
    """
    if isinstance(tables, Mapping):
        _refuse(name, _other_program(name, {str(key).partition(".")[0] for key in tables}, areal=areal))


def _refuse(name: str, found: tuple[str, str] | None) -> None:
    if found:
        message, hint = found
        raise ConfigError([Problem(path=name, message=message, hint=hint)], title=_TITLE)


def _foreign_script(text: str) -> tuple[str, str] | None:
    """The message and the hint for a script of a program that nothing is converted from."""
    if "actor_rollout_ref." in text or "verl.trainer" in text:
        return "this is a script for verl, which skyrl does not convert", _BY_HAND
    is_trl = "--model_name_or_path" in text or any(f"trl {each}" in text for each in _TRL_COMMANDS)
    return (_TRL, _BY_HAND) if is_trl else None


def _model_at(name: str, *, is_run: bool = True) -> tuple[str, str] | None:
    path = _expanded(name)
    is_folder = os.path.isdir(path)
    inside = [each for each in _OF_A_MODEL if is_folder and os.path.isfile(os.path.join(path, each))]
    if is_folder and inside and (inside != ["config.json"] or not is_run):  # the folder of a run has one, too
        return _model(name, "folder")
    if not is_folder and path.lower().endswith(_WEIGHTS) and os.path.isfile(path):
        return _model(os.path.dirname(name) or ".", "file")
    return None


def _model(folder: str, what: str) -> tuple[str, str]:
    return (
        f"this is a model {what}, not a configuration",
        f"give it as trainer.policy.model.path={folder} (model.path={folder} in supervised runs)",
    )


def _rows_in(name: str) -> tuple[str, str] | None:
    if not name.lower().endswith(_ROWS) or not os.path.isfile(_expanded(name)):
        return None
    return (
        "this is a file of rows, not a configuration",
        f"give it as data.train_data=[{name}] (train_datasets=[{name}] in supervised runs)",
    )


def _script_in(name: str) -> str:
    """The first characters of a shell script; empty for anything else."""
    path = Path(_expanded(name))
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            text = file.read(100_000).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""  # reading it as a configuration reports why
    first = text.partition("\n")[0]
    is_script = path.suffix.lower() in _SHELLS or (first.startswith("#!") and "sh" in first)
    return text if is_script else ""


def _other_program(name: str, top: set[str], *, areal: bool) -> tuple[str, str] | None:
    if {"architectures", "model_type"} & top and "trainer" not in top:
        return _model(name if os.path.isdir(_expanded(name)) else os.path.dirname(name) or ".", "folder")
    if "actor_rollout_ref" in top:
        return "this is a verl configuration, which skyrl does not convert", _BY_HAND
    if "model_name_or_path" in top:
        return _TRL, _BY_HAND
    if {"run", "resources"} <= top:
        return "this is a task for SkyPilot", "give the configuration that the task starts"
    if not areal and {"experiment_name", "trial_name"} <= top:
        return "this is an AReaL configuration", f"skyrl config convert {name} --from areal -o run.toml"
    return None


def _expanded(name: str) -> str:
    return os.path.expanduser(name)

"""Recognises files given by mistake instead of a configuration: a model, a script, data, or another program's file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, Problem
from skyrl.tree.classes import fields_of
from skyrl.tree.types import config_class

_TITLE = "This is not a configuration of skyrl"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_ROWS = (".parquet", ".jsonl", ".csv", ".arrow")
_SHELLS = (".sh", ".bash", ".zsh", ".sbatch", ".slurm")
_OF_A_MODEL = ("config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json")

_TRL_COMMANDS = ("grpo", "sft", "dpo", "kto", "rloo", "reward")
_CONVERTED = {"verl": "verl", "TRL": "trl", "AReaL": "areal"}
"""Program -> its name in `skyrl config convert --from`."""

_BY_HAND = "docs/coming-from/README.md lists where its settings are here; begin with examples/quickstart/grpo.toml"
_OF_PRIME_RL = "convert the file that it names after @: skyrl config convert rl.toml --from prime-rl --to run.toml"

TABLES_OF_SUPERVISED: Mapping[str, tuple[str, ...]] = {
    "model": ("model",),
    "data": ("train_datasets",),
    "val": ("eval_datasets",),
    "optim": ("optimizer_config",),
    "scheduler": ("optimizer_config",),
    "deployment": ("placement",),
    "ckpt": ("ckpt_interval", "ckpt_path"),
    "resume": ("resume_mode",),
    "monitors": ("logger", "trackers"),
    "log": ("log_path",),
}
"""Tables of prime-rl's supervised files, which are not converted -> paths of `kind = "sft"`."""


def refuse_other_files(name: str) -> None:
    """Raise `ConfigError` for a folder or a file that holds a model, rows, or a script, judging by its name and its
    first bytes.
    """
    refusal = _model_at(name) or _rows_in(name)
    if refusal is None and (text := _script_in(name)):
        refusal = _program_message(name, _program_of_script(text), "script")
        refusal = refusal or _script(name)
    _refuse(name, refusal)


def refuse_other_sources(name: str, of: str | None = "") -> None:
    """Raise `ConfigError` for files that cannot be converted: a model, rows, or a script of a program other than `of`,
    which is a name in `skyrl config convert --from`, or None for all that are converted.
    """
    refusal = _model_at(name, is_run=False) or _rows_in(name)
    if refusal is None and (text := _script_in(name)):
        program = _program_of_script(text)
        refusal = None if _is_of(program, of) else _program_message(name, program, "script")
    _refuse(name, refusal)


def refuse_other_tables(name: str, tables: object, *, of: str | None = "") -> None:
    """Raise `ConfigError` for the content of a file whose top-level names are those of another program.

    `of`: the program whose file it may be; None for all that are converted.
    """
    if isinstance(tables, Mapping):
        # SkyRL's names are also ours, but none of its files is TOML.
        if (of or (of is None and name.lower().endswith(".toml"))) and _is_ours(tables):
            problem = Problem(path=name, message="is a configuration of skyrl's own already", hint=f"skyrl run {name}")
            raise ConfigError([problem], title="Nothing to convert")
        _refuse(name, _recognise_tables(name, tables, of))


def _refuse(name: str, refusal: tuple[str, str] | None) -> None:
    if refusal:
        message, hint = refusal
        raise ConfigError([Problem(path=name, message=message, hint=hint)], title=_TITLE)


def _program_of_script(text: str) -> str:
    """The known program that a script starts, or whose classes it uses; empty if there is none."""
    if "actor_rollout_ref." in text or "verl.trainer" in text:
        return "verl"
    if "openrlhf.cli" in text:
        return "OpenRLHF"
    if "run_grpo" in text and ("nemo" in text.lower() or "++grpo." in text or " grpo." in text):
        return "NeMo-RL"
    if "uv run rl @" in text or "prime_rl" in text or "uv run orchestrator @" in text:
        return "prime-rl"
    is_trl = "--model_name_or_path" in text or any(f"trl {item}" in text for item in _TRL_COMMANDS)
    return "TRL" if is_trl or re.search(r"^[^\S\n]*(from|import) trl\b", text, re.MULTILINE) else ""


def _program_message(
    name: str, program: str, kind: str, converted: Mapping[str, str] = _CONVERTED
) -> tuple[str, str] | None:
    """The message and the hint for a file of another program."""
    if not program:
        return None
    article = "an" if program[0] in "AO" else "a"
    message = f"this is {article} {program} {kind}"
    if program in converted:
        return message, f"skyrl config convert {name} --from {converted[program]} --to run.toml"
    hint = _OF_PRIME_RL if program == "prime-rl" and kind == "script" else _BY_HAND
    return f"{message}, which skyrl does not convert", hint


def _table_locations(program: str, tables: Mapping[Any, Any]) -> str:
    """Where the tables of a supervised file of prime-rl are here; empty for any other file."""
    if program != "prime-rl" or "data" not in tables or _is_rl_of_prime_rl(tables):
        return ""
    locations = [f"{name} is {' and '.join(paths)}" for name, paths in TABLES_OF_SUPERVISED.items() if name in tables]
    return f'kind = "sft", in which {"; ".join(locations)}. ' if locations else ""


def _is_rl_of_prime_rl(tables: Iterable[object]) -> bool:
    return "orchestrator" in {str(key).partition(".")[0] for key in tables}


def is_prime_rl(tables: object) -> bool:
    """Whether a file's content is a configuration of prime-rl's reinforcement learning."""
    return isinstance(tables, Mapping) and _is_rl_of_prime_rl(tables)


def _script(name: str) -> tuple[str, str]:
    if name.lower().endswith(".py"):
        hint = f"a reward function is environment.env_class={name}:NAME"
        return "this is a Python program, not a configuration", hint
    return "this is a shell script, not a configuration", f"skyrl config convert {name} --from skyrl --to run.toml"


def _model_at(name: str, *, is_run: bool = True) -> tuple[str, str] | None:
    path = os.path.expanduser(name)
    is_folder = os.path.isdir(path)
    inside = [item for item in _OF_A_MODEL if is_folder and os.path.isfile(os.path.join(path, item))]
    if is_folder and inside and (inside != ["config.json"] or not is_run):  # the folder of a run has one, too
        return _model(name, "folder")
    if not is_folder and path.lower().endswith(_WEIGHTS) and os.path.isfile(path):
        return _model(os.path.dirname(name) or ".", "file")
    return None


def _model(folder: str, kind: str) -> tuple[str, str]:
    hint = f"give it as trainer.policy.model.path={folder} (model.path={folder} in supervised runs)"
    return f"this is a model {kind}, not a configuration", hint


def _rows_in(name: str) -> tuple[str, str] | None:
    if not name.lower().endswith(_ROWS) or not os.path.isfile(os.path.expanduser(name)):
        return None
    hint = f"give it as data.train_data=[{name}] (train_datasets=[{name}] in supervised runs)"
    return "this is a file of rows, not a configuration", hint


def _script_in(name: str) -> str:
    """The first characters of a script of a shell or in Python; empty for anything else."""
    path = Path(os.path.expanduser(name))
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            text = file.read(100_000).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""  # reading it as a configuration reports why
    first = text.partition("\n")[0]
    is_script = path.suffix.lower() in (*_SHELLS, ".py") or (first.startswith("#!") and "sh" in first)
    return text if is_script else ""


def _is_of(program: str, of: str | None, converted: Mapping[str, str] = _CONVERTED) -> bool:
    return program in converted if of is None else converted.get(program) == of


def _recognise_tables(name: str, tables: Mapping[Any, Any], of: str | None) -> tuple[str, str] | None:
    top = {str(key).partition(".")[0] for key in tables}
    if {"architectures", "model_type"} & top and "trainer" not in top:
        return _model(name if os.path.isdir(os.path.expanduser(name)) else os.path.dirname(name) or ".", "folder")
    if {"run", "resources"} <= top:
        return "this is a task for SkyPilot", "give the configuration that the task starts"
    program = _program_of_tables(top)
    # Only configurations of reinforcement learning are converted from prime-rl.
    converted = {**_CONVERTED, "prime-rl": "prime-rl"} if _is_rl_of_prime_rl(top) else _CONVERTED
    refusal = None if _is_of(program, of, converted) else _program_message(name, program, "configuration", converted)
    return refusal and (refusal[0], _table_locations(program, tables) + refusal[1])


def _is_ours(tables: Mapping[Any, Any]) -> bool:
    """Whether all names of the first two levels exist in skyrl's tree, and some of them are inside a table."""
    ours = fields_of(SkyRLTrainConfig)
    inside = [(top, name) for top, table in tables.items() if isinstance(table, Mapping) for name in table]
    return bool(inside) and all(
        top in ours and (config := config_class(ours[top].type)) is not None and name in fields_of(config)
        for top, name in inside
    )


def _program_of_tables(top: set[str]) -> str:
    """The known program whose files have such top-level names; empty if there is none."""
    if "actor_rollout_ref" in top:
        return "verl"
    if "model_name_or_path" in top or {"per_device_train_batch_size", "learning_rate"} <= top:
        return "TRL"
    if "orchestrator" in top or ("max_steps" in top and {"optim", "ckpt", "deployment"} & top):
        return "prime-rl"
    if {"eval", "model"} <= top or {"vllm", "deployment"} <= top:  # its evaluations and its inference servers
        return "prime-rl"
    if "policy" in top and top & {"grpo", "ppo", "sft", "dpo", "rm", "loss_fn", "cluster", "defaults"}:
        return "NeMo-RL"
    if {"experiment_name", "trial_name"} <= top:
        return "AReaL"
    return ""

"""AReaL's programs and files: a script names the program, its YAML file and settings that replace some of it. Files are
read as Hydra composes them: other files first, then the file's own settings, then changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.interop import not_converted
from skyrl.interop.launches import (
    RUNS,
    PeerPrograms,
    ProgramFacts,
    RunCommand,
    aside,
    launch_of,
    reads_images,
    unconverted,
)
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.shell.unknown import is_known
from skyrl.interop.values import REFERENCE, flat_file, flat_lists, yaml_value
from skyrl.tree.files import read_text

_SELF, _WHOLE = "_self_", "@_global_"
_DEEPEST = 10


def read_experiment(name: str, depth: int = 0) -> dict[str, Any]:
    """The settings of a file and of those in its list `defaults`, as flat keys. What the list names in another way, or
    what is not there, stays in it. Raises `ConfigError`.
    """
    keys = flat_file(name, of="areal")
    listed = keys.get("defaults")
    if not isinstance(listed, list) or depth > _DEEPEST:
        return keys
    composed: dict[str, Any] = {}
    unread: list[Any] = []
    own = {key: value for key, value in keys.items() if key != "defaults"}
    for item in listed if _SELF in listed else [*listed, _SELF]:
        file = Path(name).parent / f"{str(item).removesuffix(_WHOLE).removesuffix('.yaml')}.yaml"
        if item == _SELF:
            composed = merged(composed, own)
        elif isinstance(item, str) and (_WHOLE in item or "/" not in item) and "@" not in file.name and file.is_file():
            composed = merged(composed, read_experiment(str(file), depth + 1))
        else:
            unread.append(item)
    return composed | ({"defaults": unread} if unread else {})


def merged(keys: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with the changes: a table changes some settings of another one, any other value takes its place."""
    tables = tuple(f"{key}{end}" for key, value in changes.items() for end in ".[" if value != {})
    above = {key[:at] for key in changes for at, letter in enumerate(key) if letter in ".["}
    kept = {key: value for key, value in keys.items() if not key.startswith(tables) and key not in above}
    return {**kept, **{key: value for key, value in changes.items() if value != {} or key not in kept}}


def with_defaults_of_references(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that others refer to and that the file omits, with AReaL's newest defaults."""
    named = {match for value in keys.values() if isinstance(value, str) for match in REFERENCE.findall(value)}
    trees = [tree for kind in ("SFTConfig", "GRPOConfig") for tree in peer_trees("areal", kind)[-1:]] if named else []
    known = {key: value for tree in trees for key, value in tree.defaults.items() if value is not None}
    return {name: known[name] for name in sorted(named - keys.keys()) if name in known}


_KNOWN: Mapping[str, ProgramFacts] = {
    **dict.fromkeys(
        (
            *("gsm8k_rl", "gsm8k_grpo", "gsm8k_ppo", "gsm8k_sft", "boba_grpo", "hhrlhf_rw", "hhrlhf_dpo"),
            *("train_sft_profile", "gsm8k_rl_mt", "gsm8k_rlvr_scaffolding", "search_scaffolding"),
            *("train_tir", "train_agents", "train_swe_rl"),
            *("countdown.train", "tau2.train", "camel.train", "agent_workflow.train", "terminal_bench.train"),
            *("tongyi_deepresearch.train", "search_agent.train", "hermes.train", "openclaw.train"),
            "inference_service.tau2_rollout",
        ),
        RUNS,
    ),
    **dict.fromkeys(
        ("clevr_count_70k_grpo", "clevr_count_70k_sft", "geometry3k_grpo", "virl39k_grpo"),
        unconverted("a policy that reads images, which skyrl does not train yet"),
    ),
    "gsm8k_eval": aside("it only evaluates: `skyrl eval` does that here"),
    **dict.fromkeys(("online_rollout", "human_in_the_loop_demo"), aside("it only samples")),
    **dict.fromkeys(("start_session", "set_reward", "hermes_loop", "demo_lifecycle"), aside("it only talks to a run")),
    **dict.fromkeys(
        ("run_agent_service", "areal agent", "areal inf", "areal inference"), aside("a server, which trains nothing")
    ),
    **dict.fromkeys(("config_converter", "profile_rank_utils", "postprocess_profile"), aside("a tool")),
}
"""AReaL's programs of 2025 and 2026."""

_ROWS = {"gsm8k_sft": "sft", "train_sft_profile": "sft", "hhrlhf_rw": "rw", "hhrlhf_dpo": "dpo"}
"""Program -> the type of its rows, which decides the kind of its run."""

_OWN_WORKFLOW = {
    "multi_turn_math": "asks again after a wrong answer: docs/environments.md",
    "gsm8k_rl_mt": "asks again after a wrong answer: docs/environments.md",
    "scaffolding": "runs controllers of its own: docs/agents.md",
    "train_tir": "lets the policy call Python: docs/tools.md",
    "search_agent": "lets the policy search: docs/tools.md",
    **dict.fromkeys(
        ("train_agents", "train_swe_rl", "tau2", "camel", "agent_workflow", "terminal_bench", "hermes", "openclaw"),
        "runs an agent of its own: docs/agents.md",
    ),
}
"""Part of a program's name -> what its own code does, and where that is described here."""

IMAGE_ROWS = ("geometry3k", "clevr_count_70k", "virl39k")
"""Data sets of AReaL's examples whose rows have images."""

_TABLES = (
    "actor|critic|ref|rollout|gconfig|eval_gconfig|train_dataset|valid_dataset|cluster|scheduler|launcher|saver|recover|"
    "evaluator|stats_logger|sglang|vllm|teacher|perf_tracer|model"
)
_SETTING = re.compile(
    rf"[+~]{{0,2}}(?:(?:{_TABLES})\.[\w.]+|experiment_name|trial_name|allocation_mode|total_train_\w+|seed)=.*|--config=.*",
    re.DOTALL,
)
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*(?:\[\d+\][\w.]*)*=.*|~[A-Za-z_][\w.]*", re.DOTALL)
_LAUNCHER = PeerPrograms(
    name="AReaL",
    programs=_KNOWN,
    is_setting=lambda word: word == "--config" or _SETTING.fullmatch(word) is not None,
    commands=("areal",),
    wrappers=re.compile(r"areal\.(?:infra\.)?launcher\.(?:local|ray|slurm)"),
)


def read_launch(name: str, number: int | None) -> tuple[dict[str, Any], RunCommand]:
    """The settings of the run that a script starts, as flat keys of its YAML file with the script's changes. Raises
    `ConfigError`.
    """
    if name.endswith(".py"):
        raise not_converted(
            name,
            "is a program, whose settings are in the YAML file that follows --config",
            "convert that file, or a script with the command",
        )
    launch = launch_of(read_text(name), name, _LAUNCHER, number)
    file, launch = launch.option("--config")
    words, launch = launch.split(lambda word: _OVERRIDE.fullmatch(word) is not None)
    keys = _changed(read_experiment(_find_config(file, name, launch)), words)
    program = launch.program.rpartition(".")[2]
    if program in _ROWS:
        keys.setdefault("train_dataset.type", _ROWS[program])
    return keys, launch


def remarks_of(launch: RunCommand) -> list[str]:
    """Remarks on the program and the launcher of a run, for what its settings do not say."""
    own = next((description for part, description in _OWN_WORKFLOW.items() if part in launch.program.split(".")), "")
    remarks = [f"{launch.program} {own}. That part has to be written here."] if own else []
    launcher = next((word.rpartition(".")[2] for word in launch.before if word.startswith("areal.")), "")
    return [*remarks, f"The launcher is `skyrl launch {launcher}` here."] if launcher else remarks


def refuse_images(keys: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for a run whose rows have images."""
    model = str(keys.get("actor.path", keys.get("model.path")))
    rows = str(keys.get("train_dataset.path"))
    sources = [model] if reads_images(model) else [rows for item in IMAGE_ROWS if item in rows]
    if sources:
        raise not_converted(where, f"trains on rows with images ({sources[0]}), which skyrl does not do yet")


def _find_config(file: str, script: str, launch: RunCommand) -> str:
    """The YAML file, looked for in the current folder, in the script's, and in those around it."""
    if not file or not is_known(file) or "$" in file:
        raise not_converted(
            script, f"line {launch.line} gives {file or 'no file'} after --config: convert the YAML file itself"
        )
    for folder in (Path(), *Path(script).absolute().parents):
        if (path := folder / Path(file).expanduser()).is_file():
            return str(path)
    raise not_converted(
        script,
        f"line {launch.line} names {file}, which is neither here nor beside the script nor in a folder around it",
    )


def _changed(keys: Mapping[str, Any], words: list[str]) -> dict[str, Any]:
    """The keys with the changes of a command: `key=value`, with `+` or `++` in front, or `~key`, which removes it."""
    changed = dict(keys)
    for word in words:
        name, equals, text = word.lstrip("+~").partition("=")
        if word.startswith("~"):
            changed = {key: value for key, value in merged(changed, {name: None}).items() if key != name}
        else:
            changed = merged(changed, flat_lists({name: yaml_value(text) if equals else None}))
    return changed

"""AReaL's programs and launchers: a script names the program, its YAML file and settings that replace some of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError, Problem
from skyrl.interop.areal.files import merged, read_experiment
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
from skyrl.interop.shell.unknown import is_known
from skyrl.interop.values import flat_lists, text_of, yaml_value

_IMAGES = "a policy that reads images, which skyrl does not train yet"
_SAMPLES = "it only samples"
_OF_A_SESSION = "it only talks to a run"
_KNOWN: Mapping[str, ProgramFacts] = {
    **dict.fromkeys(
        (
            *("gsm8k_rl", "gsm8k_grpo", "gsm8k_ppo", "gsm8k_sft", "boba_grpo", "hhrlhf_rw", "hhrlhf_dpo"),
            "train_sft_profile",
            *(
                "gsm8k_rl_mt",
                "gsm8k_rlvr_scaffolding",
                "search_scaffolding",
                "train_tir",
                "train_agents",
                "train_swe_rl",
            ),
            *("countdown.train", "tau2.train", "camel.train", "agent_workflow.train", "terminal_bench.train"),
            *("tongyi_deepresearch.train", "search_agent.train", "hermes.train", "openclaw.train"),
            "inference_service.tau2_rollout",
        ),
        RUNS,
    ),
    **dict.fromkeys(
        ("clevr_count_70k_grpo", "clevr_count_70k_sft", "geometry3k_grpo", "virl39k_grpo"), unconverted(_IMAGES)
    ),
    "gsm8k_eval": aside("it only evaluates: `skyrl eval` does that here"),
    **dict.fromkeys(("online_rollout", "human_in_the_loop_demo"), aside(_SAMPLES)),
    **dict.fromkeys(("start_session", "set_reward", "hermes_loop", "demo_lifecycle"), aside(_OF_A_SESSION)),
    "run_agent_service": aside("a server, which trains nothing"),
    **{f"areal {name}": aside("a server, which trains nothing") for name in ("agent", "inf", "inference")},
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
    launch = launch_of(_text(name), name, _LAUNCHER, number)
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
        message = f"trains on rows with images ({sources[0]}), which skyrl does not do yet"
        raise ConfigError([Problem(path=where, message=message)], title="Nothing was converted")


def _text(name: str) -> str:
    if name.endswith(".py"):
        hint = "convert that file, or a script with the command"
        message = "is a program, whose settings are in the YAML file that follows --config"
        raise ConfigError([Problem(path=name, message=message, hint=hint)], title="Nothing was converted")
    return text_of(name)


def _find_config(file: str, script: str, launch: RunCommand) -> str:
    """The YAML file, looked for in the current folder, in the script's, and in those around it."""
    problem = ""
    if not file or not is_known(file) or "$" in file:
        problem = f"line {launch.line} gives {file or 'no file'} after --config: convert the YAML file itself"
    else:
        folders = [Path(), *Path(script).absolute().parents]
        config_path = next((path for folder in folders if (path := folder / Path(file).expanduser()).is_file()), None)
        if config_path is not None:
            return str(config_path)
        problem = (
            f"line {launch.line} names {file}, which is neither here nor beside the script nor in a folder around it"
        )
    raise ConfigError([Problem(path=script, message=problem)], title="Nothing was converted")


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

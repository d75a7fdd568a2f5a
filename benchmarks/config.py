"""The cost of answering about a configuration: one JSON line.

    pip install -e '.[bench]'; python -m benchmarks.config [ROUNDS]

Cold: CPU time of a whole process of `skyrl config check FILE`, of `skyrl --help` and of a completion, beside that of a
process that only defines the same tree in plain attrs (no types checked, no file read) and takes its defaults; and of
`compose` with 20 overrides beside the same tree built by those of the peers that are installed (`config_peers.py`). All
take turns; compare the ratio of the least times, since other work on the machine can only add to one. Warm:
milliseconds in a process that did it before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import attrs

from benchmarks.config_peers import classes, dataclass_tree, programs, pydantic_tree
from skyrl.config import SkyRLTrainConfig, check, compose, load, resolve
from skyrl.tree import evolve_at, thaw, to_dict
from skyrl.tree.classes import fields_of
from skyrl.tree.types import Secret, bare, config_class, is_list, is_mapping, is_union

RUN = """\
[data]
train_data = ["train.parquet"]
val_data = ["validation.parquet"]

[trainer]
device = "cpu"
logger = "console"
epochs = 20
train_batch_size = 512
policy_mini_batch_size = 256
max_prompt_length = 1024
run_name = "benchmark"

[trainer.policy.model]
path = "Qwen/Qwen2.5-0.5B-Instruct"

[trainer.policy.optimizer_config]
lr = 1e-6
max_grad_norm = 0.5

[trainer.algorithm]
use_kl_loss = true
kl_loss_coef = 0.001
eps_clip_high = 0.28

[generator]
n_samples_per_prompt = 8

[generator.sampling_params]
temperature = 1.0
max_generate_length = 1024

[generator.inference_engine]
backend = "torch"
"""


COMPLETION = """
import os
os.environ |= {"_SKYRL_COMPLETE": "bash_complete", "COMP_LINE": "skyrl config check trainer.pol", "COMP_POINT": "30"}
os.environ["COMP_WORDBREAKS"] = "=:@"
from skyrl.cli import start
start()
"""
"""What a shell runs when the tab key is pressed."""


def main(rounds: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.toml")
        file.write_text(RUN)
        Path(folder, "plain_tree.py").write_text(plain_attrs())
        Path(folder, "dataclass_tree.py").write_text(dataclass_tree())
        Path(folder, "pydantic_tree.py").write_text(pydantic_tree())
        commands = {
            "plain_attrs": [sys.executable, "-c", "import plain_tree; plain_tree.SkyRLTrainConfig()"],
            "skyrl_config_check": [sys.executable, "-m", "skyrl.cli", "config", "check", str(file)],
            "skyrl_help": [sys.executable, "-m", "skyrl.cli", "--help"],
            "completion": [sys.executable, "-c", COMPLETION],
            **{f"build_{name}": [sys.executable, "-c", program] for name, program in programs().items()},
        }
        cold = take_turns(commands, rounds, folder)
        tree = resolve(load([file]))
        warm = {
            "load": warm_ms(lambda: load([file])),
            "resolve": warm_ms(lambda: resolve(SkyRLTrainConfig())),
            "check": warm_ms(lambda: check(tree, {})),
            "load_resolve_check": warm_ms(lambda: compose([file])),
            "unstructure": warm_ms(lambda: to_dict(tree)),
            "evolve_one_leaf": warm_ms(lambda: evolve_at(tree, "trainer.policy.optimizer_config.lr", 3e-6)),
        }
    least = {name: min(times) for name, times in cold.items()}
    middle = {name: statistics.median(times) for name, times in cold.items()}
    result = {
        "benchmark": "config",
        "rounds": rounds,
        "cold_cpu_ms": {name: {"min": round(least[name], 1), "median": round(middle[name], 1)} for name in commands},
        "ratio": round(least["skyrl_config_check"] / least["plain_attrs"], 3),
        "times_slower_than_skyrl": {
            name.removeprefix("build_"): round(least[name] / least["build_skyrl"], 2)
            for name in commands
            if name.startswith("build_")
        },
        "ratio_of_medians": round(middle["skyrl_config_check"] / middle["plain_attrs"], 3),
        "warm_ms": {name: round(value, 3) for name, value in warm.items()},
    }
    print(json.dumps(result))


def take_turns(commands: Mapping[str, list[str]], rounds: int, folder: str) -> dict[str, list[float]]:
    """CPU milliseconds of each command in each round, after a first one that compiles to bytecode."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    path = os.pathsep.join([folder, str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(Path(folder, "bytecode"))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for turn in range(rounds + 1):
        for name, command in commands.items():
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            if turn:
                times[name].append(1e3 * (usage.ru_utime + usage.ru_stime))
    return times


def warm_ms(work: Callable[[], Any], repeats: int = 200) -> float:
    """CPU milliseconds: the least of many times."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return 1e3 * min(seconds)


def plain_attrs() -> str:
    """A module that defines the tree's classes, fields, types and defaults in attrs, as one would by hand."""
    lines = ["import collections.abc", "import typing", "", "import attrs", "", "NoneType = type(None)", ""]
    for cls in dict.fromkeys(classes(SkyRLTrainConfig)):
        lines += ["", "@attrs.frozen(kw_only=True)", f"class {cls.__name__}:"]
        for name, attribute in fields_of(cls).items():
            lines.append(f"    {name}: {type_source(attribute.type)} = {default_source(attribute.default)}")
    return "\n".join(lines) + "\n"


def type_source(kind: Any) -> str:
    """A type as one writes it; a number with a unit is a number, the name of a secret is text."""
    kind = bare(kind)
    nested = config_class(kind)
    if nested is not None:
        return nested.__name__ if kind is nested else f"{nested.__name__} | None"
    if kind is Secret:
        return "str"
    if kind is Any:
        return "typing.Any"
    if is_union(kind):
        return " | ".join(type_source(arm) for arm in get_args(kind))
    if is_list(kind):
        return f"tuple[{', '.join('...' if item is ... else type_source(item) for item in get_args(kind))}]"
    if is_mapping(kind):
        return f"collections.abc.Mapping[{', '.join(type_source(item) for item in get_args(kind))}]"
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else repr(kind)


def default_source(value: Any) -> str:
    """A default as one writes it; a table gets a factory."""
    if isinstance(value, Mapping):
        return f"attrs.field(factory=lambda: {thaw(value)!r})"
    if attrs.has(type(value)):
        default = type(value)()
        changed = [name for name in fields_of(type(value)) if getattr(value, name) != getattr(default, name)]
        inside = ", ".join(f"{name}={default_source(getattr(value, name))}" for name in changed)
        return f"{type(value).__name__}({inside})"
    return repr(value)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)

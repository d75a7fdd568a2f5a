"""Milliseconds of a step on Ray with a vLLM engine, by process and phase, and of the start: a table and one JSON line.

    python benchmarks/ray_step.py [--before ROOT] [--rounds 1] [--steps 8] [--prompts 16] [--samples 8]
                                  [--tokens 24] [--cuda] [--model FOLDER --data FILE --reward FILE:NAME] [PATH=VALUE]

A run with one learner and one engine, which share devices, draws many short answers with a small model of 30 layers, so
that what surrounds the computation shows. It runs on the CPU, or with `--cuda` on one GPU. `ray_probe` times
functions in all processes: a phase is the time in a step in which one of its functions ran, waiting included, so that
phases of a process overlap and contain each other. `cpu` is the CPU time of a process in a step. With `--before`,
another checkout takes turns with this one. The first two steps of a run do not count; the medians of the others do.
`start` lists when each part of the start began and ended, in seconds after the command, `end` those of the end, after
the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[1]
PROBE = ROOT / "benchmarks" / "ray_probe"
WARM_UP = 2
"""Steps that do not count."""

ON_A_CPU = [
    "trainer.device=cpu",
    "generator.inference_engine.model_dtype=float32",
    "generator.inference_engine.engine_init_kwargs.kv_cache_memory_bytes=1000000000",  # all samples run at once
]
"""Settings of a run without a GPU."""

LEAST_MS = 0.5
"""Milliseconds a step below which a phase is left out of the table."""


def main() -> None:
    """Measures each checkout and prints their table."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--before", type=Path, help="root of the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each checkout, which take turns")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--cuda", action="store_true", help="as the preset for CUDA says")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--reward", default=f"{ROOT / 'examples' / 'quickstart' / 'reward.py'}:sorted_exactly")
    parser.add_argument("--keep", type=Path, help="folder for runs and records, kept")
    parser.add_argument("settings", nargs="*", help="path=value of the run")
    args = parser.parse_args()
    if args.before and not (args.before / "skyrl" / "cli").is_dir():
        parser.error(f"--before: {args.before} is not the root of a checkout")  # or this code would run twice
    roots = ({"before": args.before} if args.before else {}) | {"after": ROOT}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        model, data = args.model, args.data
        if model is None:
            model, data = made(folder / "inputs")
        settings = settings_of(args, model, data)
        rounds = [
            {side: measure(root.absolute(), folder / f"{side}-{n}", settings) for side, root in roots.items()}
            for n in range(args.rounds)
        ]
    measured = {side: merged([result[side] for result in rounds]) for side in roots}
    print_table(measured)
    print(json.dumps({"benchmark": "ray_step", "answers": args.prompts * args.samples, **measured}))


def made(folder: Path) -> tuple[Path, Path]:
    """A model of 30 layers with random weights, and the quick start's prompts."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    import random

    import prepare
    import torch

    from skyrl.starter.tiny_chat import small_qwen2

    torch.manual_seed(0)
    tokenizer = prepare.build_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    for component in (small_qwen2(tokenizer, hidden_size=128, layers=30), tokenizer):
        component.save_pretrained(folder / "model")
    prepare.write_rows(folder / "rows.parquet", prepare.draw_words(random.Random(0), 1024, excluded=()))
    return folder / "model", folder / "rows.parquet"


def settings_of(args: argparse.Namespace, model: Path, data: Path) -> list[str]:
    """The run, as arguments of `skyrl run`; its own folder is added for each checkout."""
    return [
        *(["preset:cuda"] if args.cuda else []),
        f"data.train_data=[{json.dumps(str(data))}]",
        f"environment.env_class={args.reward}",
        f"generator.n_samples_per_prompt={args.samples}",
        f"generator.sampling_params.max_generate_length={args.tokens}",
        "generator.inference_engine.backend=vllm",
        "generator.inference_engine.logprob_parity_bound=5",
        *([] if args.cuda else ON_A_CPU),
        "trainer.placement.executor=ray",
        "trainer.placement.colocate_all=true",
        f"trainer.policy.model.path={model}",
        "trainer.policy.optimizer_config.lr=1e-6",
        "trainer.algorithm.use_kl_loss=false",
        f"trainer.train_batch_size={args.prompts}",
        f"trainer.policy_mini_batch_size={args.prompts}",
        "trainer.max_tokens_per_microbatch=16384",
        "trainer.max_prompt_length=128",
        f"trainer.max_training_steps={args.steps}",
        "trainer.eval_interval=-1",
        "trainer.eval_before_train=false",
        "trainer.ckpt_interval=-1",
        "trainer.logger=console",
        *args.settings,
    ]


@frozen
class Call:
    """A call that a process made, in seconds of the clock that all processes share."""

    process: str
    what: str
    began: float
    ended: float


def measure(root: Path, folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Milliseconds a step by process and phase, and the seconds of the start, of the code under `root`."""
    records = folder / "probe"
    records.mkdir(parents=True)
    paths = [str(root), str(PROBE), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_PROBE": str(records),
        "HF_HUB_OFFLINE": "1",
    }
    began = time.monotonic()
    command = [sys.executable, "-m", "skyrl.cli", "run", *settings, f"trainer.run_path={folder / 'run'}"]
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        ended = subprocess.run(command, env=environment, stdout=output, stderr=output, cwd=folder, check=False)
    calls, cpu = read(records)
    steps = sorted((call.began, call.ended) for call in calls if call.what == "step")
    counted = steps[WARM_UP:]
    if ended.returncode and not counted:  # a run that fails at its end has been measured
        raise SystemExit((folder / "output.txt").read_text(encoding="utf-8")[-4000:])
    phases: dict[str, dict[str, float]] = {}
    for process in dict.fromkeys(call.process for call in calls):
        own = [call for call in calls if call.process == process]
        phases[process] = {
            function: round(median(covered(own, function, *step) for step in counted) * 1e3, 1)
            for function in sorted({call.what for call in own})
        }
    for process, samples in cpu.items():
        cpu_seconds = used(samples, counted[-1][1]) - used(samples, counted[0][0])
        phases.setdefault(process, {})["cpu"] = round(cpu_seconds / len(counted) * 1e3, 1)
    starts = [call for call in calls if call.what.startswith("start") and call.ended <= steps[0][0]]
    start = {
        f"{call.process} {call.what.removeprefix('start: ')}": [
            round(call.began - began, 1),
            round(call.ended - began, 1),
        ]
        for call in sorted(starts, key=lambda call: call.began)
    }
    last = steps[-1][1]
    end = {
        f"{call.process} {call.what.removeprefix('end: ')}": [round(call.began - last, 1), round(call.ended - last, 1)]
        for call in sorted(calls, key=lambda call: call.began)
        if call.what.startswith("end") and call.began >= last
    }
    return {"step": phases, "start": start | {"first step": [0.0, round(steps[0][0] - began, 1)]}, "end": end}


def merged(results: Sequence[Any]) -> Any:
    """The medians of the numbers that are in the same place in all results."""
    if isinstance(results[0], dict):
        names = [name for name in results[0] if all(name in result for result in results)]
        return {name: merged([result[name] for result in results]) for name in names}
    if isinstance(results[0], list):
        return [merged(values) for values in zip(*results, strict=True)]
    return round(median(results), 1)


def read(records: Path) -> tuple[list[Call], dict[str, list[tuple[float, float]]]]:
    """All calls of all processes of interest, and their CPU-seconds over time."""
    calls: list[Call] = []
    cpu: dict[str, list[tuple[float, float]]] = {}
    for file in sorted(records.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        own = [line for line in lines if line[0] not in ("process", "cpu")]
        name = role({line[0] for line in own})
        if name:
            calls += [Call(name, *line) for line in own]
            cpu[name] = [(line[1], line[2]) for line in lines if line[0] == "cpu"]
    return calls, cpu


def role(names: set[str]) -> str:
    """The process in which functions of these names ran; empty if it is none of a run's."""
    if "step" in names:
        return "driver"
    if "start: learner" in names:
        return "learner"
    if "start: engine" in names:
        return "engine"
    return "EngineCore" if "start: engine core" in names else ""


def covered(calls: Sequence[Call], function: str, began: float, ended: float) -> float:
    """Seconds between two moments in which at least one call was running."""
    total, until = 0.0, began
    for call in sorted((call for call in calls if call.what == function), key=lambda call: call.began):
        first, last = max(call.began, until), min(call.ended, ended)
        if last > first:
            total, until = total + last - first, last
    return total


def used(samples: Sequence[tuple[float, float]], moment: float) -> float:
    """CPU-seconds of a process at the first sample after a moment."""
    return next((seconds for when, seconds in samples if when >= moment), samples[-1][1])


def rows(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Name and cells of each row of the table: the step in milliseconds, then the start in seconds."""
    sides = list(measured.values())
    names: dict[tuple[str, str], None] = {}
    for side in sides:
        for process, phases in side["step"].items():
            names |= dict.fromkeys((process, function) for function in phases)
    order = defaultdict(lambda: 9, driver=0, engine=1, EngineCore=2, learner=3)
    for process, function in sorted(names, key=lambda name: (order[name[0]], name)):
        values = [side["step"].get(process, {}).get(function) for side in sides]
        if any(value is not None and value >= LEAST_MS for value in values):
            yield f"{process}: {function} (ms)", ["" if value is None else f"{value:.1f}" for value in values]
    for part in ("start", "end"):
        for name in dict.fromkeys(name for side in sides for name in side[part]):
            spans = [side[part].get(name) for side in sides]
            yield f"{part}, {name} (s)", ["" if span is None else f"{span[0]:.1f} to {span[1]:.1f}" for span in spans]


def print_table(measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one row for each phase, with a column for each checkout."""
    print(f"| phase | {' | '.join(measured)} |\n|---|{'---|' * len(measured)}")
    for name, cells in rows(measured):
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""`skyrl rehearse`: takes the configuration of a large run through every phase on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import asdict

from skyrl.cli.command_line.arguments import ARGUMENTS, TRUST, compose_rl, split_words
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.errors import UserError

if TYPE_CHECKING:
    from skyrl.config import SkyRLTrainConfig
    from skyrl.tools.rehearsal import Finding

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""vLLM 0.32's FlashAttention supports head sizes that are multiples of `HEAD_MULTIPLE`, up to `LARGEST_HEAD`."""


@click.command(cls=FieldsCommand, epilog=examples("skyrl rehearse run.toml --gpus 8"))
@ARGUMENTS
@TRUST
@click.option(
    "--gpus", type=click.IntRange(min=1), help="Number of GPUs that the run will have; needing more is a failure."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    help="Time limit of each run, in seconds.",
)
@click.option(
    "--to",
    "keep",
    type=click.Path(path_type=Path),
    help="Keep the folded run in this folder, which is created if missing.",
)
@json_option
def rehearse(arguments: tuple[str, ...], gpus: int | None, timeout: float, keep: Path | None, as_json: bool) -> None:
    """Take a run through every phase here, with its model in miniature.

    Layout, memory and folders are judged as they are. Then a folded run - one process on a CPU, few prompts, short
    answers - trains, is killed, resumes and is exported. Exit code 1: at least one phase failed.
    """
    from tempfile import TemporaryDirectory

    from skyrl.tools.rehearsal import Rehearsal

    run = compose_rl(arguments, "only reinforcement-learning runs can be rehearsed")
    files, words = split_words(arguments)
    with TemporaryDirectory(prefix="skyrl-rehearsal-") as temporary:
        folder = (keep or Path(temporary)).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--to {folder}: the folder cannot be created: {error.strerror}") from None
        rehearsal = Rehearsal(files=files, words=words, run=run, folder=folder, timeout=timeout)
        findings: list[Finding] = []
        for finding in chain(planned_findings(run, gpus), rehearsal.findings()):
            findings.append(finding)
            if as_json:
                continue
            text = finding.text.replace("\n", "\n" + " " * 22)  # further lines below the first
            click.echo(f"{finding.phase:<12}{finding.state:<10}{text}")
    failed = sum(finding.state == "failed" for finding in findings)
    if as_json:
        print_result([asdict(finding) for finding in findings], ok=not failed)
    if failed:
        click.echo(f"{failed} finding{'s' if failed > 1 else ''} to fix before reserving GPUs", err=True)
        sys.exit(1)
    if not as_json:
        click.echo(f"Next: skyrl run {shlex.join(arguments)}")


def planned_findings(run: SkyRLTrainConfig, gpus: int | None) -> Iterator[Finding]:
    """Findings on placement, memory and engine of the run as configured."""
    from skyrl.tools.rehearsal import Finding
    from skyrl.tools.run_plan import placement_text, plan_of

    plan = plan_of(run)
    text = placement_text(plan, "machine")
    if gpus is not None and plan["gpus"] > gpus:
        yield Finding("placement", "failed", f"the run needs {text}, but --gpus is {gpus}")
    else:
        yield Finding("placement", "passed", text)
    yield from _memory(plan["memory"])
    yield from _heads(run)


def _memory(memory: dict[str, object]) -> Iterator[Finding]:
    from skyrl.config.estimates.memory_fit import as_arguments
    from skyrl.tools.rehearsal import Finding

    if memory["phases"] is None:
        yield Finding("memory", "not tried", str(memory["why"]))
    elif memory["fits"] is None:
        yield Finding("memory", "not tried", "set trainer.placement.gpu_kind")
    elif memory["fits"]:
        yield Finding("memory", "passed", f"each phase is estimated to fit {memory['gpu_kind']}")
    else:
        nearest = memory["nearest"]
        remedy = f"\nclosest change that fits: {as_arguments(nearest)}" if isinstance(nearest, dict) else ""
        yield Finding("memory", "failed", f"{memory['why']}{remedy}")


def _heads(run: SkyRLTrainConfig) -> Iterator[Finding]:
    from skyrl.config.derive.engine_backends import backend_of
    from skyrl.tools.rehearsal import Finding
    from skyrl.tools.run_plan import known_shape_of

    engine, shape = run.generator.inference_engine, known_shape_of(run.trainer.policy.model.path or "")
    if backend_of(engine).package != "vllm" or run.trainer.device != "cuda" or shape is None:
        return
    if shape.head_size % HEAD_MULTIPLE or shape.head_size > LARGEST_HEAD:
        kernels = f"multiples of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
        text = f"vLLM's FlashAttention has no kernels for head size {shape.head_size}, only for {kernels}"
        yield Finding("engine", "failed", text)
    elif shape.heads % engine.tensor_parallel_size:
        text = f"tensor_parallel_size = {engine.tensor_parallel_size} does not divide the model's {shape.heads} heads"
        yield Finding("engine", "failed", text)

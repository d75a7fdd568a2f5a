"""`skyrl plan --fit`: layouts of a run that fit on a given number of GPUs, ordered by estimated speed, and the TOML
layer that selects one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from skyrl.autotune.search import proposals, reasons
from skyrl.cli.command_line.arguments import split_words
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.sizes import starts_engines
from skyrl.config.estimates.memory import models_without_sizes
from skyrl.config.estimates.memory_fit import GIB, as_arguments
from skyrl.config.loading.kinds import samples_rollouts
from skyrl.config.loading.load import compose
from skyrl.config.loading.standalone_file import put
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, UserError
from skyrl.storage.atomic import write_file
from skyrl.tools.run_plan import known_shape_of
from skyrl.tree import get_at

SHOWN = 3
"""Largest number of proposals that are printed."""


def fit(arguments: Sequence[str], gpus: int, answer_tokens: float | None) -> dict[str, Any]:
    """The fastest layouts that fit and pass the check, with their reasons, as data. Raises `UserError` if none does."""
    files, words = split_words(arguments)
    run = _run(files, words)
    proposed: list[dict[str, Any]] = []
    refusals: list[str] = []
    for proposal in proposals(run, gpus, known_shape_of, answer_tokens):
        try:
            compose(files, [*words, *as_arguments(proposal.changes).split()], environ=os.environ)
        except ConfigError as error:
            refusals.append(error.problems[0].message)
            continue
        seconds, fullest = proposal.seconds, proposal.fullest
        proposed.append(
            {
                "changes": {path: value for path, value in proposal.changes.items() if get_at(run, path) != value},
                "seconds": {**attrs.asdict(seconds), "step": seconds.step},
                "fullest": {"name": fullest.name, "role": fullest.role, "bytes": fullest.bytes},
                "gpu_bytes": proposal.memory,
                "host_bytes": proposal.host,
                "colocated": bool(proposal.changes["trainer.placement.colocate_all"]),
                "engine_gpus": proposal.engine_gpus,
                "reasons": reasons(run, proposal, known_shape_of, answer_tokens),
            }
        )
        if len(proposed) == SHOWN:
            break
    if not proposed:
        raise UserError(f"--fit {gpus}: {_missing_layout_reason(run, gpus, refusals)}")
    return {"gpus": gpus, "gpu_kind": run.trainer.placement.gpu_kind, "proposals": proposed}


def rendered(proposed: Mapping[str, Any]) -> str:
    """The proposals as text."""
    lines = [f"Layouts on {proposed['gpus']} x {proposed['gpu_kind']}, fastest first (estimated):"]
    for number, proposal in enumerate(proposed["proposals"], 1):
        lines += ["", *_lines(number, proposal)]
    return "\n".join(lines)


def write_layer(proposal: Mapping[str, Any], file: Path) -> None:
    """Write the changes of a proposal to a TOML file that does not exist yet, to pass after the run's own files. Raises
    `UserError`.
    """
    if file.exists():
        raise UserError(f"--to {file}: the file already exists; choose another, or remove it")
    tables: dict[str, Any] = {}
    for path, value in proposal["changes"].items():
        put(tables, path.split("."), value)
    head = "# Written by `skyrl plan --fit`; pass it after the run's own file.\n"
    try:
        write_file(file, head + tomli_w.dumps(tables))
    except OSError as error:
        raise UserError(f"--to {file}: {error.strerror}") from None


def _run(files: Sequence[str], words: Sequence[str]) -> SkyRLTrainConfig:
    """The run that the arguments describe. Warnings are dropped: that the run does not fit is why --fit is used. Raises
    `UserError` for a run whose layouts cannot be estimated.
    """
    run = compose(files, words, environ=os.environ).config
    if not samples_rollouts(run):
        raise UserError(f"kind = {run.kind}: --fit lays out learners and engines, but this run has no engines")
    engine = run.generator.inference_engine
    unknown = models_without_sizes(run, known_shape_of)
    obstacles = []
    if run.trainer.device != "cuda":
        obstacles.append("layouts are for GPUs: set trainer.device=cuda")
    if run.trainer.placement.gpu_kind is None:
        obstacles.append("set the kind of GPU, such as trainer.placement.gpu_kind=H100-80")
    if unknown:
        obstacles.append(f"the sizes of {', '.join(unknown)} are unknown: use a folder with a config.json")
    if not starts_engines(run) or backend_of(engine).is_embedded:
        obstacles.append(f"the run must start its engines on GPUs, but backend = {engine.backend} starts none")
    if obstacles:
        raise UserError("--fit: " + "\n--fit: ".join(obstacles))
    return run


def _missing_layout_reason(run: SkyRLTrainConfig, gpus: int, refusals: Sequence[str]) -> str:
    if refusals:
        return f"`skyrl config check` refuses all layouts that fit: {refusals[0]}"
    kind, more = run.trainer.placement.gpu_kind, gpus
    while (more := 2 * more) <= 64 * gpus:
        if proposals(run, more, known_shape_of):
            return f"no layout fits {gpus} x {kind}; {more} would be enough"
    return f"no layout fits {kind}; shorten the answers, or use GPUs with more memory"


def _lines(number: int, proposal: Mapping[str, Any]) -> Iterator[str]:
    seconds, fullest = proposal["seconds"], proposal["fullest"]
    engines = "taking turns on all GPUs" if proposal["colocated"] else f"engines on {proposal['engine_gpus']} of them"
    phases = ", ".join(
        f"{name} {seconds[name]:,.1f}"
        for name in ("generation", "scoring", "update", "transfer", "turns")
        if seconds[name] >= 0.05  # rounds to more than 0.0
    )
    overlap_note = "; sampling overlaps training" if seconds["overlaps"] else ""
    yield f"{number}. {engines}: {seconds['step']:,.0f} s per step ({phases}{overlap_note})"
    most, memory, host = (size / GIB for size in (fullest["bytes"], proposal["gpu_bytes"], proposal["host_bytes"]))
    yield f"   fullest: {fullest['name']} of the {fullest['role']}, {most:.1f} of {memory:.1f} GiB"
    yield f"   host memory per GPU: up to {host:.1f} GiB"
    yield f"   {as_arguments(proposal['changes']) or 'no changes'}"
    yield from (f"   - {reason}" for reason in proposal["reasons"])

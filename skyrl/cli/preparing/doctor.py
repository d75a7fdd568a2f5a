"""`skyrl doctor`: what a run would find on this machine and, with --cluster, on the machines of a Ray cluster."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict

from skyrl.cli.command_line.arguments import ARGUMENTS, STRICT, TRUST, compose_arguments
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.errors import UserError

if TYPE_CHECKING:
    from skyrl.config.foundation.entry import RunConfig
    from skyrl.processes.ray.survey import Survey
    from skyrl.runs.run_tree import AnyRun
    from skyrl.tools.cluster_findings import ClusterFinding

_DO_EVERYTHING = ("llama", "qwen2", "qwen3")
"""Types of models that need not be tried, which takes the import of torch: see docs/models.md."""

UNCALLED = "uncalled"
"""Topic of the tools that were not called."""

_CALL_TOOLS = "--call-tools calls each once"
_NO_ARGUMENTS = "no ToolEnv has them, or no arguments that fit were found"
"""Reasons why tools were not called."""

_LINKS_SHOWN = 64
"""Largest number of pairs of machines that are printed."""


@click.command(cls=FieldsCommand, epilog=examples("skyrl doctor run.toml"))
@ARGUMENTS
@STRICT
@TRUST
@click.option(
    "--cluster", is_flag=True, help="Also check every machine of the Ray cluster at trainer.placement.ray_address."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="With --cluster: seconds to wait for a machine.",
)
@click.option(
    "--call-tools",
    is_flag=True,
    help="Call each tool of a ToolEnv once, with arguments made up from its schema: its effects are real.",
)
@json_option
def doctor(
    arguments: tuple[str, ...], strict: bool, cluster: bool, timeout: float, call_tools: bool, as_json: bool
) -> None:
    """Check in seconds whether a run would start here.

    Packages, GPUs, keys, models, folders, disks and locks are checked, as the configuration needs them.
    Every row of each file is read; the first one is rendered by the chat template and scored: a reward function, or
    an environment class of yours, judges an empty answer and the ground truth. Its tools are called only with
    --call-tools, because they may have effects. Nothing is started or written. With --cluster, every machine of a
    running Ray cluster is checked, too: versions, shared folders, clocks, memory, GPUs, and the network between each
    two. Exit code 1: something on the cluster has to be fixed.
    """
    from skyrl.config.derive.run_kind import RunKind

    run = compose_arguments(arguments, strict=strict, also=RunKind.doctor_checks).config
    facts = dict(machine_facts(run, call_tools=call_tools))
    if not as_json:
        but = "; not every tool was called" if UNCALLED in facts else ""
        click.echo(f"The configuration is valid, and this machine has what it names{but}:")
        for topic, text in facts.items():
            click.echo(f"  {topic:<8} {text}")
        click.echo(
            "Lengths of rows, data on the hub, weights and the resources of a cluster are checked when the run starts."
        )
    findings = examine(run, timeout, quiet=as_json) if cluster else []
    if as_json:
        print_result({"machine": facts, "cluster": [asdict(finding) for finding in findings]}, ok=not findings)
    elif not cluster:
        click.echo(f"Next: skyrl run {shlex.join(arguments)}")
    sys.exit(1 if findings else 0)


def machine_facts(run: RunConfig, *, call_tools: bool = False) -> Iterator[tuple[str, str]]:
    """Topic and text of each fact on how the run would run here. `run` has passed all checks.

    With `call_tools`, tools of environments are called; raises `ConfigError` for those that fail.
    """
    from skyrl.config.loading.kinds import kind_of
    from skyrl.planning.layout import counted
    from skyrl.tree import get_at

    kind = kind_of(run)
    trainer: Any = get_at(run, kind.trainer)
    evaluation = "data.val_data" if kind.data == "data.train_data" else "eval_datasets"
    sources, held_out = len(get_at(run, kind.data)), len(get_at(run, evaluation) or ())
    model = get_at(run, f"{kind.model}.path")
    processes = kind.trained.ranks(run)
    single_process = processes == 1 and trainer.placement.executor != "ray"
    ranks = f"by {trainer.strategy} in {counted(processes, 'process', 'processes')}"
    yield "model", f"{model}, trained on {trainer.device} {'in one process' if single_process else ranks}"
    yield from _rows(run)
    if trainer.device == "cuda":
        yield "compute", f"{trainer.compute_dtype}, attention by {trainer.attention}"
    if slower := _slower_than_the_preset(run):
        yield "speed", f'extends = "preset:cuda" has faster settings for: {", ".join(slower)}'
    yield "data", f"{counted(sources, 'source')} to train on, {held_out} to evaluate on, whose files were read"
    yield from _tasks(run, call_tools=call_tools)
    yield "folder", f"{trainer.run_path}, free and writable"


def _tasks(run: RunConfig, *, call_tools: bool) -> Iterator[tuple[str, str]]:
    """Facts about tasks that judged a row, and about their tools. Raises `ConfigError`."""
    from skyrl.config.loading.kinds import samples_rollouts
    from skyrl.experiments.first_rows import tried_tasks

    tasks = list(tried_tasks(run, call_tools=call_tools)) if samples_rollouts(run) else []
    if tasks:
        yield "task", "; ".join(f"{task.name} judged a first row" for task in tasks)
    if called := [name for task in tasks for name in task.called]:
        silent = ", ".join(name for task in tasks for name in task.returned_none)
        none = f"; {silent} returned None, which the policy reads as null: return what it should read" if silent else ""
        yield "tools", f"{', '.join(called)} called once{none}"
    if uncalled := [name for task in tasks for name in task.uncalled]:
        yield UNCALLED, f"{', '.join(uncalled)} ({_NO_ARGUMENTS if call_tools else _CALL_TOOLS})"


def _rows(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Facts about what a small copy of the model shows: how its rows run, and how the embedded engine samples. Raises
    `ModelError` if they cannot.
    """
    from skyrl.config.loading.kinds import kind_of, samples_rollouts
    from skyrl.experiments.model_checks import readable_files
    from skyrl.tree import get_at

    files = readable_files(get_at(run, f"{kind_of(run).model}.path"))
    if files is None or files.config.get("model_type") in _DO_EVERYTHING:
        return
    from skyrl.config.derive.engine_backends import backend_of
    from skyrl.config.derive.model_overrides import learner_overrides
    from skyrl.config.derive.sizes import starts_engines
    from skyrl.inference.torch.sampling_support import sampling_support
    from skyrl.learners.row_support import rows_of_run
    from skyrl.models.files.loading import load_config
    from skyrl.tree import required

    tree: Any = run
    trainer, section = tree.trainer, kind_of(run).trained.section(run)
    path, attention = required(section.model.path, "model.path"), required(trainer.attention, "attention")
    config = load_config(path, learner_overrides(trainer, section))
    rows = rows_of_run(trainer, config, attention)
    if rows.reason:
        yield "rows", rows.reason
    engine = run.generator.inference_engine if samples_rollouts(run) and starts_engines(run) else None
    if engine is not None and backend_of(engine).is_embedded:
        support = sampling_support(config, attention)
        if support.reason:
            yield "engine", f"samples with attention {support.attention}: {support.reason}"


def _slower_than_the_preset(run: RunConfig) -> list[str]:
    """Paths that have an effect in a run on CUDA and differ from the value in the preset `cuda`."""
    from skyrl.config import load
    from skyrl.config.loading.check import has_effect
    from skyrl.config.loading.kinds import samples_rollouts
    from skyrl.tree import get_at

    if not samples_rollouts(run) or run.trainer.device != "cuda":
        return []
    fast = load(["preset:cuda"])
    paths = sorted(path for path in fast.origins if path != "trainer.device")
    return [path for path in paths if has_effect(run, path) and get_at(run, path) != get_at(fast.config, path)]


def examine(run: AnyRun, seconds: float, *, quiet: bool = False) -> list[ClusterFinding]:
    """Findings on a cluster; they are printed after facts about the machines, unless `quiet`. Raises `UserError` if the
    run names no cluster, and `ProcessError` if the cluster does not answer.
    """
    from skyrl.config.loading.kinds import kind_of
    from skyrl.planning.layout import layout
    from skyrl.processes.machine_facts import facts_here
    from skyrl.processes.ray.survey import survey
    from skyrl.tools.cluster_findings import cluster_findings

    field = run.trainer.path_of("placement.ray_address")
    address = run.trainer.placement.ray_address
    if address is None:
        raise UserError(f"--cluster checks a running Ray cluster: set {field} = host:port")
    shared, readable = shared_folders(run), _models(run)
    result = survey(address, readable=readable, shared=list(shared), seconds=seconds, field=field)
    local_facts = facts_here([], [])
    unit = "GPU" if run.trainer.device == "cuda" else "slot"
    problems = list(cluster_findings(result, local_facts, shared, layout(kind_of(run).sizes(run)), unit))
    if quiet:
        return problems
    head = ["machine", "python", "torch", "ray", "clock", "free memory", "GPUs"]
    click.echo("\n".join(_aligned(head, _machines(result))))
    if result.links:
        click.echo("\n".join(["", *_aligned(["from", "to", "round trip", "bandwidth"], _links(result))]))
    click.echo(f"\n{len(problems)} finding{'s' if len(problems) > 1 else ''}:" if problems else "No problems found.")
    for finding in problems:
        click.echo(f"  {finding.where}: {finding.problem}\n    {finding.remedy}")
    return problems


def shared_folders(run: AnyRun) -> dict[str, str]:
    """Existing folders that all machines have to share -> the field whose files are written there."""
    fields: dict[str, str] = {}
    for name in ("run_path", "ckpt_path", "export_path", "log_path"):
        text = getattr(run.trainer, name)
        if text and "://" not in text:
            folder = Path(text).expanduser().absolute()
            nearest = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
            fields.setdefault(str(nearest), run.trainer.path_of(name))
    return fields


def _models(run: AnyRun) -> list[str]:
    """Models and tokenizers that the run names by path."""
    from skyrl.config.loading.kinds import roles_of

    named = [role.section(run).model.path for role in roles_of(run)] + [run.trainer.tokenizer_path]
    paths = [Path(name).expanduser().absolute() for name in named if name]
    return sorted({str(path) for path in paths if path.exists()})


def _machines(result: Survey) -> Iterator[list[str]]:
    for machine in result.machines:
        if machine.facts is None:
            yield [machine.name, "no answer"]
            continue
        versions = [machine.facts.versions.get(name, "-") for name in ("python", "torch", "ray")]
        memory = f"{machine.facts.memory / 2**30:.1f} of {machine.facts.total_memory / 2**30:.1f} GiB"
        clock = f"{machine.clock:+.3f} s" if machine.clock else "0 s"
        yield [machine.name, *versions, clock, memory, str(len(machine.facts.gpus))]


def _links(result: Survey) -> Iterator[list[str]]:
    hosts = {machine.address: machine.facts.host if machine.facts else machine.address for machine in result.machines}
    for (one, other), link in list(result.links.items())[:_LINKS_SHOWN]:
        latency = "-" if link.latency is None else f"{1e3 * link.latency:.2f} ms"
        bandwidth = "-" if link.bandwidth is None else f"{link.bandwidth / 1e6:,.0f} MB/s"
        yield [hosts[one], hosts[other], latency, bandwidth]


def _aligned(head: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    table = [list(head), *rows]
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(len(head))]
    for row in table:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)).rstrip()

"""`skyrl doctor --cluster`: checks the machines of a running Ray cluster, and the network between them, for one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from skyrl.processes.ray.survey import Survey
    from skyrl.runs.run_tree import AnyRun
    from skyrl.tools.cluster_findings import ClusterFinding

_SHOWN = 64
"""Largest number of pairs of machines that are printed."""


def examine(run: AnyRun, seconds: float) -> int:
    """Print facts about the machines and all findings. Returns the number of findings. Raises `UserError` if the run
    names no cluster, and `ProcessError` if the cluster does not answer.
    """
    from skyrl.config.loading.kinds import kind_of
    from skyrl.errors import UserError
    from skyrl.planning.sizes import layout
    from skyrl.processes.machine_facts import facts_here
    from skyrl.processes.ray.survey import survey
    from skyrl.tools.cluster_findings import cluster_findings

    field = run.trainer.path_of("placement.ray_address")
    address = run.trainer.placement.ray_address
    if address is None:
        raise UserError(f"--cluster checks a running Ray cluster: set {field} = host:port")
    shared, readable = shared_folders(run), _models(run)
    found = survey(address, readable=readable, shared=list(shared), seconds=seconds, field=field)
    here = facts_here([], [])
    for line in _tables(found):
        click.echo(line)
    unit = "GPU" if run.trainer.device == "cuda" else "slot"
    problems = list(cluster_findings(found, here, shared, layout(kind_of(run).sizes(run)), unit))
    click.echo("\n".join(_told(problems)))
    return len(problems)


def shared_folders(run: AnyRun) -> dict[str, str]:
    """Existing folders that all machines have to share -> the field whose files are written there."""
    found: dict[str, str] = {}
    for name in ("run_path", "ckpt_path", "export_path", "log_path"):
        text = getattr(run.trainer, name)
        if text and "://" not in text:
            folder = Path(text).expanduser().absolute()
            nearest = next(each for each in (folder, *folder.parents) if each.is_dir())
            found.setdefault(str(nearest), run.trainer.path_of(name))
    return found


def _models(run: AnyRun) -> list[str]:
    """Models and tokenizers that the run names by path."""
    from skyrl.config.loading.kinds import roles_of

    named = [role.section(run).model.path for role in roles_of(run)] + [run.trainer.tokenizer_path]
    paths = [Path(name).expanduser().absolute() for name in named if name]
    return sorted({str(path) for path in paths if path.exists()})


def _tables(found: Survey) -> Iterator[str]:
    yield from _aligned(["machine", "python", "torch", "ray", "clock", "free memory", "GPUs"], _machines(found))
    if found.links:
        yield ""
        yield from _aligned(["from", "to", "round trip", "bandwidth"], _links(found))


def _machines(found: Survey) -> Iterator[list[str]]:
    for each in found.machines:
        if each.facts is None:
            yield [each.name, "no answer"]
            continue
        versions = [each.facts.versions.get(name, "-") for name in ("python", "torch", "ray")]
        memory = f"{each.facts.memory / 2**30:.1f} of {each.facts.total_memory / 2**30:.1f} GiB"
        clock = f"{each.clock:+.3f} s" if each.clock else "0 s"
        yield [each.name, *versions, clock, memory, str(len(each.facts.gpus))]


def _links(found: Survey) -> Iterator[list[str]]:
    hosts = {each.address: each.facts.host if each.facts else each.address for each in found.machines}
    for (one, other), link in list(found.links.items())[:_SHOWN]:
        latency = "-" if link.latency is None else f"{1e3 * link.latency:.2f} ms"
        bandwidth = "-" if link.bandwidth is None else f"{link.bandwidth / 1e6:,.0f} MB/s"
        yield [hosts[one], hosts[other], latency, bandwidth]


def _aligned(head: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    table = [list(head), *rows]
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(len(head))]
    for row in table:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)).rstrip()


def _told(problems: Sequence[ClusterFinding]) -> Iterator[str]:
    if not problems:
        yield "No problems found."
        return
    yield f"\n{len(problems)} finding{'s' if len(problems) > 1 else ''}:"
    for each in problems:
        yield f"  {each.where}: {each.problem}"
        yield f"    {each.remedy}"

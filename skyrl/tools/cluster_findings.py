"""Findings about a cluster for one run: machine, problem and remedy, derived from the data of `ray_survey`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from attrs import frozen

from skyrl.planning.layout import Layout, Node, NoRoom, assign
from skyrl.processes.machine_facts import MachineFacts
from skyrl.processes.ray_survey import Survey, Surveyed

CLOCK_SECONDS = 1.0
"""Difference between clocks above which it is reported."""

LATENCY_SECONDS = 0.005
"""Round-trip time above which it is reported: ranks on such machines would wait for each other."""

LEAST_FREE = 0.1
"""Share of a machine's memory below which its free memory is reported."""

_SLOW = 1 / 3


@frozen(kw_only=True)
class ClusterFinding:
    """One problem of a cluster, with its remedy."""

    where: str
    """Host name and address of a machine, two machines, or the cluster."""

    problem: str
    remedy: str


def cluster_findings(
    found: Survey, here: MachineFacts, shared: Mapping[str, str], layout: Layout, unit: str
) -> Iterator[ClusterFinding]:
    """All problems found. `here` are the facts of the machine that starts the run, `shared` maps each shared folder to
    its field, and `layout` is the run's, in units of GPUs or slots (`unit`).
    """
    for machine in found.machines:
        if machine.facts is None:
            yield ClusterFinding(
                where=machine.name,
                problem=f"no answer: {machine.problem}",
                remedy="start Ray there in an environment that has skyrl; Ray's logs there say more",
            )
        else:
            yield from _of_versions(machine, machine.facts, here)
            yield from _of_paths(machine, machine.facts, shared)
            yield from _of_hardware(machine, machine.facts)
    yield from _of_links(found)
    yield from _of_room(found, layout, unit)


def _of_versions(machine: Surveyed, facts: MachineFacts, here: MachineFacts) -> Iterator[ClusterFinding]:
    for name, ours in here.versions.items():
        theirs = facts.versions.get(name)
        if theirs == ours:
            continue
        if name == "skyrl's code":
            problem, remedy = (
                "its code of skyrl is not that of this machine",
                "install the same checkout on all machines",
            )
        elif theirs is None:
            problem, remedy = f"{name} is not installed, here it is {ours}", f"install {name} {ours} there"
        else:
            problem, remedy = f"{name} is {theirs}, here it is {ours}", f"install {name} {ours} there"
        yield ClusterFinding(where=machine.name, problem=problem, remedy=remedy)


def _of_paths(machine: Surveyed, facts: MachineFacts, shared: Mapping[str, str]) -> Iterator[ClusterFinding]:
    for folder in machine.unshared:
        yield ClusterFinding(
            where=machine.name,
            problem=f"{shared[folder]}: a file that this machine writes to {folder} is not there",
            remedy="mount one disk under this path on all machines, or name a folder on such a disk",
        )
    for path in facts.lacking:
        if path not in machine.unshared:
            yield ClusterFinding(
                where=machine.name,
                problem=f"{path} cannot be read",
                remedy="put it on a disk that all machines mount, or copy it there under the same path",
            )
    for folder in facts.unwritable:
        if folder not in machine.unshared:
            remedy = f"let the user that Ray runs as write to {folder}"
            yield ClusterFinding(where=machine.name, problem=f"{folder} cannot be written to", remedy=remedy)


def _of_hardware(machine: Surveyed, facts: MachineFacts) -> Iterator[ClusterFinding]:
    if machine.clock is not None and abs(machine.clock) > CLOCK_SECONDS:
        which = "ahead of" if machine.clock > 0 else "behind"
        problem = f"its clock is {abs(machine.clock):.1f} s {which} that of this machine"
        yield ClusterFinding(where=machine.name, problem=problem, remedy="let NTP or chrony set the clocks")
    if facts.memory < LEAST_FREE * facts.total_memory:
        problem = f"{_gib(facts.memory)} of {_gib(facts.total_memory)} memory are free"
        yield ClusterFinding(where=machine.name, problem=problem, remedy="end what else runs there")
    if facts.gpu_problem:
        problem = f"nvidia-smi fails: {facts.gpu_problem}"
        yield ClusterFinding(where=machine.name, problem=problem, remedy="take the machine out, or restart its driver")
    elif machine.gpus > len(facts.gpus):
        problem = f"Ray deals out {machine.gpus:g} GPUs, and nvidia-smi shows {len(facts.gpus)}"
        yield ClusterFinding(where=machine.name, problem=problem, remedy="look at the GPUs, then start Ray there anew")
    for gpu in facts.gpus:
        if gpu.uncorrected_errors:
            problem = f"GPU {gpu.index} ({gpu.name}) has had {gpu.uncorrected_errors} uncorrected memory errors"
            yield ClusterFinding(where=machine.name, problem=problem, remedy="reset the GPU, or take the machine out")


def _of_links(found: Survey) -> Iterator[ClusterFinding]:
    names = {machine.address: machine.name for machine in found.machines}
    rates = [link.bandwidth for link in found.links.values() if link.bandwidth]
    usual = median(rates) if len(rates) > 2 else 0.0
    for (one, other), link in found.links.items():
        where = f"{names[one]} to {names[other]}"
        if link.problem:
            yield ClusterFinding(
                where=where,
                problem=f"no connection: {link.problem}",
                remedy="open all TCP ports between the machines: ranks meet at ports that the kernel chooses",
            )
        elif link.latency is not None and link.latency > LATENCY_SECONDS:
            problem = f"{1e3 * link.latency:.1f} ms there and back"
            yield ClusterFinding(where=where, problem=problem, remedy="keep ranks of one model on near machines")
        elif link.bandwidth is not None and link.bandwidth < _SLOW * usual:
            problem = f"{link.bandwidth / 1e6:,.0f} MB/s, and {usual / 1e6:,.0f} MB/s are usual here"
            yield ClusterFinding(where=where, problem=problem, remedy="look at the network of these machines")


def _of_room(found: Survey, layout: Layout, unit: str) -> Iterator[ClusterFinding]:
    """A finding if the run does not fit on the cluster, assuming that nothing else runs there."""
    nodes = [Node(id=each.name, gpus=int(each.gpus if unit == "GPU" else each.slots)) for each in found.machines]
    try:
        assign(layout, nodes, unit=unit)
    except NoRoom as refusal:
        remedy = "add machines, or make the run smaller (skyrl plan)"
        yield ClusterFinding(where="the cluster", problem=f"the run does not fit: {refusal}", remedy=remedy)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

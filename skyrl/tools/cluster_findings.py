"""Findings about a cluster for one run: machine, problem and remedy, derived from the data of `ray_survey`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from attrs import frozen

from skyrl.planning.layout import ClusterNode, Layout, NoRoom, assign
from skyrl.processes.machine_facts import MachineFacts
from skyrl.processes.ray.survey import Survey, Surveyed

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
    survey: Survey, local_facts: MachineFacts, shared: Mapping[str, str], layout: Layout, unit: str
) -> Iterator[ClusterFinding]:
    """All problems found. `local_facts` are those of the machine that starts the run, `shared` maps each shared folder
    to its field, and `layout` is the run's, in units of GPUs or slots (`unit`).
    """
    for machine in survey.machines:
        if machine.facts is None:
            yield ClusterFinding(
                where=machine.name,
                problem=f"no answer: {machine.problem}",
                remedy="start Ray there in an environment with skyrl installed; see Ray's logs there for details",
            )
        else:
            yield from _version_findings(machine, machine.facts, local_facts)
            yield from _path_findings(machine, machine.facts, shared)
            yield from _hardware_findings(machine, machine.facts)
    yield from _link_findings(survey)
    yield from _capacity_findings(survey, layout, unit)


def _version_findings(machine: Surveyed, facts: MachineFacts, local_facts: MachineFacts) -> Iterator[ClusterFinding]:
    for name, local in local_facts.versions.items():
        remote = facts.versions.get(name)
        if remote == local:
            continue
        if name == "skyrl's code":
            problem, remedy = (
                "its skyrl code differs from this machine's",
                "install the same checkout on all machines",
            )
        elif remote is None:
            problem, remedy = f"{name} is not installed; this machine has {local}", f"install {name} {local} there"
        else:
            problem, remedy = f"{name} is {remote}; this machine has {local}", f"install {name} {local} there"
        yield ClusterFinding(where=machine.name, problem=problem, remedy=remedy)


def _path_findings(machine: Surveyed, facts: MachineFacts, shared: Mapping[str, str]) -> Iterator[ClusterFinding]:
    for folder in machine.unshared:
        yield ClusterFinding(
            where=machine.name,
            problem=f"{shared[folder]}: a file written to {folder} on this machine does not appear there",
            remedy="mount the same disk at this path on all machines, or set the field to a folder on a shared disk",
        )
    for path in facts.lacking:
        if path not in machine.unshared:
            yield ClusterFinding(
                where=machine.name,
                problem=f"{path} cannot be read",
                remedy="put it on a shared disk, or copy it to the same path there",
            )
    for folder in facts.unwritable:
        if folder not in machine.unshared:
            remedy = f"give the user that Ray runs as write access to {folder}"
            yield ClusterFinding(where=machine.name, problem=f"{folder} cannot be written to", remedy=remedy)


def _hardware_findings(machine: Surveyed, facts: MachineFacts) -> Iterator[ClusterFinding]:
    if machine.clock is not None and abs(machine.clock) > CLOCK_SECONDS:
        which = "ahead of" if machine.clock > 0 else "behind"
        problem = f"its clock is {abs(machine.clock):.1f} s {which} this machine's"
        yield ClusterFinding(where=machine.name, problem=problem, remedy="synchronize the clocks with NTP or chrony")
    if facts.memory < LEAST_FREE * facts.total_memory:
        problem = f"only {_gib(facts.memory)} of {_gib(facts.total_memory)} of memory is free"
        yield ClusterFinding(where=machine.name, problem=problem, remedy="stop other processes there")
    if facts.gpu_problem:
        problem = f"nvidia-smi failed: {facts.gpu_problem}"
        yield ClusterFinding(
            where=machine.name, problem=problem, remedy="restart its driver, or remove the machine from the cluster"
        )
    elif machine.gpus > len(facts.gpus):
        problem = f"Ray manages {machine.gpus:g} GPUs, but nvidia-smi shows {len(facts.gpus)}"
        yield ClusterFinding(where=machine.name, problem=problem, remedy="check the GPUs, then restart Ray there")
    for gpu in facts.gpus:
        if gpu.uncorrected_errors:
            problem = f"GPU {gpu.index} ({gpu.name}) has had {gpu.uncorrected_errors} uncorrected memory errors"
            yield ClusterFinding(
                where=machine.name, problem=problem, remedy="reset the GPU, or remove the machine from the cluster"
            )


def _link_findings(survey: Survey) -> Iterator[ClusterFinding]:
    names = {machine.address: machine.name for machine in survey.machines}
    rates = [link.bandwidth for link in survey.links.values() if link.bandwidth]
    usual = median(rates) if len(rates) > 2 else 0.0
    for (one, other), link in survey.links.items():
        where = f"{names[one]} to {names[other]}"
        if link.problem:
            yield ClusterFinding(
                where=where,
                problem=f"no connection: {link.problem}",
                remedy="open all TCP ports between the machines: ranks connect on ports that the kernel assigns",
            )
        elif link.latency is not None and link.latency > LATENCY_SECONDS:
            problem = f"a round trip takes {1e3 * link.latency:.1f} ms"
            yield ClusterFinding(
                where=where,
                problem=problem,
                remedy="place the ranks of a model on machines that are close to each other",
            )
        elif link.bandwidth is not None and link.bandwidth < _SLOW * usual:
            problem = f"{link.bandwidth / 1e6:,.0f} MB/s; the median in this cluster is {usual / 1e6:,.0f} MB/s"
            yield ClusterFinding(where=where, problem=problem, remedy="check the network between these machines")


def _capacity_findings(survey: Survey, layout: Layout, unit: str) -> Iterator[ClusterFinding]:
    """A finding if the run does not fit on the cluster, assuming that nothing else runs there."""
    nodes = [
        ClusterNode(id=machine.name, gpus=int(machine.gpus if unit == "GPU" else machine.slots))
        for machine in survey.machines
    ]
    try:
        assign(layout, nodes, unit=unit)
    except NoRoom as refusal:
        remedy = "add machines, or make the run smaller (skyrl plan)"
        yield ClusterFinding(where="the cluster", problem=f"the run does not fit: {refusal}", remedy=remedy)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

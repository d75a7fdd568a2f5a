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


@frozen
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
        for problem, remedy in _machine_findings(machine, local_facts, shared):
            yield ClusterFinding(machine.name, problem, remedy)
    yield from _link_findings(survey)
    # Whether the run fits on the cluster, assuming that nothing else runs there.
    nodes = [
        ClusterNode(id=machine.name, gpus=int(machine.gpus if unit == "GPU" else machine.slots))
        for machine in survey.machines
    ]
    try:
        assign(layout, nodes, unit=unit)
    except NoRoom as refusal:
        remedy = "add machines, or make the run smaller (skyrl plan)"
        yield ClusterFinding("the cluster", f"the run does not fit: {refusal}", remedy)


def _machine_findings(
    machine: Surveyed, local_facts: MachineFacts, shared: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Problems of one machine, each with its remedy."""
    facts = machine.facts
    if facts is None:
        remedy = "start Ray there in an environment with skyrl installed; see Ray's logs there for details"
        yield f"no answer: {machine.problem}", remedy
        return
    for name, local in local_facts.versions.items():
        remote = facts.versions.get(name)
        if remote == local:
            continue
        if name == "skyrl's code":
            yield "its skyrl code differs from this machine's", "install the same checkout on all machines"
        else:
            there = "is not installed" if remote is None else f"is {remote}"
            yield f"{name} {there}; this machine has {local}", f"install {name} {local} there"
    for folder in machine.unshared:
        problem = f"{shared[folder]}: a file written to {folder} on this machine does not appear there"
        remedy = "mount the same disk at this path on all machines, or set the field to a folder on a shared disk"
        yield problem, remedy
    for path in facts.lacking:
        if path not in machine.unshared:
            yield f"{path} cannot be read", "put it on a shared disk, or copy it to the same path there"
    for folder in facts.unwritable:
        if folder not in machine.unshared:
            remedy = f"give the user that Ray runs as write access to {folder}"
            yield f"{folder} cannot be written to", remedy
    if machine.clock is not None and abs(machine.clock) > CLOCK_SECONDS:
        which = "ahead of" if machine.clock > 0 else "behind"
        problem = f"its clock is {abs(machine.clock):.1f} s {which} this machine's"
        yield problem, "synchronize the clocks with NTP or chrony"
    if facts.memory < LEAST_FREE * facts.total_memory:
        problem = f"only {_gib(facts.memory)} of {_gib(facts.total_memory)} of memory is free"
        yield problem, "stop other processes there"
    if facts.gpu_problem:
        yield f"nvidia-smi failed: {facts.gpu_problem}", "restart its driver, or remove the machine from the cluster"
    elif machine.gpus > len(facts.gpus):
        problem = f"Ray manages {machine.gpus:g} GPUs, but nvidia-smi shows {len(facts.gpus)}"
        yield problem, "check the GPUs, then restart Ray there"
    for gpu in facts.gpus:
        if gpu.uncorrected_errors:
            problem = f"GPU {gpu.index} ({gpu.name}) has had {gpu.uncorrected_errors} uncorrected memory errors"
            yield problem, "reset the GPU, or remove the machine from the cluster"


def _link_findings(survey: Survey) -> Iterator[ClusterFinding]:
    names = {machine.address: machine.name for machine in survey.machines}
    rates = [link.bandwidth for link in survey.links.values() if link.bandwidth]
    usual = median(rates) if len(rates) > 2 else 0.0
    for (one, other), link in survey.links.items():
        where = f"{names[one]} to {names[other]}"
        if link.problem:
            remedy = "open all TCP ports between the machines: ranks connect on ports that the kernel assigns"
            yield ClusterFinding(where, f"no connection: {link.problem}", remedy)
        elif link.latency is not None and link.latency > LATENCY_SECONDS:
            remedy = "place the ranks of a model on machines that are close to each other"
            yield ClusterFinding(where, f"a round trip takes {1e3 * link.latency:.1f} ms", remedy)
        elif link.bandwidth is not None and link.bandwidth < _SLOW * usual:
            problem = f"{link.bandwidth / 1e6:,.0f} MB/s; the median in this cluster is {usual / 1e6:,.0f} MB/s"
            yield ClusterFinding(where, problem, "check the network between these machines")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

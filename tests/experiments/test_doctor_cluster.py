"""`skyrl doctor --cluster`: what is wrong with a cluster is found, with the machine and what to do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.cli.main import main
from skyrl.planning.layout import Layout, Pool
from skyrl.processes.machine_facts import GpuFacts, MachineFacts
from skyrl.processes.ray.survey import EACH_PAIR, Link, Survey, Surveyed, pairs
from skyrl.tools.cluster_findings import cluster_findings
from tests.machines import RAY_PORTS, ROOT, Machines
from tests.nano_run import as_words, overrides

FACTS = MachineFacts(
    host="beta",
    versions={"python": "3.11.7", "torch": "2.13.0", "skyrl's code": "ab12"},
    memory=50 << 30,
    total_memory=64 << 30,
    gpus=[GpuFacts(index="0", name="L40S", uncorrected_errors=0)],
    gpu_problem="",
    lacking=[],
    unwritable=[],
)
ALPHA = Surveyed(address="10.0.0.1", slots=0, gpus=1, facts=evolve(FACTS, host="alpha"), clock=0.0)
BETA = Surveyed(address="10.0.0.2", slots=0, gpus=1, facts=FACTS, clock=0.0)
GOOD = Link(latency=1e-4, bandwidth=1e9)


def found(
    beta: Surveyed = BETA,
    links: Mapping[tuple[str, str], Link] | None = None,
    needed: int = 1,
    **facts: Any,
) -> list[tuple[str, str]]:
    """Place and words of everything that is wrong with alpha and beta."""
    if facts:
        beta = evolve(beta, facts=evolve(FACTS, **facts))
    both = {("10.0.0.1", "10.0.0.2"): GOOD, ("10.0.0.2", "10.0.0.1"): GOOD}
    survey = Survey(machines=[ALPHA, beta], links=both if links is None else links)
    layout = Layout(pools=(Pool(name="policy", nodes=2, gpus_per_node=needed),), placements=())
    shared = {"/data": "trainer.run_path"}
    return [(finding.where, finding.problem) for finding in cluster_findings(survey, FACTS, shared, layout, "GPU")]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"versions": {**FACTS.versions, "torch": "2.12.0"}}, "torch is 2.12.0; this machine has 2.13.0"),
        ({"versions": {"python": "3.11.7", "skyrl's code": "ab12"}}, "torch is not installed; this machine has 2.13.0"),
        ({"versions": {**FACTS.versions, "skyrl's code": "cd34"}}, "its skyrl code differs from this machine's"),
        ({"lacking": ["/models/qwen"]}, "/models/qwen cannot be read"),
        ({"unwritable": ["/data"]}, "/data cannot be written to"),
        ({"memory": 1 << 30}, "only 1.0 GiB of 64.0 GiB of memory is free"),
        ({"gpus": [], "gpu_problem": "no device"}, "nvidia-smi failed: no device"),
        ({"gpus": []}, "Ray manages 1 GPUs, but nvidia-smi shows 0"),
        (
            {"gpus": [evolve(FACTS.gpus[0], uncorrected_errors=2)]},
            "GPU 0 (L40S) has had 2 uncorrected memory errors",
        ),
    ],
)
def test_what_a_machine_has_is_compared(facts: dict[str, Any], problem: str) -> None:
    assert found(**facts) == [("beta (10.0.0.2)", problem)]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"clock": 7.04}, ("beta (10.0.0.2)", "its clock is 7.0 s ahead of this machine's")),
        ({"clock": -90.0}, ("beta (10.0.0.2)", "its clock is 90.0 s behind this machine's")),
        (
            {"unshared": ["/data"]},
            ("beta (10.0.0.2)", "trainer.run_path: a file written to /data on this machine does not appear there"),
        ),
        ({"facts": None, "problem": "it did not answer in time"}, ("10.0.0.2", "no answer: it did not answer in time")),
    ],
)
def test_clocks_and_folders_are_those_of_this_machine(changes: dict[str, Any], finding: tuple[str, str]) -> None:
    assert found(evolve(BETA, **changes)) == [finding]


def test_ways_between_machines_are_judged_each_in_its_direction() -> None:
    forward, back = ("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1")
    assert found(links={forward: GOOD, back: Link(problem="timed out")}) == [
        ("beta (10.0.0.2) to alpha (10.0.0.1)", "no connection: timed out")
    ]
    assert found(links={forward: Link(latency=0.05, bandwidth=1e9), back: GOOD}) == [
        ("alpha (10.0.0.1) to beta (10.0.0.2)", "a round trip takes 50.0 ms")
    ]
    gamma = evolve(BETA, address="10.0.0.3", facts=evolve(FACTS, host="gamma"))
    links = dict.fromkeys(pairs(["10.0.0.1", "10.0.0.2", "10.0.0.3"]), GOOD)
    links["10.0.0.1", "10.0.0.3"] = Link(latency=1e-4, bandwidth=2e8)
    survey = Survey(machines=[ALPHA, BETA, gamma], links=links)
    [slow] = cluster_findings(survey, FACTS, {}, Layout(pools=(), placements=()), "GPU")
    assert (slow.where, slow.problem) == (
        "alpha (10.0.0.1) to gamma (10.0.0.3)",
        "200 MB/s; the median in this cluster is 1,000 MB/s",
    )


def test_a_run_that_is_larger_than_the_cluster_is_said() -> None:
    [(where, problem)] = found(needed=2)
    assert where == "the cluster"
    assert problem.startswith("the run does not fit: policy needs 2 nodes with 2 free GPUs, the cluster has 0")


def test_of_many_machines_each_is_measured_with_its_neighbours() -> None:
    assert sorted(pairs(["a", "b"])) == [("a", "b"), ("b", "a")]
    many = [str(number) for number in range(EACH_PAIR + 1)]
    assert len(set(pairs(many))) == 2 * len(many)


def test_a_run_without_a_cluster_is_told_how_to_name_one(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--cluster", *as_words(overrides(nano, tmp_path))])
    assert end.value.code == 2
    assert "set trainer.placement.ray_address = host:port" in capsys.readouterr().err


PLANTED = """
import importlib.metadata, time
real, now = importlib.metadata.version, time.time
importlib.metadata.version = lambda name: "1.0" if name == "transformers" else real(name)
time.time = lambda: now() + 3600
"""


@pytest.mark.long
@pytest.mark.machines
@pytest.mark.parametrize("planted", [False, True])
def test_mistakes_on_another_machine_are_found_and_no_others(nano: Path, tmp_path: Path, planted: bool) -> None:
    """Another version, a clock that is an hour ahead, a folder of its own, and ports that are closed."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(PLANTED)
    values = overrides(nano, tmp_path / "runs") | {
        "trainer.placement.executor": "ray",
        "trainer.placement.colocate_all": False,
    }
    with Machines("alpha", "beta") as machines:
        machines.join_ray(machines["alpha"])
        own_disk = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tmp_path / "runs")] if planted else []
        path = {"PYTHONPATH": f"{tmp_path / 'other'}:{ROOT}"} if planted else {}
        machines.join_ray(machines["beta"], inside=own_disk, variables=path)
        if planted:
            machines.network(closed=[[RAY_PORTS[1] + 1, 65535]])
        words = as_words(values | {"trainer.placement.ray_address": machines.head})
        output_file = tmp_path / "said.txt"
        doctor = machines["alpha"].start(
            [sys.executable, "-m", "skyrl.cli", "doctor", "--cluster", *words], output_file
        )
        assert doctor.wait(240) == int(planted), output_file.read_text()
    text = output_file.read_text()
    if not planted:
        assert "No problems found." in text
        return
    assert "5 findings" in text, text
    for line in (
        "beta (10.77.0.2): transformers is 1.0; this machine has ",
        "beta (10.77.0.2): its clock is 3600.0 s ahead of this machine's",
        f"beta (10.77.0.2): trainer.run_path: a file written to {tmp_path / 'runs'} on this machine does not appear",
        "alpha (10.77.0.1) to beta (10.77.0.2): no connection: timed out",
        "beta (10.77.0.2) to alpha (10.77.0.1): no connection: timed out",
    ):
        assert line in text, text

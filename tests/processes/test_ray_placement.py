"""Machines with eight GPUs each that are all this one: what Ray reserves is what `planning` says."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from skyrl.errors import NoRoomError, ProcessError
from skyrl.planning.layout import ClusterNode, Layout, Pool, RankPlacement, assign, layout, layout_of_engine
from skyrl.planning.topology import EngineSizes, Grid, Sizes
from skyrl.processes.handles import Deadlines
from skyrl.processes.orphans import kill_tagged
from skyrl.processes.ray import cluster as ray_cluster
from skyrl.processes.ray.placement import Placement
from skyrl.processes.ray.processes import RayProcesses
from tests.processes.clusters import lives, soon
from tests.processes.conftest import SharedCluster
from tests.processes.objects import Counter

pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).parents[2]
MARK = "SKYRL_TEST_CLUSTER"
_nodes: Any = ray.nodes
_available: Any = ray.available_resources

LAYOUTS: dict[str, Callable[[int], Sizes]] = {
    "all on the same GPUs": lambda machines: Sizes(
        models={"policy": Grid(nodes=machines, gpus_per_node=8), "ref": Grid(nodes=machines, gpus_per_node=8)},
        engines=EngineSizes(number=2 * machines, tensor=4),
    ),
    "policy and reference on the same GPUs": lambda machines: Sizes(
        models={
            "policy": Grid(nodes=machines // 2, gpus_per_node=8),
            "ref": Grid(nodes=machines // 2, gpus_per_node=8),
        },
        engines=EngineSizes(number=machines, tensor=4),
        colocate_all=False,
    ),
    "every model on its own GPUs": lambda machines: Sizes(
        models={
            "policy": Grid(nodes=machines // 2, gpus_per_node=4),
            "critic": Grid(nodes=machines // 2, gpus_per_node=4),
            "ref": Grid(nodes=machines // 2, gpus_per_node=4),
        },
        engines=EngineSizes(number=machines // 2, tensor=4),
        colocate_all=False,
        colocate_policy_ref=False,
    ),
}


@pytest.fixture(scope="module", params=[2, pytest.param(8, marks=pytest.mark.long)])
def machines(request: pytest.FixtureRequest) -> int:
    """Number of machines of the cluster."""
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def address(shared_cluster: SharedCluster, machines: int) -> Iterator[str]:
    """Address of a cluster without authentication, which this process is not connected to."""
    shared_cluster.end()
    folder = Path(tempfile.mkdtemp(prefix="skyrl-fake-", dir="/tmp"))
    machine = {"num_cpus": 0, "num_gpus": 8, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv(MARK, str(folder))
        ray_cluster._read_token_again()
        try:
            cluster = Cluster(
                initialize_head=True,
                head_node_args={**machine, "include_dashboard": False, "no_monitor": True},
            )
            for _ in range(machines - 1):
                cluster.add_node(wait=False, **machine)
            cluster.wait_for_nodes()
            patch.delenv(MARK)
            patch.delenv("RAY_TMPDIR")
            yield cluster.address
            cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray
        finally:
            kill_tagged(MARK, str(folder), folder)
            shutil.rmtree(folder)
    ray_cluster._read_token_again()


@pytest.fixture
def attached(address: str) -> Iterator[None]:
    cluster = ray_cluster.attach(address, 60)
    yield
    cluster.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_process_is_where_the_plan_says(attached: None, machines: int, name: str) -> None:
    planned = layout(LAYOUTS[name](machines))
    by_port = sorted(_nodes(), key=lambda node: node["NodeManagerPort"])  # their addresses are all the same
    expected = assign(planned, [ClusterNode(id=node["NodeID"], gpus=8) for node in by_port])
    placement = Placement(planned, "cuda", 120)
    locations = {(placed.role, placed.rank): placement.place(placed) for placed in planned.placements}
    assert {key: location.node for key, location in locations.items()} == {
        (placed.role, placed.rank): expected[placed.pool][planned.places(placed)[0][0]] for placed in planned.placements
    }
    for role in ("policy", "critic", "ref"):  # ranks are counted by (machine, GPU)
        placements = planned.placements_of(role)
        dealt = [(locations[role, placed.rank], expected[placed.pool]) for placed in placements]
        numbers = [(nodes.index(location.node), int(location.gpus[0])) for location, nodes in dealt]
        assert numbers == sorted(set(numbers))
    used = {pool.name: set[tuple[str, str]]() for pool in planned.pools}
    for placed in planned.placements:
        location = locations[placed.role, placed.rank]
        used[placed.pool] |= {(location.node, gpu) for gpu in location.gpus}
    assert len(set().union(*used.values())) == sum(len(gpus) for gpus in used.values()) == planned.gpus
    placement.remove()
    assert soon(lambda: sum(node.gpus for node in placement.free()) == 8 * machines)


@pytest.mark.long
def test_a_pool_is_added_where_there_is_room_and_given_back(attached: None, machines: int) -> None:
    placement = Placement(
        layout(Sizes(models={"policy": Grid(nodes=machines, gpus_per_node=6)}, colocate_all=False)), "cuda", 120
    )
    engine_layout = layout_of_engine(EngineSizes(number=1, tensor=2), 7, 8)
    placement.add(engine_layout, 60)
    location = placement.place(engine_layout.placements[0])
    assert location.gpus == ("6", "7")
    assert sum(node.gpus for node in placement.free()) == 2 * (machines - 1)
    with pytest.raises(NoRoomError, match="engine-8 needs 1 node with 8 free GPUs") as refused:
        placement.add(layout_of_engine(EngineSizes(number=1, tensor=8), 8, 8), 60)
    assert refused.value.pool == "engine-8"
    placement.give_back("engine", 7)
    assert soon(lambda: sum(node.gpus for node in placement.free()) == 2 * machines)
    placement.remove()
    assert soon(lambda: sum(node.gpus for node in placement.free()) == 8 * machines)


@pytest.mark.long
def test_what_does_not_fit_is_refused_before_anything_is_reserved(attached: None, machines: int) -> None:
    more = machines + 1
    planned = layout(
        Sizes(models={"policy": Grid(nodes=more, gpus_per_node=8)}, engines=EngineSizes(number=2 * more, tensor=4))
    )
    message = rf"does not fit .*needs {more} nodes with 8 free GPUs, the cluster has {machines}"
    with pytest.raises(ProcessError, match=message):
        Placement(planned, "cuda", 60)
    assert ray.util.placement_group_table() == {} or all(
        group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
    )


@pytest.mark.long
async def test_a_run_on_a_running_cluster_leaves_the_cluster_and_takes_its_own(
    address: str, machines: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    placements = (
        RankPlacement(role="policy", rank=0, pool="few", gpus=(1,)),
        RankPlacement(role="engine", rank=0, pool="few", gpus=(2, 3)),
    )
    planned = Layout(pools=(Pool(name="few", nodes=2, gpus_per_node=2),), placements=placements)
    deadlines = Deadlines(start=120, call=60, heartbeat=30)
    with RayProcesses(planned, deadlines=deadlines, address=address, logs=tmp_path, device="cuda") as processes:
        policy = processes.start("policy", [Counter])
        engine = processes.start("engine", [partial(Counter, 1)])
        assert await engine.call(Counter.add, 1) == [2]
        gpus = [await group.call(Counter.environment, "CUDA_VISIBLE_DEVICES") for group in (policy, engine)]
        assert gpus == [["1"], ["0,1"]]
        pids = [*(await policy.call(Counter.process)), *(await engine.call(Counter.process))]
        assert processes.where["policy", 0].node != processes.where["engine", 0].node
    assert soon(lambda: not any(lives(pid) for pid in pids))
    assert "requires no token" in capfd.readouterr().err
    cluster = ray_cluster.attach(address, 60)
    assert soon(lambda: _available().get("GPU") == 8.0 * machines)
    cluster.close()


@pytest.mark.long
def test_an_address_where_no_cluster_is_ends_in_a_message() -> None:
    code = "from skyrl.processes.ray import cluster; cluster.attach('127.0.0.1:1', 2)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert (
        "ProcessError: No connection to the Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused" in ended.stderr
    )

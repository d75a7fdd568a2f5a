"""Who sits where, in the three arrangements and in odd sizes; and which machines have room."""

from __future__ import annotations

import random
from itertools import product

import pytest

from skyrl.planning.layout import Assignment, ClusterNode, Layout, NoRoom, Pool, assign, layout, on_machines
from skyrl.planning.topology import EngineSizes, Grid, Sizes

EIGHT = Grid(nodes=1, gpus_per_node=8)


def pools(run: Layout) -> list[tuple[str, int, int]]:
    return [(pool.name, pool.nodes, pool.gpus_per_node) for pool in run.pools]


def gpus(run: Layout, role: str) -> list[tuple[int, ...]]:
    return [placed.gpus for placed in run.placements_of(role)]


def cluster(*free: int) -> list[ClusterNode]:
    return [ClusterNode(id=f"node-{letter}", gpus=count) for letter, count in zip("abcdefgh", free, strict=False)]


# Layouts


def test_colocating_all_makes_one_pool_in_which_everybody_has_every_gpu() -> None:
    run = layout(
        Sizes(models={"policy": EIGHT, "critic": EIGHT, "ref": EIGHT}, engines=EngineSizes(number=4, tensor=2))
    )
    assert pools(run) == [("policy+critic+ref+engine", 1, 8)]
    for role in ("policy", "critic", "ref"):
        assert gpus(run, role) == [(rank,) for rank in range(8)]
    assert gpus(run, "engine") == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_colocating_policy_and_reference_gives_each_engine_a_pool() -> None:
    sizes = Sizes(models={"policy": EIGHT, "ref": EIGHT}, engines=EngineSizes(number=2, tensor=4), colocate_all=False)
    assert pools(layout(sizes)) == [("policy+ref", 1, 8), ("engine-0", 1, 4), ("engine-1", 1, 4)]


def test_a_policy_alone_gives_its_name_to_its_pool() -> None:
    run = layout(Sizes(models={"policy": EIGHT}, engines=EngineSizes(number=1), colocate_all=False))
    assert pools(run) == [("policy", 1, 8), ("engine-0", 1, 1)]


def test_without_colocation_every_model_has_its_pool() -> None:
    sizes = Sizes(
        models={
            "policy": Grid(nodes=2, gpus_per_node=8),
            "critic": Grid(nodes=1, gpus_per_node=4),
            "ref": Grid(nodes=1, gpus_per_node=2),
        },
        engines=EngineSizes(number=1, tensor=2),
        colocate_all=False,
        colocate_policy_ref=False,
    )
    run = layout(sizes)
    assert pools(run) == [("policy", 2, 8), ("critic", 1, 4), ("ref", 1, 2), ("engine-0", 1, 2)]
    assert run.gpus == 24
    assert run.places(run.placements_of("policy")[11]) == ((1, 3),)


def test_engines_of_others_have_no_seat() -> None:
    assert layout(Sizes(models={"policy": EIGHT}, colocate_all=False)).placements_of("engine") == ()


@pytest.mark.parametrize(
    ("engines", "gpus_per_node", "pool"),
    [
        (EngineSizes(number=1, tensor=4, pipeline=2), 8, (1, 8)),
        (EngineSizes(number=1, tensor=4, pipeline=2), 4, (2, 4)),  # a node for each pipeline stage
        (EngineSizes(number=1, tensor=2, pipeline=4), 4, (4, 2)),
        (EngineSizes(number=1, tensor=16), 8, (2, 8)),
        (EngineSizes(number=1, tensor=8, pipeline=2, data=2), 8, (4, 8)),
        (EngineSizes(number=1, tensor=6), 4, (2, 3)),
        (EngineSizes(number=1, tensor=5), 4, (5, 1)),
        (EngineSizes(number=1, tensor=4, pipeline=2, on_one_node=True), 4, (1, 8)),
    ],
)
def test_an_engine_that_does_not_fit_a_node_has_equal_parts_of_several(
    engines: EngineSizes, gpus_per_node: int, pool: tuple[int, int]
) -> None:
    run = layout(Sizes(models={"policy": EIGHT}, engines=engines, colocate_all=False, gpus_per_node=gpus_per_node))
    assert pools(run)[1:] == [("engine-0", *pool)]
    assert gpus(run, "engine") == [tuple(range(engines.gpus))]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_a_shared_engine_never_has_parts_of_two_nodes_unless_it_must(size: int) -> None:
    grid = Grid(nodes=4, gpus_per_node=8)
    run = layout(Sizes(models={"policy": grid}, engines=EngineSizes(number=32 // size, tensor=size)))
    for placed in run.placements_of("engine"):
        assert len({node for node, _ in run.places(placed)}) == max(1, size // 8)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(models={"policy": EIGHT, "ref": Grid(nodes=2, gpus_per_node=4)}),
        Sizes(models={"policy": EIGHT, "critic": Grid(nodes=1, gpus_per_node=4)}, colocate_all=False),
        Sizes(models={"policy": EIGHT}, engines=EngineSizes(number=3, tensor=2)),
    ],
)
def test_models_that_share_gpus_and_do_not_match_are_refused(sizes: Sizes) -> None:
    with pytest.raises(ValueError, match="GPUs"):
        layout(sizes)


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        (Sizes(models={"policy": EIGHT}), 1.0),
        (Sizes(models={"policy": EIGHT, "ref": EIGHT}), 0.5),
        (Sizes(models={"policy": EIGHT, "ref": EIGHT}, engines=EngineSizes(number=8)), 0.3333),
        (Sizes(models={"policy": EIGHT, "critic": EIGHT, "ref": EIGHT}, engines=EngineSizes(number=1, data=8)), 0.25),
    ],
)
def test_those_who_share_a_gpu_all_have_room_on_it(sizes: Sizes, share: float) -> None:
    run = layout(sizes)
    assert run.share(run.pools[0].name) == share


def test_every_gpu_of_a_pool_is_used_by_every_role_in_it_once() -> None:
    for nodes, per_node, share_all, share_some in product((1, 2, 3), (1, 4, 6), (True, False), (True, False)):
        grid = Grid(nodes=nodes, gpus_per_node=per_node)
        engines = EngineSizes(number=nodes * per_node)
        run = layout(
            Sizes(
                models={"policy": grid, "ref": grid},
                engines=engines,
                colocate_all=share_all,
                colocate_policy_ref=share_some,
            )
        )
        for pool in run.pools:
            for role in {placed.role for placed in run.placements if placed.pool == pool.name}:
                used = [gpu for placed in run.placements_of(role) if placed.pool == pool.name for gpu in placed.gpus]
                assert used == list(range(pool.gpus))


# Machines


def test_several_pools_share_a_machine() -> None:
    run = layout(
        Sizes(models={"policy": Grid(nodes=1, gpus_per_node=4)}, engines=EngineSizes(number=4), colocate_all=False)
    )
    assert set(assign(run, cluster(8)).values()) == {("node-a",)}


def test_engines_are_packed_so_that_whole_machines_stay_free() -> None:
    sizes = Sizes(
        models={"policy": Grid(nodes=2, gpus_per_node=8)}, engines=EngineSizes(number=4, tensor=2), colocate_all=False
    )
    assignment = assign(layout(sizes), cluster(8, 4, 8, 4))
    assert assignment["policy"] == ("node-a", "node-c")
    assert [assignment[f"engine-{number}"] for number in range(4)] == [
        ("node-b",),
        ("node-b",),
        ("node-d",),
        ("node-d",),
    ]


def test_two_wide_pools_leave_each_other_room() -> None:
    # filling up b and c first would leave the second pool a alone
    pair = Layout(pools=tuple(Pool(name=name, nodes=2, gpus_per_node=1) for name in ("first", "second")), placements=())
    assert assign(pair, cluster(2, 1, 1)) == {"first": ("node-a", "node-b"), "second": ("node-a", "node-c")}


def test_the_nodes_of_a_pool_are_different_machines() -> None:
    with pytest.raises(NoRoom):
        assign(layout(Sizes(models={"policy": Grid(nodes=2, gpus_per_node=2)})), cluster(8))


def test_no_room_names_the_missing_gpus() -> None:
    run = layout(Sizes(models={"policy": Grid(nodes=2, gpus_per_node=8)}, colocate_all=False))
    with pytest.raises(NoRoom) as caught:
        assign(run, cluster(8, 4))
    assert str(caught.value) == (
        "policy needs 2 nodes with 8 free GPUs, the cluster has 1 (node-a: 8, node-b: 4); all in all the run needs 16 "
        "GPUs, and 12 are free"
    )
    assert caught.value.pool == Pool(name="policy", nodes=2, gpus_per_node=8)


def test_places_for_processes_are_told_as_what_they_are() -> None:
    with pytest.raises(NoRoom, match="policy needs 1 node with 8 free slots, .* the run needs 8 slots"):
        assign(layout(Sizes(models={"policy": EIGHT})), cluster(4), unit="slot")


def test_pools_on_one_machine_take_its_gpus_one_after_the_other() -> None:
    pair = Grid(nodes=1, gpus_per_node=2)
    run = layout(Sizes(models={"policy": pair}, engines=EngineSizes(number=1, tensor=2), colocate_all=False))
    slots = on_machines(run, assign(run, cluster(8)))
    assert [slots[placed] for placed in run.placements] == [
        (("node-a", 0),),
        (("node-a", 1),),
        (("node-a", 2), ("node-a", 3)),
    ]


def test_no_room_counts_gpus_of_earlier_pools() -> None:
    run = layout(Sizes(models={"policy": EIGHT}, engines=EngineSizes(number=2, tensor=4), colocate_all=False))
    with pytest.raises(NoRoom) as caught:
        assign(run, cluster(8, 7))
    assert str(caught.value) == (
        "engine-1 needs 1 node with 4 free GPUs, the cluster has 0 left (node-a: 0, node-b: 3); all in all the run "
        "needs 16 GPUs, and 15 are free"
    )


def test_a_cluster_of_many_machines_is_not_listed_whole() -> None:
    run = layout(Sizes(models={"policy": EIGHT}))
    with pytest.raises(NoRoom, match="and 92 more"):
        assign(run, [ClusterNode(id=str(number), gpus=4) for number in range(100)])
    with pytest.raises(NoRoom, match="no nodes"):
        assign(run, [])


def fits(run: Layout, nodes: list[ClusterNode]) -> bool:
    """Every way to place the pools, one after the other, on different machines each."""

    def place(left: tuple[Pool, ...], free: tuple[int, ...]) -> bool:
        if not left:
            return True
        pool, rest = left[0], left[1:]
        choices = [
            choice
            for choice in product((0, 1), repeat=len(free))
            if sum(choice) == pool.nodes
            and all(count >= pool.gpus_per_node for count, selected in zip(free, choice, strict=True) if selected)
        ]
        return any(
            place(
                rest, tuple(count - selected * pool.gpus_per_node for count, selected in zip(free, choice, strict=True))
            )
            for choice in choices
        )

    return place(run.pools, tuple(node.gpus for node in nodes))


def keeps_to(assignment: Assignment, run: Layout, nodes: list[ClusterNode]) -> bool:
    """Is no machine overfull, and none named twice by a pool?"""
    used_gpus = dict.fromkeys((node.id for node in nodes), 0)
    for pool in run.pools:
        assert len(set(assignment[pool.name])) == pool.nodes
        for name in assignment[pool.name]:
            used_gpus[name] += pool.gpus_per_node
    return all(used_gpus[node.id] <= node.gpus for node in nodes)


def test_a_place_is_found_exactly_where_there_is_one() -> None:
    rng, answers = random.Random(0), {True: 0, False: 0}
    for _ in range(2_000):
        nodes = cluster(*(rng.choice((1, 2, 4, 8)) for _ in range(rng.randint(1, 4))))
        pools = (
            Pool(name=str(number), nodes=rng.choice((1, 1, 2, 3)), gpus_per_node=rng.choice((1, 2, 4)))
            for number in range(rng.randint(1, 4))
        )
        run = Layout(pools=tuple(pools), placements=())
        possible = fits(run, nodes)
        answers[possible] += 1
        if possible:
            assert keeps_to(assign(run, nodes), run, nodes)
        else:
            with pytest.raises(NoRoom):
                assign(run, nodes)
    assert min(answers.values()) >= 500


@pytest.mark.parametrize("colocate_all", [True, False])
def test_a_thousand_gpus_are_planned_exactly(colocate_all: bool) -> None:
    grid = Grid(nodes=64 + 64 * colocate_all, gpus_per_node=8)
    engines = EngineSizes(number=grid.ranks)
    run = layout(Sizes(models={"policy": grid, "ref": grid}, engines=engines, colocate_all=colocate_all))
    nodes = [ClusterNode(id=str(number), gpus=8) for number in range(128)]
    assert run.gpus == 1024
    assert keeps_to(assign(run, nodes), run, nodes)

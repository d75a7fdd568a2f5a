"""How ranks find each other, and what happens when one does not come."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from skyrl.errors import ProcessError
from skyrl.learners.ranks import Ranks, Rendezvous

CPU = torch.device("cpu")


def test_a_rank_that_waits_in_vain_says_who_it_waited_for() -> None:
    with Rendezvous(timeout=1.0) as rendezvous:
        first, _ = rendezvous.ranks("critic", 2)
        with pytest.raises(ProcessError, match=r"rank 0 of the 2 critic ranks, on \S+, did not meet .* within 1 s"):
            first.join(CPU)
    assert not dist.is_initialized()


def test_a_store_that_is_not_there_is_named() -> None:
    with Rendezvous(timeout=1.0) as rendezvous:
        _, second = rendezvous.ranks("policy", 2)
    with pytest.raises(ProcessError, match=rf"through the store at 127\.0\.0\.1:{rendezvous.address[1]}"):
        second.join(CPU)


def test_a_rendezvous_listens_on_loopback_unless_told_otherwise() -> None:
    with Rendezvous() as rendezvous:
        assert rendezvous.address[0] == "127.0.0.1"


def test_ranks_travel() -> None:
    with Rendezvous() as rendezvous:
        ranks = rendezvous.ranks("ref", 3)
    assert [(rank.rank, rank.size, rank.name) for rank in ranks] == [(0, 3, "ref"), (1, 3, "ref"), (2, 3, "ref")]
    assert pickle.loads(pickle.dumps(ranks)) == ranks


def test_roles_of_one_process_share_its_group_until_the_last_leaves() -> None:
    policy, ref = Ranks(name="policy"), Ranks(name="ref")
    policy.join(CPU)
    ref.join(CPU)
    policy.leave()
    assert dist.is_initialized()
    ref.leave()
    assert not dist.is_initialized()


def test_distributed_tensors_compute_over_the_groups_of_their_own_mesh() -> None:
    """Not over those of an equal mesh that this process had in an earlier group: other ranks would wait for ever."""
    for _ in range(2):
        ranks = Ranks()
        ranks.join(CPU)
        mesh = ranks.mesh(CPU)["shard"]
        spread = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
        doubled: Any = spread + spread
        assert doubled.device_mesh is mesh
        ranks.leave()


def test_hybrid_sharding_needs_groups_of_equal_size() -> None:
    with pytest.raises(ValueError, match="fsdp_size = 3 does not divide 4 ranks"):
        Ranks(size=4).mesh(CPU, shard_size=3)
    with pytest.raises(ValueError, match="fsdp_size = 4 does not divide 2 ranks"):
        Ranks(size=4).mesh(CPU, shard_size=4, tensor=2)


def test_ranks_that_share_a_model_divide_all_ranks() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size = 2 does not divide 1 ranks"):
        Ranks().mesh(CPU, tensor=2)
    with pytest.raises(ValueError, match="sequence x context x tensor parallel size = 8 does not divide 4"):
        Ranks(size=4).row_sharing(sequence=2, context=2, tensor=2)

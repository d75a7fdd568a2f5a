"""How often ranks that cut matrices among them add up what they have, counted on one of two: the other is made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyrl.models.parallel.tensor_parallel import cut
from tests.inference.nano import nano_model

LAYERS = 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")  # to count
def test_gradients_are_summed_once_for_queries_keys_and_values_and_once_for_gate_and_up(mesh: DeviceMesh) -> None:
    model = nano_model()
    cut(model, mesh)
    for _ in range(2):  # nothing is left of the first pass
        with CommDebugMode() as forward:
            logits = model(input_ids=torch.arange(1, 9).unsqueeze(0), use_cache=False).logits
        with CommDebugMode() as backward:
            logits.sum().backward()
        assert summed(forward) == 2 * LAYERS + 1  # and the embeddings
        assert summed(backward) == 2 * LAYERS + 1  # and the input of the head


def summed(counts: CommDebugMode) -> int:
    """Calls of `all_reduce`."""
    return sum(number for operation, number in counts.get_comm_counts().items() if "all_reduce" in str(operation))

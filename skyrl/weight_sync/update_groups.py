"""The learner's end of SGLang's weight updates: a group of processes that it leads, and broadcasts tensors through.

Members of the meeting are the learner's first rank and whoever asks each server; the servers' workers come to the group
that the learner makes, by the routes `init_weights_update_group` and `update_weights_from_distributed`. Digests do not
travel: that every server computes with what was sent is proved by the canary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import frozen
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from skyrl.inference.incoming_weights import weight_info
from skyrl.inference.transfer_group import TransferGroup
from skyrl.inference.vllm_requests import END, Requests
from skyrl.weight_sync.native import free_address
from skyrl.weight_sync.senders import BUCKET_BYTES, Weights, buckets

T = TypeVar("T")

_CONNECT_SECONDS = 60.0
"""Seconds for the servers' workers to come to the group after they were asked to."""

_POLL_SECONDS = 0.05


@frozen(kw_only=True)
class UpdateGroupSender:
    """Sends to servers of SGLang; `skyrl.inference.incoming_weights.UpdateGroup` is the other end."""

    group: TransferGroup
    """The meeting, as the learner's first rank has it; every other member asks one server."""

    workers: int
    """Processes of one server that take weights."""

    backend: str
    """`nccl`, or `gloo`."""

    dtype: str
    """Type to which weights are rounded before they travel."""

    bucket_bytes: int = BUCKET_BYTES
    """Bytes that a server is asked to take at a time."""

    def __call__(self, weights: Weights) -> None:
        """Raises `WeightSyncError` when a server does not come, or does not take what is sent."""
        with ThreadPoolExecutor(1) as asking, self.group.rendezvous() as store:
            servers = range(1, self.group.size)
            requests = Requests(store, receivers=servers, timeout=self.group.timeout)
            with self._led(1 + self.workers * len(servers), asking, requests) as group:
                device = "cuda" if self.backend == "nccl" else "cpu"
                for bucket in buckets(weights, self.dtype, self.bucket_bytes, device=device):
                    infos = [weight_info(name, tensor) for name, tensor in bucket.items()]
                    content = {
                        "names": [info.name for info in infos],
                        "dtypes": [info.dtype for info in infos],
                        "shapes": [list(info.shape) for info in infos],
                    }
                    taking = asking.submit(requests.ask, "update", content)
                    for tensor in bucket.values():
                        _until(dist.broadcast(tensor, src=0, group=group, async_op=True), taking)
                    taking.result()
                requests.ask(END, {})

    @contextmanager
    def _led(self, size: int, asking: ThreadPoolExecutor, requests: Requests) -> Iterator[dist.ProcessGroup]:
        """The group of this process, rank 0, and the servers' workers, once all have come."""
        host, port = free_address(self.group.host)
        patience = timedelta(seconds=min(_CONNECT_SECONDS, self.group.timeout))
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=patience)
        name = self.group.name
        where = {"master_address": host, "master_port": port, "world_size": size, "backend": self.backend}
        coming = asking.submit(requests.ask, "init", {**where, "group_name": name})
        making = _in_the_background(lambda: _group(self.backend, store, name, size, patience))
        futures: list[Future[Any]] = [coming, making]
        wait(futures, return_when=FIRST_EXCEPTION)
        if coming.done():
            coming.result()  # a server that does not join is the cause of a group that is not whole
        group = making.result()
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def _group(backend: str, store: Store, name: str, size: int, patience: timedelta) -> dist.ProcessGroup:
    """Rank 0 of a group beside the learner's own, with the keys that SGLang's workers expect in the store."""
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        size,
        0,
        [],
        c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]  # a NewType that older versions of torch do not have
        timeout=patience,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _in_the_background(call: Callable[[], T]) -> Future[T]:
    """The result of a call that ends by its own deadline, and that nobody has to wait for."""
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            found.set_exception(error)

    Thread(target=work, name="update-group", daemon=True).start()
    return found


def _until(sending: dist.Work | None, taking: Future[None]) -> None:
    """Returns when a broadcast is done. Raises why nobody takes it."""
    assert sending is not None, "the learner is in the group"
    while not sending.is_completed():
        if taking.done():
            taking.result()
            break
        try:
            taking.result(_POLL_SECONDS)
        except TimeoutError:
            continue
    sending.wait()

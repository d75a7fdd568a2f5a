"""The learner's end of SGLang's weight updates: a process group that it leads and through which it broadcasts tensors.

Members of the transfer group are the learner's first rank and, for each server, the process that sends requests to it.
The servers' workers join the process group that the learner creates, by the routes `init_weights_update_group` and
`update_weights_from_distributed`. Digests are not sent: the canary proves that every server computes with the weights
that were sent.
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

from skyrl.weight_receiver.incoming_weights import weight_info
from skyrl.weight_receiver.transfer_group import END, RequestSender, TransferGroup
from skyrl.weight_sync.senders import BUCKET_BYTES, Weights, buckets
from skyrl.weight_sync.vllm_native import free_address

T = TypeVar("T")

_CONNECT_SECONDS = 60.0
"""Number of seconds in which the servers' workers must join the group after they were asked to."""

_POLL_SECONDS = 0.05


@frozen(kw_only=True)
class SGLangGroupSender:
    """Sends to servers of SGLang; `skyrl.weight_receiver.incoming_weights.SGLangGroupWeights` is the other end."""

    group: TransferGroup
    """The transfer group, with the rank of the learner's first process; every other member sends requests to one
    server."""

    workers: int
    """Number of processes of one server that receive weights."""

    backend: str
    """`nccl`, or `gloo`."""

    dtype: str
    """Dtype to which weights are rounded before they are sent."""

    bucket_bytes: int = BUCKET_BYTES
    """Number of bytes that a server is asked to receive at a time."""

    def __call__(self, weights: Weights) -> None:
        """Send the weights. Raises `WeightSyncError` if a server does not join, or refuses the weights."""
        with ThreadPoolExecutor(1) as asking, self.group.rendezvous() as store:
            servers = range(1, self.group.size)
            requests = RequestSender(store, receivers=servers, timeout=self.group.timeout)
            with self._led(1 + self.workers * len(servers), asking, requests) as group:
                device = "cuda" if self.backend == "nccl" else "cpu"
                for bucket in buckets(weights, self.dtype, self.bucket_bytes, device=device):
                    infos = [weight_info(name, tensor) for name, tensor in bucket.items()]
                    content = {
                        "names": [info.name for info in infos],
                        "dtypes": [info.dtype for info in infos],
                        "shapes": [list(info.shape) for info in infos],
                    }
                    taking = asking.submit(requests.send, "update", content)
                    for tensor in bucket.values():
                        _until(dist.broadcast(tensor, src=0, group=group, async_op=True), taking)
                    taking.result()
                requests.send(END, {})

    @contextmanager
    def _led(self, size: int, asking: ThreadPoolExecutor, requests: RequestSender) -> Iterator[dist.ProcessGroup]:
        """The process group of this process, rank 0, and the servers' workers, once all have joined."""
        host, port = free_address(self.group.host)
        patience = timedelta(seconds=min(_CONNECT_SECONDS, self.group.timeout))
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=patience)
        name = self.group.name
        where = {"master_address": host, "master_port": port, "world_size": size, "backend": self.backend}
        coming = asking.submit(requests.send, "init", {**where, "group_name": name})
        making = _run_in_background(lambda: _group(self.backend, store, name, size, patience))
        futures: list[Future[Any]] = [coming, making]
        wait(futures, return_when=FIRST_EXCEPTION)
        if coming.done():
            coming.result()  # raised first: a server that does not join is the reason why the group is incomplete
        group = making.result()
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def _group(backend: str, store: Store, name: str, size: int, patience: timedelta) -> dist.ProcessGroup:
    """Rank 0 of a group beside the learner's default one, with the keys that SGLang's workers expect in the store."""
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


def _run_in_background(call: Callable[[], T]) -> Future[T]:
    """Runs a call, which ends by its own deadline, in a daemon thread. Returns the future of its result."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is raised to the caller that asks for the result
            future.set_exception(error)

    Thread(target=work, name="update-group", daemon=True).start()
    return future


def _until(sending: dist.Work | None, taking: Future[None]) -> None:
    """Wait until a broadcast is done. Raises the error of `taking` if the servers do not take it."""
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

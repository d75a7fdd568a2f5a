"""Requests from the learner to the processes that receive its weights, one after the other, through the group's store.

vLLM's weight-transfer engines leave it to their user how init, start, update and finish reach the workers. Here they
are JSON in the driver's store, including the handles of CUDA IPC: nothing that is received is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from skyrl.weight_receiver.transfer_group import wait_for

END = "end"
"""Kind of the last request of a sender."""


class Requests:
    """The sender's end of the requests."""

    def __init__(self, store: Store, *, receivers: Sequence[int], timeout: float) -> None:
        """`receivers` are ranks of the transfer group; `timeout`, in seconds, applies to each request."""
        self._store, self._timeout = store, timeout
        self._receivers, self._number = tuple(receivers), 0

    def ask(self, kind: str, content: Mapping[str, Any]) -> None:
        """Send a request and wait until every receiver has executed it. Raises `WeightSyncError` if one cannot, or does
        not answer.
        """
        key = _key(self._number)
        self._number += 1
        self._store.set(key, json.dumps({"kind": kind, "content": content}))
        done = {_done(key, rank): rank for rank in self._receivers}
        wait_for(
            self._store,
            list(done),
            self._timeout,
            lambda keys: f"members {[done[each] for each in keys]} have not completed the learner's request: {kind}",
        )


def requests(store: Store, *, rank: int, timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and content of each request, up to `END`. A request counts as done when the iterator is advanced.

    Raises `WeightSyncError` if a member aborts, or if no request arrives for `timeout` seconds.
    """
    number = 0
    while True:
        key = _key(number)
        wait_for(store, [key], timeout, lambda _: f"the learner has not continued with the weights of member {rank}")
        request = json.loads(store.get(key))
        yield request["kind"], request["content"]
        store.set(_done(key, rank), "")
        if request["kind"] == END:
            return
        number += 1


def _key(number: int) -> str:
    return f"request {number}"


def _done(key: str, rank: int) -> str:
    return f"{key} done by {rank}"

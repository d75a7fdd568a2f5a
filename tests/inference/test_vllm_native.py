"""What goes between vLLM's transfer engines: requests through a store, and handles that are not pickled."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.storage import TypedStorage

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.transfer_group import END, Members, RequestSender, TransferGroup, received_requests
from skyrl.weight_receiver.vllm_native import handle, plain_handle, refuse_changed, with_handles

HANDLE = (
    *(torch.Tensor, torch.Size([16]), (1,), 0, TypedStorage, torch.uint8),
    *(0, b"\x00\xffhandle", 16, 0, b"counter", 0, b"event", True, False),
)
"""As torch's `reduce_tensor` makes it of 16 bytes on a GPU."""


def test_a_handle_survives_json() -> None:
    assert handle(json.loads(json.dumps(plain_handle(HANDLE)))) == HANDLE


def test_a_handle_of_anything_but_bytes_is_not_sent() -> None:
    with pytest.raises(AssertionError, match="a handle of"):
        plain_handle((*HANDLE[:5], torch.float32, *HANDLE[6:]))


def test_a_sender_chooses_no_classes() -> None:
    plain = plain_handle(HANDLE)
    plain[0] = "os.system"
    assert with_handles({"ipc_handles": {"GPU-1": plain}})["ipc_handles"]["GPU-1"] == HANDLE


def test_requests_come_in_order_and_are_done_when_the_next_is_asked_for() -> None:
    members = Members(HashStore())
    sender = RequestSender(members, receivers=(1, 2), timeout=20)
    calls: list[str] = []

    def worker(rank: int) -> None:
        for kind, content in received_requests(members, rank=rank, timeout=20):
            calls.append(f"{rank} {kind} {content}")

    with ThreadPoolExecutor(2) as threads:
        workers = [threads.submit(worker, rank) for rank in (1, 2)]
        sender.send("start", {"a": 1})
        assert sorted(calls) == ["1 start {'a': 1}", "2 start {'a': 1}"]
        sender.send(END, {})
        for future in workers:
            future.result()
    assert len(calls) == 4


def test_a_worker_that_does_not_do_it_is_named() -> None:
    with pytest.raises(WeightSyncError, match=r"members \[3\] have not completed the learner's request: update"):
        RequestSender(Members(HashStore()), receivers=(3,), timeout=0.05).send("update", {})


def test_a_meeting_that_is_called_off_ends_the_waiting() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    group = TransferGroup(host="127.0.0.1", port=store.port, name="one", rank=0, size=2, timeout=20)
    group.abort("engine 1 is dead")
    with pytest.raises(WeightSyncError, match="not sent: engine 1 is dead"):
        next(received_requests(Members(group.store()), rank=1, timeout=20))


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        ({"a": "1"}, {}, "a did not arrive"),
        ({}, {"a": "1"}, "a arrived, which was not sent"),
        ({"a": "1"}, {"a": "2"}, "a was changed in transit: digest 2 arrived, 1 was sent"),
        ({str(n): "1" for n in range(7)}, {}, "and 2 more"),
    ],
)
def test_what_was_received_is_what_was_sent(sent: dict[str, str], received: dict[str, str], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        refuse_changed(sent, received)


def test_equal_digests_are_accepted() -> None:
    refuse_changed({"a": "1"}, {"a": "1"})

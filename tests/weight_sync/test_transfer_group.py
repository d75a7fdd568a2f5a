"""Channels of a transfer group: shared memory between processes of one machine, otherwise gloo."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.transfer_group import Channel, GlooChannel, MemoryChannel, MemoryOffer, TransferGroup

MESSAGES = (
    [torch.arange(5, dtype=torch.uint8), torch.tensor([7], dtype=torch.uint8)],
    [torch.empty(0).byte()],
    [torch.ones(99_999).byte()],
)


def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def group(port: int, rank: int, size: int, timeout: float = 60) -> TransferGroup:
    return TransferGroup(host="127.0.0.1", port=port, name="one", rank=rank, size=size, timeout=timeout)


def received(member: TransferGroup) -> tuple[type[Channel], list[Tensor]]:
    with member.join() as channel:
        return type(channel), [channel.receive_bytes().clone() for _ in MESSAGES]


def sent(member: TransferGroup) -> type[Channel]:
    with member.join() as channel:
        for parts in MESSAGES:
            channel.send_bytes(*parts)
        return type(channel)


def memory_files() -> list[str]:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [str(link.readlink()) for link in links if link.is_symlink() and "memfd:weights" in str(link.readlink())]


def test_processes_of_one_machine_share_memory() -> None:
    driver = store()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        receivers = [pool.apply_async(received, [group(driver.port, rank, 3)]) for rank in (1, 2)]
        assert sent(group(driver.port, 0, 3)) is MemoryChannel
        for kind, messages in (receiver.get(60) for receiver in receivers):
            assert kind is MemoryChannel
            torch.testing.assert_close(messages, [torch.cat(parts) for parts in MESSAGES])
    assert memory_files() == []
    assert not PrefixStore("one", driver).check(["message 1"])


def test_all_members_use_gloo_if_one_cannot_map_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, answers = store(), iter((True, False))
    monkeypatch.setattr(MemoryOffer, "is_readable", lambda text: next(answers))
    with ThreadPoolExecutor(2) as threads:
        receivers = [threads.submit(received, group(driver.port, rank, 3)) for rank in (1, 2)]
        assert sent(group(driver.port, 0, 3)) is GlooChannel
        for kind, messages in (receiver.result(60) for receiver in receivers):
            assert kind is GlooChannel
            torch.testing.assert_close(messages, [torch.cat(parts) for parts in MESSAGES])


def test_only_the_number_in_memory_proves_that_it_is_shared() -> None:
    with MemoryOffer() as offer:
        process, file, number = offer.text.split()
        assert MemoryOffer.is_readable(offer.text)
        assert not MemoryOffer.is_readable(f"{process} {file} {number[::-1]}")
        assert not MemoryOffer.is_readable(f"{process} 999999 {number}")
    assert not MemoryOffer.is_readable(offer.text)
    assert not MemoryOffer.is_readable("")


def test_a_receiver_that_fails_ends_the_waiting_of_the_sender() -> None:
    driver = store()

    def fails() -> None:
        with group(driver.port, 1, 2).join() as channel:
            channel.receive_bytes()
            raise WeightSyncError("this engine has no room")

    with ThreadPoolExecutor(1) as threads:
        receiver = threads.submit(fails)
        with pytest.raises(WeightSyncError, match="no room"):
            sent(group(driver.port, 0, 2))
        with pytest.raises(WeightSyncError, match="no room"):
            receiver.result(60)
    assert memory_files() == []

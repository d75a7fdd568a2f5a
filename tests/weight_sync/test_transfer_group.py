"""Channels of a transfer group: shared memory between processes of one machine, otherwise gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, current_thread

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.transfer_group import (
    Channel,
    GlooChannel,
    Members,
    MemoryChannel,
    MemoryOffer,
    RequestSender,
    TransferGroup,
    received_requests,
)

MESSAGES = (
    [torch.arange(5, dtype=torch.uint8), torch.tensor([7], dtype=torch.uint8)],
    [torch.empty(0).byte()],
    [torch.ones(99_999).byte()],
)


def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def group(port: int, rank: int, size: int, timeout: float = 240) -> TransferGroup:
    return TransferGroup(host="127.0.0.1", port=port, name="one", rank=rank, size=size, timeout=timeout)


def received(member: TransferGroup) -> tuple[type[Channel], list[Tensor]]:
    with member.join() as channel:
        return type(channel), [channel.receive_bytes().clone() for _ in MESSAGES]


def sent(member: TransferGroup) -> type[Channel]:
    with member.join() as channel:
        for parts in MESSAGES:
            channel.send_bytes(*parts)
        return type(channel)


def memory_files() -> set[int]:
    """Files in memory that this process has open, by inode: those of other tests may be among them."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return {link.stat().st_ino for link in links if link.is_symlink() and "memfd:weights" in str(link.readlink())}


def test_processes_of_one_machine_share_memory() -> None:
    before = memory_files()
    driver = store()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        receivers = [pool.apply_async(received, [group(driver.port, rank, 3)]) for rank in (1, 2)]
        assert sent(group(driver.port, 0, 3)) is MemoryChannel
        for kind, messages in (receiver.get(240) for receiver in receivers):
            assert kind is MemoryChannel
            torch.testing.assert_close(messages, [torch.cat(parts) for parts in MESSAGES])
    assert memory_files() <= before
    assert not PrefixStore("one", driver).check(["message 1"])


def test_all_members_use_gloo_if_one_cannot_map_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, found = store(), MemoryOffer.found
    monkeypatch.setattr(MemoryOffer, "found", lambda text: None if current_thread().name == "member_1" else found(text))
    with ThreadPoolExecutor(2, "member") as threads:
        receivers = [threads.submit(received, group(driver.port, rank, 3)) for rank in (1, 2)]
        assert sent(group(driver.port, 0, 3)) is GlooChannel
        for kind, messages in (receiver.result(240) for receiver in receivers):
            assert kind is GlooChannel
            torch.testing.assert_close(messages, [torch.cat(parts) for parts in MESSAGES])


def test_only_the_number_in_memory_proves_that_it_is_shared() -> None:
    offer = MemoryOffer()
    process, file, number = offer.text.split()
    assert MemoryOffer.found(offer.text)
    assert not MemoryOffer.found(f"{process} {file} {number[::-1]}")
    assert not MemoryOffer.found(f"{process} 999999 {number}")
    offer.close()
    assert not MemoryOffer.found(offer.text)
    assert not MemoryOffer.found("")


def test_a_pipe_at_the_offered_place_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    os.close(writing)  # opening the other end would wait for a writer
    assert not MemoryOffer.found(f"{os.getpid()} {reading} {'00' * 16}")
    os.close(reading)


def test_all_members_use_gloo_if_files_in_memory_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refuses)
    driver = store()
    with ThreadPoolExecutor(1) as threads:
        receiver = threads.submit(received, group(driver.port, 1, 2))
        assert sent(group(driver.port, 0, 2)) is GlooChannel
        assert receiver.result(240)[0] is GlooChannel


def test_the_sender_names_the_members_that_take_no_more_weights() -> None:
    before = memory_files()
    driver, over = store(), Event()

    def takes_one_message() -> None:
        with group(driver.port, 1, 2).join() as channel:
            channel.receive_bytes()
            over.wait(240)
            channel.receive_bytes()

    def sends_two_messages() -> None:
        with group(driver.port, 0, 2).join() as channel:
            assert isinstance(channel, MemoryChannel)
            channel.send_bytes(*MESSAGES[0])
            channel._timeout = 0.1
            channel.send_bytes(*MESSAGES[0])

    with ThreadPoolExecutor(1) as threads:
        receiver = threads.submit(takes_one_message)
        with pytest.raises(WeightSyncError, match=r"members \[1\] have not taken weights that were sent"):
            sends_two_messages()
        over.set()
        with pytest.raises(WeightSyncError, match=r"not sent: .*members \[1\] have not taken"):  # it comes too late
            receiver.result(240)
    assert memory_files() <= before


def test_a_receiver_that_fails_ends_the_waiting_of_the_sender() -> None:
    before = memory_files()
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
            receiver.result(240)
    assert memory_files() <= before


def killed_after(member: TransferGroup, messages: int) -> None:
    """Joins, receives so many messages, or sends them as rank 0, and is killed."""
    with member.join() as channel:
        for number in range(messages):
            channel.receive_bytes() if member.rank else channel.send_bytes(*MESSAGES[number])
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_request(member: TransferGroup) -> None:
    with member.rendezvous() as members:
        for _ in received_requests(members, rank=member.rank, timeout=member.timeout):
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def process(function: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Another process, which is killed in the block."""
    started = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    started.start()
    yield
    started.join(240)
    assert started.exitcode == -signal.SIGKILL


def test_a_killed_receiver_ends_the_waiting_of_all() -> None:
    driver = store()
    with process(killed_after, group(driver.port, 1, 3, 1e6), 1), ThreadPoolExecutor(1) as threads:
        other = threads.submit(received, group(driver.port, 2, 3, 1e6))
        with pytest.raises(
            WeightSyncError, match=r"members \[1\] have left the weight transfer: their processes ended"
        ):
            sent(group(driver.port, 0, 3, 1e6))
        with pytest.raises(WeightSyncError, match=r"not sent: members \[1\] have left the weight transfer"):
            other.result(240)


def test_a_killed_sender_ends_the_waiting_of_all() -> None:
    driver = store()
    with (
        process(killed_after, group(driver.port, 0, 2, 1e6), 1),
        pytest.raises(WeightSyncError, match=r"members \[0\] have left the weight transfer"),
    ):
        received(group(driver.port, 1, 2, 1e6))


def test_a_member_killed_in_a_request_ends_the_waiting_of_the_learner() -> None:
    driver = store()
    with (
        process(killed_in_a_request, group(driver.port, 1, 2, 1e6)),
        pytest.raises(WeightSyncError, match=r"members \[1\] have left the weight transfer"),
        group(driver.port, 0, 2, 1e6).rendezvous() as members,
    ):
        RequestSender(members, receivers=(1,), timeout=1e6).send("update", {})


def test_a_member_that_leaves_once_it_has_done_its_part_is_not_missed() -> None:
    offers = {rank: MemoryOffer() for rank in (1, 2)}
    files = {rank: file for rank, offer in offers.items() if (file := MemoryOffer.found(offer.text))}
    members = Members(HashStore(), files)
    members.store.set("by 1", "")
    offers[1].close()
    with pytest.raises(WeightSyncError, match=r"^after 0.05 s, absent: \[2\]$"):
        members.wait_for({"by 1": 1, "by 2": 2}, 0.05, lambda ranks: f"absent: {ranks}")
    offers[2].close()
    with pytest.raises(WeightSyncError, match=r"^members \[2\] have left"):
        members.wait_for({"by 1": 1, "by 2": 2}, 1e6, str)


@contextmanager
def slow_way_to(port: int) -> Iterator[int]:
    """A port whose connections lead to another one, which gets what is sent to it a tenth of a second later."""
    ends: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket, seconds: float) -> None:
        with contextlib.suppress(OSError):  # the block has ended
            while content := source.recv(1 << 16):
                time.sleep(seconds)
                target.sendall(content)

    def accept(threads: ThreadPoolExecutor) -> None:
        with contextlib.suppress(OSError):  # the block has ended
            while True:
                ends.append(near := listener.accept()[0])
                ends.append(far := socket.create_connection(("127.0.0.1", port)))
                threads.submit(carry, near, far, 0.1)
                threads.submit(carry, far, near, 0)

    with ThreadPoolExecutor(16) as threads, socket.create_server(("127.0.0.1", 0)) as listener:
        threads.submit(accept, threads)
        try:
            yield listener.getsockname()[1]
        finally:
            for end in (listener, *ends):
                end.shutdown(socket.SHUT_RDWR)
    for end in ends:
        end.close()


@pytest.mark.parametrize(("fails", "message"), [(False, None), (True, "no room")])
def test_a_member_far_from_the_store_stays_until_its_last_words_are_there(fails: bool, message: str | None) -> None:
    def takes_one_message(port: int) -> None:
        with group(port, 1, 2).join() as channel:
            channel.receive_bytes()
            if fails:
                raise RuntimeError("no room")

    driver = store()
    refused = pytest.raises(WeightSyncError, match=message) if message else contextlib.nullcontext()
    with slow_way_to(driver.port) as port, ThreadPoolExecutor(1) as threads:
        receiver = threads.submit(takes_one_message, port)
        with refused, group(driver.port, 0, 2).join() as channel:
            channel.send_bytes(*MESSAGES[0])
            if fails:
                channel.send_bytes(*MESSAGES[0])
        assert (receiver.exception(240) is not None) is fails

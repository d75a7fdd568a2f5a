"""A group of processes that forms once to broadcast bytes from rank 0 to all others, and then dissolves.

Every member registers at a store that the run's driver holds. The group is formed only when all have registered, so
that none waits in a collective for a process that will never join. A member that cannot take part writes the reason to
the same store, which ends the others' waiting at once. So does the end of a member's process, however it ends, for
members on its machine: each keeps a file in memory open, which they see.

Bytes travel through memory that rank 0 shares if every member can map it, as on one machine, and otherwise over gloo.

`RequestSender` and `received_requests` are the two ends of the learner's requests to the members, one after the other,
through the same store. vLLM's weight-transfer engines leave it to their user how init, start, update and finish reach
the workers: here they are JSON, including the handles of CUDA IPC. Nothing that is received is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import field, frozen
from attrs.validators import instance_of
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from skyrl.errors import WeightSyncError
from skyrl.processes.addresses import connecting_seconds

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.0002, 0.01
"""Bounds of the time between two looks for a key. It grows with the wait, so that a step of a transfer that takes
milliseconds is not delayed by as much again, and a long wait costs no computation."""

_CONNECT_SECONDS = 30.0
"""Number of seconds for the members to connect after all have registered: the longest wait for a member that ended in
between."""

_ABORTED = "called off"

_IDLE: defaultdict[tuple[str, int], list[TCPStore]] = defaultdict(list)
"""Idle connections to stores, by host and port. They are kept because torch resolves names for each new connection,
which takes five seconds if a resolver loses a packet. Concurrent groups use one each, because a member that waits
for a key occupies its connection."""


@frozen(kw_only=True)
class TransferGroup:
    """One member's view of a group: where the members find each other, and this member's rank."""

    host: str = field(validator=instance_of(str))
    port: int = field(validator=instance_of(int))
    """Port of the driver's `TCPStore`."""

    name: str = field(validator=instance_of(str))
    """Name of the group, unique in a run."""

    rank: int = field(validator=instance_of(int))
    size: int = field(validator=instance_of(int))
    timeout: float = field(validator=instance_of((float, int)))
    """Number of seconds that a member waits for the others: for all to register, and for each message."""

    @contextmanager
    def join(self) -> Iterator[Channel]:
        """Yields the channel once every member has joined. Raises `WeightSyncError` if one does not, or aborts."""
        patience = min(self.timeout, _CONNECT_SECONDS)
        with self.rendezvous() as members:
            if self._can_share_memory(members, patience):
                yield MemoryChannel(members, self)
                return
            group = ProcessGroupGloo(members.store, self.rank, self.size, timedelta(seconds=patience))
            channel = GlooChannel(group, self.timeout)
            try:
                yield channel
            finally:
                channel.close()

    def _can_share_memory(self, members: Members, patience: float) -> bool:
        """Whether every member can map memory of rank 0. All members get the same answer."""
        answers = {f"rank {rank} maps memory": rank for rank in range(1, self.size)}
        if self.rank:
            members.store.set(f"rank {self.rank} maps memory", "yes" if 0 in members.files else "no")
        members.wait_for(
            answers, patience, lambda ranks: f"members {ranks} ended after they had joined the weight transfer"
        )
        return all(members.store.get(key) == b"yes" for key in answers)

    @contextmanager
    def rendezvous(self) -> Iterator[Members]:
        """Yields the members once every one has registered. Raises as `join`.

        An error in the body ends the waiting of the others.
        """
        try:
            tcp = self._connection()
        except RuntimeError as error:
            raise WeightSyncError(
                f"the weight transfer failed ({self._member_text} cannot reach the driver at {self.host}:{self.port}: "
                f"{str(error).splitlines()[0]})"
            ) from error
        store = PrefixStore(self.name, tcp)
        offer = MemoryOffer()
        try:
            store.set(presence_key(self.rank), offer.text)
            keys = {presence_key(rank): rank for rank in range(self.size)}
            Members(store).wait_for(keys, self.timeout, self._absent_members)
            others = {rank: store.get(key).decode() for key, rank in keys.items() if rank != self.rank}
            yield Members(store, {rank: file for rank, text in others.items() if (file := MemoryOffer.found(text))})
            _wait_until_stored(tcp)
            _IDLE[self.host, self.port].append(tcp)  # one that failed is not used again
        except WeightSyncError as error:
            self.abort(str(error))
            raise
        except Exception as error:
            reason = f"{self._member_text}: {next(iter(str(error).splitlines()), type(error).__name__)}"
            self.abort(reason)
            raise WeightSyncError(f"the weight transfer failed ({reason})") from error
        finally:
            offer.close()  # the others, who take this for the end of the process, now find its keys, and the reason

    def with_rank_offset(self, offset: int) -> TransferGroup:
        """The same group as seen by the member whose rank is higher by `offset`, like a later worker of an engine."""
        return attrs.evolve(self, rank=self.rank + offset)

    def store(self) -> Store:
        """A connection to the group's part of the driver's store."""
        return PrefixStore(self.name, self._connection())

    def abort(self, reason: str) -> None:
        """End the waiting of every member; harmless if the store is gone."""
        with contextlib.suppress(RuntimeError):
            store = self.store()
            store.set(_ABORTED, reason)
            _wait_until_stored(store)

    @property
    def _member_text(self) -> str:
        """Description of this member for messages."""
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"

    def _connection(self) -> TCPStore:
        patience = timedelta(seconds=self.timeout)
        with contextlib.suppress(IndexError):
            while True:
                tcp = _IDLE[self.host, self.port].pop()
                with contextlib.suppress(RuntimeError):  # the connection was cut meanwhile
                    tcp.set_timeout(patience)
                    tcp.check([_ABORTED])
                    return tcp
        connecting = timedelta(seconds=connecting_seconds(self.timeout))
        tcp = TCPStore(self.host, self.port, is_master=False, timeout=connecting)
        tcp.set_timeout(patience)
        return tcp

    def _absent_members(self, ranks: Sequence[int]) -> str:
        return (
            f"members {ranks} of {self.size} have not joined the weight transfer (0 is the learner, the others are the "
            "workers of the engines in service, in order)"
        )


def _wait_until_stored(store: Store) -> None:
    """Returns once other members find what this one has set over the connection: `set` waits for no answer."""
    store.check([_ABORTED])


def presence_key(rank: int) -> str:
    """The key under which a member registers."""
    return f"present {rank}"


@frozen
class Members:
    """The registered members of a group, as one of them sees the others."""

    store: Store
    """The group's part of the driver's store."""

    files: Mapping[int, tuple[Path, int]] = field(factory=dict)
    """Rank of each other member whose memory this process can map -> path and inode of a file in memory that it keeps
    open while it is in the group."""

    def wait_for(self, keys: Mapping[str, int], timeout: float, absent: Callable[[Sequence[int]], str]) -> None:
        """Returns when all keys exist, each of which the member of this rank sets. Raises `WeightSyncError` if a member
        aborts, if the process of one that has not set its key ends, and after `timeout` seconds, with the message that
        `absent` makes of the ranks whose keys are missing.
        """
        began, left = time.monotonic(), set[int]()
        while keys and not self.store.check(list(keys)):
            self.refuse_if_aborted()
            if left and (lost := [rank for rank in self._missing(keys) if rank in left]):
                raise WeightSyncError(f"members {lost} have left the weight transfer: their processes ended")
            # Such a member may have set its key or aborted since the looks above: both are looked at once more.
            left = {rank for rank in keys.values() if self._has_left(rank)}
            waited = time.monotonic() - began
            if waited > timeout:
                raise WeightSyncError(f"after {timeout:g} s, {absent(self._missing(keys))}")
            time.sleep(min(max(waited / 8, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS))

    def refuse_if_aborted(self) -> None:
        """Raises `WeightSyncError` with the reason if a member has ended the transfer."""
        if self.store.check([_ABORTED]):
            raise WeightSyncError(f"the weights were not sent: {self.store.get(_ABORTED).decode()}")

    def _missing(self, keys: Mapping[str, int]) -> list[int]:
        return [rank for key, rank in keys.items() if not self.store.check([key])]

    def _has_left(self, rank: int) -> bool:
        path, inode = self.files.get(rank, (None, None))
        return path is not None and _inode(path) != inode


class Channel(ABC):
    """Bytes from rank 0 to all other ranks, one message after the other."""

    @abstractmethod
    def send_bytes(self, *parts: Tensor) -> None:
        """Send the parts, each flat uint8 of shape (bytes,), as one message; returns when it is on its way to every
        member. Rank 0 only.
        """

    @abstractmethod
    def receive_bytes(self) -> Tensor:
        """The next message, flat uint8 of shape (bytes,), in memory of its own. Every rank but 0."""


class GlooChannel(Channel):
    """Messages over TCP: for members on several machines."""

    def __init__(self, group: Any, timeout: float) -> None:
        """`timeout` is the number of seconds to wait for each message."""
        self._group = group
        self._options = BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.timeout = timedelta(seconds=timeout)

    def send_bytes(self, *parts: Tensor) -> None:
        content = torch.cat(parts)
        self._broadcast(torch.tensor([content.numel()]))
        if content.numel():
            self._broadcast(content)

    def receive_bytes(self) -> Tensor:
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        content = torch.empty(int(size), dtype=torch.uint8)
        if content.numel():
            self._broadcast(content)
        return content

    def close(self) -> None:
        """Cut the connections; members that still send or wait get an error."""
        self._group = None

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast([tensor], self._options).wait()


class MemoryChannel(Channel):
    """Messages in memory that all members map: nothing is copied after rank 0 has written a message.

    Each message has a file of its own, without a name in any folder: its memory is freed when the last process that
    maps it lets go of it, or ends in any way.
    """

    def __init__(self, members: Members, group: TransferGroup) -> None:
        self._members, self._store = members, members.store
        self._rank, self._timeout = group.rank, group.timeout
        self._receivers = range(1, group.size)
        self._number = 0

    def send_bytes(self, *parts: Tensor) -> None:
        size = sum(part.numel() for part in parts)
        with _memory_file() as (address, path):
            if size:
                torch.cat(parts, out=torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
            key = self._next_key()
            self._store.set(key, f"{address} {size}")
            taken = {_taken_key(key, rank): rank for rank in self._receivers}
            self._members.wait_for(
                taken, self._timeout, lambda ranks: f"members {ranks} have not taken weights that were sent"
            )
        for name in (key, *taken):
            self._store.delete_key(name)

    def receive_bytes(self) -> Tensor:
        key = self._next_key()
        self._members.wait_for(
            {key: 0}, self._timeout, lambda _: f"the learner sent no more weights to member {self._rank}"
        )
        process, file, size = map(int, self._store.get(key).split())
        try:
            content = _mapped(process, file, size)
        except RuntimeError:  # the sender has given up and let go of the file, or it has ended
            self._members.refuse_if_aborted()
            raise
        self._store.set(_taken_key(key, self._rank), "")
        return content

    def _next_key(self) -> str:
        self._number += 1
        return f"message {self._number}"


def _taken_key(message: str, rank: int) -> str:
    return f"{message} taken by {rank}"


class MemoryOffer:
    """A random number in memory that another process may be able to map: one that finds it shares memory with this one,
    whatever containers and permissions lie between them. One that no longer finds it knows that this process has ended,
    or has closed it.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.text = ""
        """Where the number is and what it is; empty if this process cannot have files in memory."""
        if hasattr(os, "memfd_create"):  # on Linux
            with contextlib.suppress(OSError):  # a sandbox forbids it, or has no /proc
                address, path = self._stack.enter_context(_memory_file())
                number = secrets.token_bytes(16)
                Path(path).write_bytes(number)
                self.text = f"{address} {number.hex()}"

    def close(self) -> None:
        """Take the number away."""
        self._stack.close()

    @staticmethod
    def found(text: str) -> tuple[Path, int] | None:
        """Path and inode of the offered file; None if this process cannot map its memory."""
        if not text:
            return None
        process, file, number = text.split()
        path = Path(f"/proc/{process}/fd/{file}")
        inode = _inode(path)
        try:
            # in another container, the process of this number may have opened a pipe, on which opening waits
            if inode is None or not path.is_file():
                return None
            content = bytes(_mapped(int(process), int(file), len(number) // 2).tolist())
        except (OSError, RuntimeError):  # it is not ours, or torch finds it shorter
            return None
        return (path, inode) if content.hex() == number else None


def _inode(path: Path) -> int | None:
    """Inode of the file that a process has open; None if it has none there, or has ended."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


@contextmanager
def _memory_file() -> Iterator[tuple[str, str]]:
    """A new file in memory: its address for `_mapped` in other processes, and its path in this one."""
    file = os.memfd_create("weights")
    try:
        yield f"{os.getpid()} {file}", f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def _mapped(process: int, file: int, size: int) -> Tensor:
    """Memory of a file that another process has open, flat uint8 of shape (size,). Raises `RuntimeError`."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(f"/proc/{process}/fd/{file}", shared=False, size=size, dtype=torch.uint8)


END = "end"
"""Kind of the last request of a sender."""


class RequestSender:
    """The sender's end of the requests."""

    def __init__(self, members: Members, *, receivers: Sequence[int], timeout: float) -> None:
        """`receivers` are ranks of the transfer group; `timeout`, in seconds, applies to each request."""
        self._members, self._timeout = members, timeout
        self._receivers, self._number = tuple(receivers), 0

    def send(self, kind: str, content: Mapping[str, Any]) -> None:
        """Send a request and wait until every receiver has executed it. Raises `WeightSyncError` if one cannot, or does
        not answer.
        """
        key = _key(self._number)
        self._number += 1
        self._members.store.set(key, json.dumps({"kind": kind, "content": content}))
        self._members.wait_for(
            {_done_key(key, rank): rank for rank in self._receivers},
            self._timeout,
            lambda ranks: f"members {ranks} have not completed the learner's request: {kind}",
        )


def received_requests(members: Members, *, rank: int, timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and content of each request, up to `END`. A request counts as done when the iterator is advanced.

    Raises `WeightSyncError` if a member aborts, if the learner's process ends, or if no request arrives for `timeout`
    seconds.
    """
    number = 0
    while True:
        key = _key(number)
        members.wait_for(
            {key: 0}, timeout, lambda _: f"the learner has not continued with the weights of member {rank}"
        )
        request = json.loads(members.store.get(key))
        yield request["kind"], request["content"]
        members.store.set(_done_key(key, rank), "")
        if request["kind"] == END:
            return
        number += 1


def _key(number: int) -> str:
    return f"request {number}"


def _done_key(key: str, rank: int) -> str:
    return f"{key} done by {rank}"

"""A network between network namespaces, as one program: `python tests/network_switch.py NAMESPACE=ADDRESS ...`.

It opens a TUN device in each namespace and carries packets between them. Each line on standard input is a JSON object
with the rules from now on, see `Rules`; each is answered by a line. When the program ends, so does the network.

Linux's own emulation of losses and delays (netem) is not in every kernel. Only the standard library is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

DEVICE = "net0"
MTU = 9000
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_NEW_NETWORK = 0x40000000
_TCP, _SYN, _ACK = 6, 0x02, 0x10


@dataclass(frozen=True)
class Rules:
    """What happens to packets. Addresses are those of the namespaces."""

    cut: list[str] = field(default_factory=list)
    """Addresses that nothing reaches and nothing comes from."""

    loss: float = 0.0
    """Part of the packets that are lost."""

    delay: float = 0.0
    """Seconds that each packet takes."""

    closed: list[list[int]] = field(default_factory=list)
    """Ranges of TCP ports, both ends included, that take no new connections: nothing answers there."""

    def drops(self, packet: bytes, source: str, target: str, draws: random.Random) -> bool:
        """Whether this packet is lost."""
        if source in self.cut or target in self.cut or draws.random() < self.loss:
            return True
        port = _asks_to_connect_to(packet)
        return port is not None and any(low <= port <= high for low, high in self.closed)


def _asks_to_connect_to(packet: bytes) -> int | None:
    """The port that a packet asks for a TCP connection; None where it does not."""
    header = (packet[0] & 15) * 4
    if packet[9] != _TCP or packet[header + 13] & (_SYN | _ACK) != _SYN:
        return None
    return int.from_bytes(packet[header + 2 : header + 4])


def _open_device(namespace: str, address: str) -> int:
    """The descriptor of a TUN device in the namespace, which has this address and is the way to everywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    if libc.setns(descriptor, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    libc.setns(home, _NEW_NETWORK)
    for words in (
        ["addr", "add", f"{address}/24", "dev", DEVICE],
        ["link", "set", "lo", "up"],
        ["link", "set", DEVICE, "mtu", str(MTU), "up"],
        ["route", "add", "default", "dev", DEVICE],
    ):
        subprocess.run(["ip", "-n", namespace, *words], check=True)
    os.close(home)
    os.close(descriptor)
    return device


class Switch:
    """Carries packets between devices, by the rules of the moment."""

    def __init__(self, devices: dict[str, int]) -> None:
        self._devices, self._rules, self._draws = devices, Rules(), random.Random(0)
        self._late: list[tuple[float, int, str, bytes]] = []
        self._numbers = count()
        self._selector = selectors.DefaultSelector()
        for address, device in devices.items():
            self._selector.register(device, selectors.EVENT_READ, address)
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "")
        self._said = b""

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait):
                if key.data:
                    self._take_from(key.fd, key.data)
                elif not self._heed():
                    return
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self._late)
                self._give(target, packet)

    def _heed(self) -> bool:
        """Take new rules; false where there will be none any more."""
        data = os.read(sys.stdin.fileno(), 65536)
        self._said += data
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            self._rules = Rules(**json.loads(line))
            self._late = []
            print("done", flush=True)
        return bool(data)

    def _take_from(self, device: int, source: str) -> None:
        for _ in range(64):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue
            target = ".".join(map(str, packet[16:20]))
            if target not in self._devices or self._rules.drops(packet, source, target, self._draws):
                continue
            if self._rules.delay:
                moment = time.monotonic() + self._rules.delay
                heapq.heappush(self._late, (moment, next(self._numbers), target, packet))
            else:
                self._give(target, packet)

    def _give(self, target: str, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its queue is full, or it is gone: the packet is lost
            os.write(self._devices[target], packet)


if __name__ == "__main__":
    wanted = dict(word.split("=") for word in sys.argv[1:])
    switch = Switch({address: _open_device(namespace, address) for namespace, address in wanted.items()})
    print("done", flush=True)
    switch.run()

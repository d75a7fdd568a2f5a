"""Addresses that services listen on, and checks whether they can be reached."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_KNOCK_SECONDS = 2.0
_MOST_CONNECTING_SECONDS = 20.0


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the IPv4 address; None if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                reply = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def connecting_seconds(patience: float) -> float:
    """Seconds after which a process gives up connecting to the driver's store, whose calls may take `patience` seconds.

    The store listens before its address is published, so that connecting takes no longer than the network does. Half of
    the time leaves the process the other half to report the failure before its caller gives up.
    """
    return min(patience / 2, _MOST_CONNECTING_SECONDS)


def why_unreachable(host: str, port: int, seconds: float = _KNOCK_SECONDS) -> str | None:
    """Reason why no connection to host and port can be made within `seconds`; None if one can."""
    try:
        socket.create_connection((host, port), seconds).close()
    except (OSError, OverflowError) as error:  # the latter for a port above 65535
        return str(error)
    return None

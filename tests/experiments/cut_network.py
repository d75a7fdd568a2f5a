"""Runs without a network that note who calls what: in a network namespace of their own, where the kernel makes one."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.experiments.phases import command
from tests.forkserver import CONTEXT
from tests.nano_run import as_words

PACKAGES = ("wandb", "mlflow", "swanlab", "tensorboard")
PROXY = "http://127.0.0.1:9"
"""Nobody listens there."""


class CutSession:
    """One start of the command without a network."""

    def __init__(
        self, values: Mapping[str, Any], out: Path, environ: Mapping[str, str], expected: Sequence[str]
    ) -> None:
        """`expected` are the services whose failure `in_ascii_once_all_failed` waits for."""
        self._out = out
        environment = {**environ, "SAID": str(out / "said"), "EXPECTED": " ".join(expected)}
        self._process = CONTEXT.Process(target=_run_cut_off, args=(as_words(values), environment, out))
        self._process.start()

    def ends(self) -> int:
        """The exit status; then the other attributes are there."""
        self._process.join(480)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"the run did not end: {self.said}")
        seen = json.loads((self._out / "seen.json").read_text(encoding="utf-8"))
        self.how: str = seen["how"]
        self.packages: list[str] = seen["packages"]
        """Trackers' packages that the run's process imported."""
        self.calls: list[str] = seen["calls"]
        """Names that it looked up, and addresses that it connected to."""
        self.starters: set[str] = {*seen["starters"]}
        """Threads that started the trackers' processes."""
        return self._process.exitcode

    @property
    def said(self) -> str:
        """Everything on its standard output and error."""
        return (self._out / "said").read_text(encoding="utf-8")


def in_ascii_once_all_failed(completion: str, ground_truth: str, **others: Any) -> float:
    """A reward that is given once every tracker has failed."""
    while not all(f"{name} failed" in Path(os.environ["SAID"]).read_text() for name in os.environ["EXPECTED"].split()):
        time.sleep(0.1)
    return float(bool(completion) and completion.isascii())


def _run_cut_off(words: list[str], environment: dict[str, str], out: Path) -> None:
    method, calls, starters = _cut(environment), list[str](), set[str]()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.getaddrinfo", "socket.gethostbyname") or (
            event == "socket.connect" and isinstance(arguments[1], tuple)
        ):
            calls.append(f"{event} {arguments[:2]} in {threading.current_thread().name}")
        if event == "subprocess.Popen" and "skyrl.tracking.services.follow" in arguments[1]:
            starters.add(threading.current_thread().name)

    sys.addaudithook(note)
    try:
        command(words, environment, out)
    finally:
        packages = [name for name in PACKAGES if name in sys.modules]
        seen = {"how": method, "packages": packages, "calls": calls, "starters": sorted(starters)}
        (out / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


def _cut(environment: dict[str, str]) -> str:
    """Leave the network, and say how: where nobody may make a namespace, by a proxy that refuses."""
    libc, user, network = ctypes.CDLL(None, use_errno=True), 0x10000000, 0x40000000
    if libc.unshare(network) == 0 or libc.unshare(user | network) == 0:
        _start_loopback()
        return "by a namespace"
    environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY)
    return "by a proxy that refuses (no network namespace can be made)"


def _start_loopback() -> None:
    """As after `ip link set lo up`: services' packages speak to their own processes by it."""
    set_flags, up, running = 0x8914, 0x1, 0x40
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up | running))

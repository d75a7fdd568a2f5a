"""`skyrl serve` on one machine, asked from another."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.endpoint.client_access import TOKEN_VARIABLE
from tests.machines import Machine, Machines
from tests.processes.clusters import soon

pytestmark = [pytest.mark.machines, pytest.mark.long, pytest.mark.xdist_group("machines")]

TOKEN = "four words of fun"
SERVED = r"http://[\d.]+:(\d+)"
ON_THE_CPU = ("generator.inference_engine.backend=torch", "trainer.device=cpu")

ASK = """
import sys, urllib.error, urllib.request
address, *key = sys.argv[1:]
headers = {"Authorization": f"Bearer {key[0]}"} if key else {}
try:
    print(urllib.request.urlopen(urllib.request.Request(f"{address}/v1/models", headers=headers), timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
except urllib.error.URLError as error:
    print(type(error.reason).__name__)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines("alpha", "beta") as machines:
        yield machines


class Served:
    """`skyrl serve`, started on a machine."""

    def __init__(self, machine: Machine, model: Path, out: Path, *options: str, **variables: str) -> None:
        self._said = out / "said.txt"
        command = [sys.executable, "-m", "skyrl.cli", "serve", str(model), "--port", "0", *options, *ON_THE_CPU]
        self.process = machine.start(command, self._said, **variables)

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def port(self) -> int:
        """The port at which it listens, once it does."""
        assert soon(lambda: bool(re.search(SERVED, self.said)) or self.process.poll() is not None, 120), self.said
        match = re.search(SERVED, self.said)
        assert match, self.said
        return int(match[1])


def answer(machine: Machine, address: str, *key: str) -> str:
    """The status that a client on this machine gets, or the error that ended its try."""
    command = ["ip", "netns", "exec", machine.namespace, sys.executable, "-c", ASK, address, *key]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_by_default_no_other_machine_reaches_it(machines: Machines, nano: Path, tmp_path: Path) -> None:
    port = Served(machines["alpha"], nano / "model", tmp_path).port
    assert answer(machines["alpha"], f"http://127.0.0.1:{port}") == "200"
    assert answer(machines["beta"], f"http://{machines['alpha'].address}:{port}") == "ConnectionRefusedError"


def test_other_machines_reach_it_only_with_the_token(machines: Machines, nano: Path, tmp_path: Path) -> None:
    served = Served(machines["alpha"], nano / "model", tmp_path, "--host", "0.0.0.0", **{TOKEN_VARIABLE: TOKEN})
    address = f"http://{machines['alpha'].address}:{served.port}"
    assert answer(machines["beta"], address) == "401"
    assert answer(machines["beta"], address, "another") == "401"
    assert answer(machines["beta"], address, TOKEN) == "200"


def test_without_a_token_it_listens_for_no_other_machine(machines: Machines, nano: Path, tmp_path: Path) -> None:
    served = Served(machines["alpha"], nano / "model", tmp_path, "--host", machines["alpha"].address)
    assert served.process.wait(120) == 2, served.said
    assert TOKEN_VARIABLE in served.said

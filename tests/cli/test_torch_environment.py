"""What torch reads when it starts is set by the commands that compute, and by nobody whom the user overrules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from skyrl.processes.torch_environment import TORCH_ENVIRONMENT, set_torch_environment


def test_defaults_are_set_and_the_users_own_values_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    set_torch_environment()
    assert os.environ == {**TORCH_ENVIRONMENT, "OMP_WAIT_POLICY": "ACTIVE"}


PROBE = """
import sys, threading
from skyrl.processes.torch_environment import set_torch_environment
if sys.argv[1] == "set":
    set_torch_environment()
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
blocks = []
for _ in range(2):
    thread = threading.Thread(target=lambda: blocks.append(libc.malloc(1000)))
    thread.start()
    thread.join()
heap = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
print(all(any(int(first, 16) <= block < int(last, 16) for first, last in heap) for block in blocks))
"""


@pytest.mark.parametrize(("setting", "shared"), [("set", "True"), ("left", "False")])
def test_threads_share_the_heap_of_the_process(setting: str, shared: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    ran = subprocess.run([sys.executable, "-c", PROBE, setting], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == shared, ran.stderr


def test_the_users_own_number_of_arenas_stands() -> None:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "8"}
    ran = subprocess.run([sys.executable, "-c", PROBE, "set"], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr

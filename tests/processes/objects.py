"""What the tests start: small objects that count, fail, die and hang."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol, TypeVar

from skyrl.errors import NonFiniteError, WeightSyncError
from tests.processes.clusters import lives

T = TypeVar("T")


def keep_the_interpreter(seconds: int) -> None:
    """No other thread of this process runs meanwhile, as in the import of a large library."""
    ctypes.PyDLL(None).sleep(seconds)


class Counts(Protocol):
    """What `Counter` keeps, for a caller who does not know the class."""

    def add(self, number: int) -> int: ...


class Prepared:
    """Keeps what its class was prepared with in the same process."""

    prepared_with: tuple[int, int] | None = None

    def __init__(self, number: int, *, other: int) -> None:
        self.found = Prepared.prepared_with

    @staticmethod
    def prepare(number: int, *, other: int) -> None:
        if other < 0:
            raise ValueError("nothing to import")
        Prepared.prepared_with = number, other

    def look(self) -> tuple[int, int] | None:
        return self.found


class Counter:
    def answer(self, value: T) -> T:
        """What it was given."""
        return value

    def __init__(self, start: int = 0) -> None:
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    async def add_later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.add(number)

    async def meet(self, others: int) -> int:
        """Returns when so many calls of `meet` are under way."""
        self.total += 1
        while self.total < others:
            await asyncio.sleep(0.01)
        return self.total

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def process(self) -> int:
        return os.getpid()

    def say(self, text: str) -> None:
        print(f"printed {text}")
        logging.getLogger("tests.counter").info("logged %s", text)

    def refuse(self) -> None:
        raise NonFiniteError("the loss is NaN in step 3")

    def stumble(self) -> None:
        raise ValueError("a tensor\nof two lines")

    def leave(self) -> None:
        sys.exit(3)

    def vanish(self) -> None:
        os._exit(3)

    def crash(self) -> None:
        ctypes.string_at(0)

    def rest_until(self, file: Path) -> None:
        """Returns when there is such a file."""
        while not file.exists():
            time.sleep(0.01)

    def spawn(self) -> int:
        """Starts a grandchild that no signal to a process group reaches; its id."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def keep_the_interpreter(self, seconds: int) -> None:
        keep_the_interpreter(seconds)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def lose_a_peer(self, peer: int) -> None:
        """The rank whose peer is 0 dies; the other fails the moment that its peer is gone, as a collective does."""
        self._outlive(peer)
        raise RuntimeError("Connection closed by peer")

    def miss_a_peer(self, peer: int) -> None:
        """As `lose_a_peer`, where somebody has made an error of ours of the collective's."""
        self._outlive(peer)
        raise WeightSyncError("the weight transfer failed (Connection closed by peer)")

    def _outlive(self, peer: int) -> None:
        if peer == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while lives(peer):
            time.sleep(0.001)


def total(counter: Counter) -> int:
    """A function in the place of a method."""
    return counter.total


def unmakeable() -> Counter:
    raise NonFiniteError("no model here")


class Odd(NonFiniteError):
    """An exception that cannot be put together again from its arguments."""

    def __init__(self, step: int, *, loss: float) -> None:
        super().__init__(f"loss {loss} in step {step}")


def odd() -> Counter:
    raise Odd(3, loss=2.0)

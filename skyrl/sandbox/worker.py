"""A confined process that answers questions one after another, as lines of JSON.

    Worker(sandbox, "module") -> ask(question, seconds) -> answer, ..., close()

A late or too long answer, or the worker's end, raises `WorkerEnded`; then nothing of the worker is left. The worker's
side is `answer_lines`, which a module's `main` calls.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from skyrl.errors import WorkerEnded
from skyrl.sandbox.sandbox import FOREVER, GRACE, ConfinedProcess, ResourceLimits, Sandbox

_PART = 1 << 20


class Worker:
    """One confined process. Call `ask` from one thread at a time; `close` may be called from any thread."""

    def __init__(self, sandbox: Sandbox, module: str, limits: ResourceLimits) -> None:
        """`limits.seconds` is not used: each question has its own time limit."""
        self._limits = limits
        self._line, worker_socket = socket.socketpair()
        self._left = b""
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            streams = [worker_socket.fileno(), worker_socket.fileno(), nothing]
            self._process = ConfinedProcess(sandbox, limits, streams, module=module)
        finally:
            os.close(nothing)
            worker_socket.close()

    def ask(self, question: object, seconds: float | None) -> Any:
        """Return the answer to the question. Raises `WorkerEnded`, and TypeError for a question that is not JSON."""
        line = json.dumps(question).encode() + b"\n"
        deadline = time.monotonic() + (FOREVER if seconds is None else seconds)
        try:
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            self._line.sendall(line)
            return json.loads(self._next_line(deadline))
        except TimeoutError:
            self.close()
            raise WorkerEnded("timeout", f"gave no answer within {seconds:g} s and was ended") from None
        except (OSError, ValueError, RecursionError) as error:
            raise WorkerEnded("exit", f"ended: {self.close(GRACE) or error}") from None

    def close(self, patience: float = 0.001) -> str:
        """End the worker, and wait until nothing of it is left. Returns how it ended if it had ended by itself or does
        so within `patience` seconds.
        """
        ending = self._process.close(patience)
        self._line.close()
        return ending

    def _next_line(self, deadline: float) -> bytes:
        while b"\n" not in self._left:
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._line.recv(_PART)
            if not part:
                raise OSError("it is gone")
            self._left += part
            if len(self._left) > self._limits.output_bytes:
                self.close()
                raise WorkerEnded("output", f"answered with more than {self._limits.output_bytes} bytes and was ended")
        line, _, self._left = self._left.partition(b"\n")
        return line


def answer_lines(answer: Callable[[Any], Any]) -> None:
    """The worker's loop: answer each line until there are no more. Printed output is discarded."""
    with os.fdopen(os.dup(0), "rb") as questions, os.fdopen(os.dup(1), "wb") as answers:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        for line in questions:
            answers.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
            answers.flush()
    sys.stdout.flush()

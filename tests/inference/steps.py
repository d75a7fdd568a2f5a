"""A gate in front of an engine's steps: a test stops an engine at a counted step, however fast the machine is."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from contextlib import suppress
from multiprocessing.connection import Listener
from typing import Any
from unittest.mock import patch

PORT = "SKYRL_TESTS_GATE"
"""Environment variable with the port of the gate on this machine."""

_DEADLINE = 120.0
"""Seconds to wait for an engine to reach the gate; only an engine that takes too few steps spends them."""


class Steps:
    """Counts the steps of an engine, and holds it in front of one of them.

    Example: `steps.hold(after=3)`, start a request, `await steps.held()`, look at the engine, `steps.release()`.
    """

    def __init__(self) -> None:
        self.taken = 0
        """Steps that the engine has begun."""
        self._last = math.inf
        self._waits = False
        self._changed = threading.Condition()

    def __call__(self, *_: Any) -> None:
        """Called by the engine, on whatever thread it computes, before each step."""
        with self._changed:
            self._waits = self.taken >= self._last
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.taken < self._last)
            self._waits = False
            self.taken += 1

    def hold(self, *, after: int) -> None:
        """Lets `after` more steps through, and none after them."""
        with self._changed:
            self._last = self.taken + after
            self._changed.notify_all()

    async def held(self) -> None:
        """Returns when the engine stands in front of a step that it may not take, or when the gate is opened."""
        await asyncio.to_thread(self._wait)

    def release(self) -> None:
        """Lets every step through."""
        with self._changed:
            self._last = math.inf
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: self._last == math.inf or self._stands, _DEADLINE)
            assert reached, "the engine takes no step"

    @property
    def _stands(self) -> bool:
        return self._waits and self.taken >= self._last


def gate_of_model(model: Any) -> Steps:
    """A step is a forward pass of this transformers model; a prefill counts, too."""
    steps = Steps()
    model.get_input_embeddings().register_forward_pre_hook(steps)
    return steps


def gate_of_vllm() -> Steps:
    """A step is a call of `vllm.LLMEngine.step`, in every such engine of this process from now on."""
    import vllm

    steps, step = Steps(), vllm.LLMEngine.step

    def gated(engine: Any) -> Any:
        steps()
        return step(engine)

    patch.object(vllm.LLMEngine, "step", gated).start()
    return steps


def gate_of_processes() -> Steps:
    """A step is one of any process that starts from now on and asks: vLLM's with `vllm_gate.AskTheGate` as a logits
    processor, and `gated_serve`.
    """
    steps, listener = Steps(), Listener(("127.0.0.1", 0))
    os.environ[PORT] = str(listener.address[1])

    def answer() -> None:
        with listener.accept() as engine, suppress(EOFError, ConnectionResetError):
            threading.Thread(target=answer, daemon=True).start()  # for the next process
            while True:
                engine.recv()
                steps()
                engine.send("take it")

    threading.Thread(target=answer, daemon=True).start()
    return steps

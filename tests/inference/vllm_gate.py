"""A logits processor of vLLM that changes no logits: each step of an engine process asks a gate of the tests first.

Only vLLM imports this module, in the process that draws the tokens.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Client
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from tests.inference.steps import PORT


class AskTheGate(LogitsProcessor):
    """Sends a message before each step, and waits for the answer."""

    def __init__(self, *_: Any) -> None:
        self._gate = Client(("127.0.0.1", int(os.environ[PORT])))

    def apply(self, logits: Tensor) -> Tensor:
        self._gate.send("a step")
        self._gate.recv()
        return logits

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM leaves those that are out of greedy steps

    def update_state(self, batch_update: Any) -> None:
        """It has no state."""

"""An engine that draws three tokens, reports them from a thread, and can be held before the last."""

from __future__ import annotations

import asyncio

from skyrl.errors import RunError
from skyrl.inference.engine import Completion, GenerationRequest, NewTokens
from skyrl.inference.pool import engine_proxy

IDS = (7, 8, 9)


class HeldEngine:
    """`generate` alone of an `InferenceEngine`."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self.given_up = 0

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Draws the tokens; the last one after `let_go`. Fails there for a prompt of two tokens."""
        heard = request.on_tokens
        try:
            for position, token in enumerate(IDS):
                if token == IDS[-1]:
                    await self._gate.wait()
                    if len(request.prompt_ids) == 2:
                        raise RunError("out of order")
                if heard is not None:
                    await asyncio.to_thread(heard, NewTokens(index=0, start=position, token_ids=(token,)))
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        drawn = (0.0,) * len(IDS)
        return (Completion(token_ids=IDS, text="", logprobs=drawn, weight_versions=(0, 0, 0), stop_reason="length"),)

    def let_go(self) -> None:
        self._gate.set()

    def hold(self) -> None:
        self._gate = asyncio.Event()  # of the loop that waits from now on

    def times_given_up(self) -> int:
        return self.given_up


def open_reports(engine: HeldEngine) -> int:
    """Number of reports that are kept in the engine's process."""
    return len(engine_proxy._REPORTS)

"""The stepped backend around an engine that fails between two steps; `test_vllm_engine.py` has vLLM's own."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from skyrl.errors import ProcessError
from skyrl.inference.vllm_stepped import SteppedBackend


async def test_whoever_waits_in_an_engine_that_dies_while_it_rests_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused for new weights, which break it: no step will ever come that could fail."""
    engine = Mock()
    engine.collective_rpc.side_effect = RuntimeError("out of memory")
    vllm = Mock()
    vllm.LLMEngine.from_engine_args.return_value = engine
    monkeypatch.setattr("skyrl.inference.vllm_stepped.importlib", Mock(import_module=lambda name: vllm))
    monkeypatch.setattr(
        "skyrl.inference.vllm_stepped.request_maker", lambda _: lambda ids, sampling, streamed: (ids, sampling)
    )
    backend = SteppedBackend({})
    await backend.pause("keep")
    waiting: list[asyncio.Task[Any]] = [asyncio.create_task(backend.generate(str(n), (1,), {})) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ProcessError, match="vLLM's engine failed: RuntimeError: out of memory"):
        await backend.call_workers("load")
    for each in waiting:
        with pytest.raises(ProcessError, match="out of memory"):
            await asyncio.wait_for(each, 5)

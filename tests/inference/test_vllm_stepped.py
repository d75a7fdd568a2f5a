"""The stepped backend around an engine that fails between two steps; `test_vllm_engine.py` has vLLM's own."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from skyrl.errors import ProcessError
from skyrl.inference.vllm.backend import SteppedBackend


def backend_over(engine: Mock, monkeypatch: pytest.MonkeyPatch) -> SteppedBackend:
    vllm = Mock()
    vllm.LLMEngine.from_engine_args.return_value = engine
    monkeypatch.setattr("skyrl.inference.vllm.backend.importlib", Mock(import_module=lambda name: vllm))
    return SteppedBackend({})


async def test_a_pause_takes_the_step_that_was_begun_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Mock()
    queue = engine.engine_core.engine_core.batch_queue = ["a step for samples that have ended"]
    engine.step.side_effect = queue.clear
    backend = backend_over(engine, monkeypatch)
    await backend.pause("keep")
    assert len(queue) == 1, "samples in flight stand still"
    await backend.pause("finish")
    assert queue == []


async def test_whoever_waits_in_an_engine_that_dies_while_it_rests_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused for new weights, which break it: no step will ever come that could fail."""
    engine = Mock()
    engine.collective_rpc.side_effect = RuntimeError("out of memory")
    backend = backend_over(engine, monkeypatch)
    await backend.pause("keep")
    waiting: list[asyncio.Task[Any]] = [asyncio.create_task(backend.generate(str(n), (1,), {})) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ProcessError, match="vLLM's engine failed: RuntimeError: out of memory"):
        await backend.call_workers("load")
    for task in waiting:
        with pytest.raises(ProcessError, match="out of memory"):
            await asyncio.wait_for(task, 5)


@pytest.mark.parametrize(("in_flight", "mode"), [("finish", "abort"), ("keep", "keep")])
async def test_sleep_frees_weights_and_cache_and_keeps_or_ends_requests(
    in_flight: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Mock()
    engine.engine_core.engine_core.batch_queue = []
    backend = backend_over(engine, monkeypatch)
    await backend.pause(in_flight)
    await backend.sleep()
    engine.sleep.assert_called_once_with(level=2, mode=mode)
    await backend.wake()
    engine.wake_up.assert_called_once_with()


async def test_an_engine_that_sleeps_is_left_alone_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Mock()
    backend = backend_over(engine, monkeypatch)
    await backend.sleep()
    backend.close()
    engine.engine_core._finalizer.detach.assert_called_once_with()
    engine.engine_core.shutdown.assert_not_called()


async def test_an_engine_that_was_woken_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Mock()
    backend = backend_over(engine, monkeypatch)
    await backend.sleep()
    await backend.wake()
    backend.close()
    engine.engine_core.shutdown.assert_called_once_with(timeout=None)

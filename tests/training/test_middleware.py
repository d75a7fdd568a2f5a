"""Layers around a call: their order, what they see, and what happens when something raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest

from skyrl.training.middleware import in_context, layered, run_after, run_before


class Log:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.events.append(f"into {name}")
        try:
            yield
        finally:
            self.events.append(f"out of {name}")

    async def prepare(self) -> None:
        self.events.append("prepared")

    async def double(self, number: int) -> int:
        self.events.append(f"double {number}")
        if number < 0:
            raise ValueError("negative")
        return 2 * number

    def heard(self, result: int, number: int) -> None:
        self.events.append(f"{number} gave {result}")


async def test_layers_are_entered_outermost_first_and_listeners_hear_once_all_are_left() -> None:
    log = Log()
    call = layered(
        log.double, in_context(partial(log.around, "clock")), run_before(log.prepare), on_result=[log.heard, log.heard]
    )
    assert await call(3) == 6
    assert log.events == ["into clock", "prepared", "double 3", "out of clock", "3 gave 6", "3 gave 6"]


async def test_a_call_that_raises_leaves_its_layers_and_is_not_heard_of() -> None:
    log = Log()
    call = layered(log.double, in_context(partial(log.around, "clock")), on_result=[log.heard])
    with pytest.raises(ValueError, match="negative"):
        await call(-1)
    assert log.events == ["into clock", "double -1", "out of clock"]


async def test_a_layer_that_raises_lets_nothing_inside_happen() -> None:
    log = Log()

    async def refuse() -> None:
        raise ValueError("no room")

    call = layered(log.double, in_context(partial(log.around, "clock")), run_before(refuse), on_result=[log.heard])
    with pytest.raises(ValueError, match="no room"):
        await call(1)
    assert log.events == ["into clock", "out of clock"]


async def test_a_layer_may_read_the_arguments_of_the_call() -> None:
    log = Log()

    @asynccontextmanager
    async def announced(number: int) -> AsyncIterator[None]:
        log.events.append(f"about to double {number}")
        yield

    assert await layered(log.double, announced)(number=4) == 8
    assert log.events == ["about to double 4", "double 4"]


async def test_what_runs_after_a_call_is_over_before_listeners_hear_and_is_left_out_where_the_call_raises() -> None:
    log = Log()
    call = layered(log.double, run_after(log.prepare), on_result=[log.heard])
    assert await call(4) == 8
    with pytest.raises(ValueError, match="negative"):
        await call(-1)
    assert log.events == ["double 4", "prepared", "4 gave 8", "double -1"]

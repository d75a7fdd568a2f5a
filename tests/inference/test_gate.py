from __future__ import annotations

import asyncio

from skyrl.inference.gate import Gate


async def test_a_gate_that_is_shut_again_at_once_lets_in_nobody_who_waited() -> None:
    """Whoever waited is woken by the opening, and has its turn only after the shutting."""
    gate, inside = Gate(), []

    async def enter() -> None:
        async with gate:
            inside.append("entered")

    await gate.shut()
    waiting = asyncio.create_task(enter())
    await asyncio.sleep(0)
    gate.open()
    await gate.shut()
    for _ in range(5):
        await asyncio.sleep(0)
    assert inside == []
    gate.open()
    await waiting
    assert inside == ["entered"]

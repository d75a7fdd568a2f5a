"""A sampler of a user that follows rewards and writes down what it draws, and rewards that a row alone decides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl.data.samplers import Pool, Pools
from tests.experiments.phases import enter


class LoggedPools(Pools):
    """Pools of hard, normal and easy rows."""

    def __init__(self, rows: Sequence[Any], log: str) -> None:
        pools = (Pool("hard", 0.3, 0.2), Pool("normal", 0.7, 1.0), Pool("easy", 1.0, 0.2))
        super().__init__(len(rows), pools, unseen=1.0, memory=0.5, seed=7)
        self.log = Path(log)

    def draw(self, count: int, step: int) -> Sequence[int]:
        rows = super().draw(count, step)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps([step, list(rows)])}\n")
        return rows


def draws_in(log: Path) -> dict[int, list[int]]:
    """Step -> rows, of all sessions of a run. What was drawn again has to be what was drawn before."""
    draws: dict[int, list[int]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        step, rows = json.loads(line)
        assert draws.setdefault(step, rows) == rows, f"step {step} was drawn twice, and not alike"
    return draws


def by_letter(completion: str, ground_truth: str, **others: Any) -> float:
    """The reward of a row's letter, whatever the answer."""
    enter("reward")
    return (ord(ground_truth) % 3) / 2

"""Which steps are traced, and into which folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.training.middleware import ProfiledSteps

BATCH: Any = None
OBJECTIVE: Any = None


class Model:
    def __init__(self) -> None:
        self.asked: list[str | None] = []

    async def profile(self, folder: Path | None) -> None:
        self.asked.append(None if folder is None else str(folder))


async def test_each_chosen_step_has_a_folder_and_tracing_ends_with_it() -> None:
    steps, model = ProfiledSteps([2, 3], Path("profiles")), Model()
    layer = steps.around(model)
    for version in range(4):
        steps.sampled((), version)
        for _ in range(2):  # updates of one step
            async with layer(BATCH, OBJECTIVE):
                model.asked.append(f"update of step {version + 1}")
    assert model.asked == [
        "update of step 1", "update of step 1",
        "profiles/step_2", "update of step 2", "update of step 2",
        "profiles/step_3", "update of step 3", "update of step 3",
        None, "update of step 4", "update of step 4",
    ]  # fmt: skip

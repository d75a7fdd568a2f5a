"""A training service in a process of its own: FOLDER PORT STATE_STEPS. Prints its address."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from skyrl.config import TrainingServiceConfig
from skyrl.training_service.serving import serving_training
from tests.training_service.bigrams import SERVED, BigramBackend


async def _serve(folder: Path, port: int, state_steps: int) -> None:
    settings = TrainingServiceConfig(port=port, state_steps=state_steps)
    async with serving_training(BigramBackend(), folder, settings, SERVED) as service:
        print(service.url, flush=True)
        await service.run()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

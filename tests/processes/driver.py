"""A run to be ended from outside: `python -m tests.processes.driver LOGS`.

It starts a rank and a grandchild, freezes the rank, prints who was started as JSON, and waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import psutil

from skyrl.processes.handles import Deadlines
from skyrl.processes.ray.processes import RayProcesses
from tests.processes.clusters import family, layout, own_folder
from tests.processes.objects import Counter


async def main(logs: Path) -> None:
    deadlines = Deadlines(start=120, call=600, heartbeat=60)
    with RayProcesses(layout(rank=1), deadlines=deadlines, address=None, logs=logs, device="cpu") as processes:
        group = processes.start("rank", [Counter])
        pids = await group.call(Counter.process)
        grandchild = await group.handles[0].call(Counter.spawn)
        started = sorted({*family(os.getpid()), *pids, grandchild})
        frozen = asyncio.ensure_future(group.handles[0].call(Counter.freeze))
        while psutil.Process(pids[0]).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        print(json.dumps({"started": started, "folder": str(own_folder())}), flush=True)
        await frozen


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

"""Waits until a Ray cluster has all its nodes: `python -m skyrl.processes.ray.nodes ADDRESS NODES SECONDS`.

It is a separate process, since Ray reads its token and settings once per process.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import ray

_nodes: Any = ray.nodes
_EVERY = 0.5


def main(address: str, required: int, seconds: float) -> int:
    """Wait for the nodes. Exit code 0 as soon as the cluster has them, 1 after `seconds`."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    deadline = time.monotonic() + seconds
    while (joined := sum(node["Alive"] for node in _nodes())) < required:
        if time.monotonic() >= deadline:
            print(f"{joined} of {required} nodes joined Ray within {seconds:g} s", file=sys.stderr)
            return 1
        time.sleep(_EVERY)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))

"""The cost of weight transfer by gloo, shared memory, disk and delta, by engines and by size. Prints one JSON line.

    python benchmarks/weight_transfer.py [--models 3M 69M] [--engines 1 2 4] [--rounds 5]

A learner of random float32 weights sends them, rounded to bfloat16, to engines that are processes of their own on this
machine and copy what they receive into a model, its digests verified. `delta` sends after a part of the weights
changed: all of them, or the last layers, half of the weights or a tenth, as where the others are frozen. Each round
goes through all ways in turn; figures are medians.

- `seconds_of_gloo`: of the transfer that the others are compared with; its bytes travel as between machines.
- `memory`, `disk`, `delta_100`, `delta_50`, `delta_10`: seconds over those of gloo.
- `memory_cpu`: CPU-seconds of learner and engines with shared memory, over those with gloo.
- `written_100`, ...: bytes that the delta wrote, over those of all weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import Tensor

from skyrl.learners.ranks import Rendezvous
from skyrl.weight_receiver.transfer_group import MemoryOffer
from skyrl.weight_sync.transports import (
    BroadcastTransport,
    DeltaTransport,
    FolderTransport,
    TransferRendezvous,
    WeightTransport,
)

DTYPE, DTYPE_BYTES = "bfloat16", 2
PATIENCE = 120.0
SHAPES = {
    # vocabulary, hidden, intermediate, layers
    "3M": (4096, 256, 704, 3),
    "69M": (4096, 768, 2048, 10),
    "0.5B": (32768, 1024, 4096, 24),
}
SHARES = (100, 50, 10)
"""Percent of the weights that change between two deltas."""


class Learner:
    """Random weights in the shapes of a transformer, of which a part changes at a time."""

    def __init__(self, model: str) -> None:
        vocabulary, hidden, intermediate, layers = SHAPES[model]
        shapes = {"embedding": (vocabulary, hidden)}
        for layer in range(layers):
            shapes |= {f"{layer}.{name}": (hidden, hidden) for name in "qkvo"}
            shapes |= {f"{layer}.{name}": (intermediate, hidden) for name in ("gate", "up", "down")}
        self.weights = {name: torch.randn(shape) for name, shape in shapes.items()}

    @property
    def sent_bytes(self) -> int:
        """Bytes of all weights as they travel."""
        return sum(map(_sent_bytes, self.weights.values()))

    def change(self, percent: int) -> None:
        """Other values for the last layers, up to this part of the weights."""
        left = self.sent_bytes * percent // 100
        for weight in reversed(self.weights.values()):
            left -= _sent_bytes(weight)
            if left < 0:
                return
            weight.neg_()

    async def export_weights(self, consume: Callable[[Iterator[tuple[str, Tensor]]], Any], **settings: Any) -> Any:
        return await asyncio.to_thread(consume, iter(self.weights.items()))

    async def shapes(self, **settings: Any) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(weight.shape)) for name, weight in self.weights.items()]


def _sent_bytes(weight: Tensor) -> int:
    return weight.numel() * DTYPE_BYTES


def engine(sets: Connection) -> None:
    """Loads each set of weights that comes, until None does."""
    torch.set_num_threads(1)
    model: dict[str, Tensor] = {}
    while incoming := sets.recv():
        with incoming.open() as weights:
            for name, tensor in weights:
                model.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        sets.send("loaded")


class Engines:
    """Processes that receive, in the place of the run's engines."""

    def __init__(self, count: int) -> None:
        processes = multiprocessing.get_context("spawn")
        pairs = [processes.Pipe() for _ in range(count)]
        self._ends = [parent_end for parent_end, _ in pairs]
        self._processes = [processes.Process(target=engine, args=(child_end,), daemon=True) for _, child_end in pairs]
        for process in self._processes:
            process.start()
        self.in_service = (None,) * count

    async def load_weights(self, incoming_sets: Sequence[Any], version: int, abort: Any = None) -> None:
        for end, incoming in zip(self._ends, incoming_sets, strict=True):
            end.send(incoming)
        await asyncio.gather(*(asyncio.to_thread(end.recv) for end in self._ends))

    def close(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.send(None)
            process.join()


async def seconds(transport: WeightTransport, learner: Any, engines: Any) -> float:
    """Seconds that one transfer takes."""
    started = time.perf_counter()
    await transport.send(learner, engines, 1)
    return time.perf_counter() - started


def cpu_seconds() -> float:
    """CPU-seconds so far of this process and its engines."""
    processes = [psutil.Process(), *psutil.Process().children()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def compared(model: str, count: int, rounds: int, folder: Path) -> dict[str, float]:
    """Ratios for one model and so many engines."""
    learner, engines = Learner(model), Engines(count)
    with Rendezvous(timeout=PATIENCE) as rendezvous:
        broadcast = BroadcastTransport(TransferRendezvous(*rendezvous.address, timeout=PATIENCE), dtype=DTYPE)
        disk, delta = FolderTransport(folder, dtype=DTYPE), DeltaTransport(folder, dtype=DTYPE)
        for transport in (broadcast, disk, delta):
            await seconds(transport, learner, engines)
        took: dict[str, list[float]] = {}
        written: dict[str, list[float]] = {}
        cpu = dict.fromkeys(("gloo", "memory"), 0.0)
        for _ in range(rounds):
            for way in cpu:
                began = cpu_seconds()
                with patch.object(MemoryOffer, "__enter__", lambda offer: offer) if way == "gloo" else nullcontext():
                    took.setdefault(way, []).append(await seconds(broadcast, learner, engines))
                cpu[way] += cpu_seconds() - began
            took.setdefault("disk", []).append(await seconds(disk, learner, engines))
            for percent in SHARES:
                learner.change(percent)
                before = set((folder / "delta").iterdir())
                took.setdefault(f"delta_{percent}", []).append(await seconds(delta, learner, engines))
                new = [path.stat().st_size for path in (folder / "delta").iterdir() if path not in before]
                written.setdefault(f"written_{percent}", []).append(sum(new) / learner.sent_bytes)
    engines.close()
    of_gloo = median(took.pop("gloo"))
    return {
        "seconds_of_gloo": round(of_gloo, 4),
        **{name: round(median(values) / of_gloo, 2) for name, values in took.items()},
        "memory_cpu": round(cpu["memory"] / cpu["gloo"], 2),
        **{name: round(median(values), 2) for name, values in written.items()},
    }


def main() -> None:
    """Compare the ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["3M", "69M"])
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ratios = {}
    for model in args.models:
        for count in args.engines:
            with tempfile.TemporaryDirectory() as folder:
                ratios[f"{model}_to_{count}"] = asyncio.run(compared(model, count, args.rounds, Path(folder)))
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()

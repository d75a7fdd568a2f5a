"""What checkpoints cost: the quick start with and without them, and digests beside xxhash alone. One JSON line.

    python examples/quickstart/prepare.py
    python benchmarks/checkpoints.py [--steps 40] [--rounds 2] [--megabytes 256]

The quick start trains `--steps` steps with its own `ckpt_interval` (20), asynchronously, and without checkpoints, in
turns, evaluation off. `added_cpu` and `added_wall` are what checkpoints add to the best round, as a share; `blocked_ms`
is how long the run waits for each save, `written_mb` what one has. `digest` compares the bytes per second of
`digest_of`, over the pieces of a state and over a file on the disk, with xxhash's own over one buffer and over the
same file read at once.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import xxhash

from skyrl.checkpoint.store import CheckpointStore
from skyrl.config import compose
from skyrl.experiments.ppo import BasePPOExp
from skyrl.storage.disk import Disk, digest_of


def trained(out: Path, steps: int, interval: int) -> dict[str, float]:
    """Seconds of a whole run of the quick start, and milliseconds that it waited for each of its saves."""
    words = {
        "trainer.max_training_steps": steps,
        "trainer.ckpt_interval": interval,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": "false",
        "trainer.run_path": out / "run",
        "trainer.ckpt_path": out / "checkpoints",
        "trainer.export_path": out / "exports",
    }
    overrides = [f"{name}={value}" for name, value in words.items()]
    experiment = BasePPOExp(compose(["examples/quickstart/grpo.toml"], overrides).config)
    wall, cpu = time.perf_counter(), time.process_time()
    experiment.run()
    rows = list(experiment.folder.metrics.read())
    waits = [row["timing/save_checkpoints"] for row in rows if "timing/save_checkpoints" in row]
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "blocked_ms": 1000 * sum(waits) / len(waits) if waits else 0.0,
    }


def runs(steps: int, rounds: int) -> dict[str, float]:
    """With checkpoints against without, in turns; the best round of each counts."""
    results_by_interval: dict[int, list[dict[str, float]]] = {20: [], -1: []}
    size = 0
    for _ in range(rounds):
        for interval, results in results_by_interval.items():
            with tempfile.TemporaryDirectory() as folder:
                results.append(trained(Path(folder), steps, interval))
                store = CheckpointStore(Path(folder) / "checkpoints")
                size = max([size, *(store.manifest(step).size for step in store.steps())])
    best = {
        interval: {name: min(result[name] for result in results) for name in results[0]}
        for interval, results in results_by_interval.items()
    }
    return {
        "steps": steps,
        "added_cpu": round(best[20]["cpu"] / best[-1]["cpu"] - 1, 4),
        "added_wall": round(best[20]["wall"] / best[-1]["wall"] - 1, 4),
        "blocked_ms": round(best[20]["blocked_ms"], 1),
        "wall_per_step_ms": round(1000 * best[-1]["wall"] / steps, 1),
        "written_mb": round(size / 1e6, 1),
    }


def digests(megabytes: int) -> dict[str, float]:
    """Gigabytes per second of process CPU time, the best of five."""
    numbers = torch.arange(megabytes * 250_000, dtype=torch.int32)
    arrays: list[Any] = [part.view(torch.uint8).numpy() for part in (numbers, *numbers.split(1_000_000))]
    views: list[memoryview] = [memoryview(array) for array in arrays]
    full_view, *chunks = views
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        disk.write("state", chunks)
        assert digest_of(chunks) == digest_of(disk.chunks("state")) == xxhash.xxh3_128_hexdigest(full_view)
        functions: dict[str, Any] = {
            "xxhash": lambda: xxhash.xxh3_128_hexdigest(full_view),
            "pieces": lambda: digest_of(chunks),
            "xxhash_file": lambda: xxhash.xxh3_128_hexdigest((Path(folder) / "state").read_bytes()),
            "file": lambda: digest_of(disk.chunks("state")),
        }
        speeds = {name: max(_speed(function, len(full_view)) for _ in range(5)) for name, function in functions.items()}
    return {
        **{f"{name}_gb_per_s": round(speed / 1e9, 2) for name, speed in speeds.items()},
        "pieces_to_xxhash": round(speeds["pieces"] / speeds["xxhash"], 3),
        "file_to_xxhash_file": round(speeds["file"] / speeds["xxhash_file"], 3),
    }


def _speed(function: Any, size: int) -> float:
    start = time.process_time()
    function()
    return size / (time.process_time() - start)


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description="Measure what checkpoints cost.")
    for name, default in (("steps", 40), ("rounds", 2), ("megabytes", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(json.dumps({"digest": digests(args.megabytes), "run": runs(args.steps, args.rounds)}))


if __name__ == "__main__":
    main()

"""The two sides of a comparison with a trainer of TRL's, each in a process of its own, in turns."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from skyrl.config import SupervisedConfig, compose
from skyrl.experiments.sft import SupervisedExp
from skyrl.tracking.tracker import LastMetrics, Trackers

Side = Callable[[Sequence[Path], Path, Path], dict[str, Any]]
"""What a side takes: CPU seconds, bytes and losses. It is given the models, the rows, and a folder of its own."""

AT_A_TIME = 8
"""Number of rows that TRL takes at a time, its default."""


def skyrl_takes(
    experiment: type[SupervisedExp],
    root: type[SupervisedConfig],
    settings: Mapping[str, Any],
    *,
    loss: str,
    other_model: Callable[[Any], object],
) -> dict[str, Any]:
    """What the loop of a supervised run takes, once the other model is loaded, as TRL has it before it trains. Losses
    are the metric `loss`.
    """
    losses: list[float] = []

    class Losses(LastMetrics):
        def log(self, step: int, metrics: Any) -> None:
            losses.extend([metrics[loss]] if loss in metrics else [])

    common = {"sampler": "sequential", "optimizer_config.weight_decay": 0.0, "device": "cpu"}
    run = experiment(compose([], {**common, **settings}, root).config)
    course = run.get_loop(Trackers([Losses()]))
    other_model(run)
    with run.shutdown:
        result = measured(lambda: asyncio.run(course.run()))
    run.resources.close()
    return {**result, "losses": losses}


def trl_takes(trainer: Any) -> dict[str, Any]:
    """What a trainer of TRL's takes."""
    result = measured(trainer.train)
    return {**result, "losses": [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]}


def in_order(trainer: type[Any]) -> type[Any]:
    """The trainer, which takes its rows in their order."""
    from torch.utils.data import SequentialSampler

    def sampler(self: Any, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    return type("InOrder", (trainer,), {"_get_train_sampler": sampler})


def measured(train: Callable[[], Any]) -> dict[str, Any]:
    """CPU seconds of the call, and the most bytes that it takes on top of those that the process has."""
    before, peak, ended = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.process_time()
    train()
    seconds = time.process_time() - began
    ended.set()
    watcher.join()
    return {"seconds": seconds, "bytes": peak - before}


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def compare(
    name: str,
    arguments: Sequence[str],
    sides: Mapping[str, Side],
    *,
    models: Callable[[Path], Sequence[Path]],
    rows: Iterable[Mapping[str, Any]],
    letters: int,
    about: Mapping[str, Any],
) -> None:
    """Prints one line for both sides of the benchmark `benchmarks.NAME`; with the name of a side and its files, that of
    this side. The best of the rounds counts (ROUNDS, 3).
    """
    disable_progress_bar()
    torch.set_num_threads(1)
    if arguments:
        side, *files, data, scratch = arguments
        print(json.dumps(sides[side]([Path(file) for file in files], Path(data), Path(scratch))))
        return
    results_by_side: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        model_folders, written = models(Path(folder)), Path(folder) / "rows.jsonl"
        written.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for number in range(int(os.environ.get("ROUNDS", "3"))):
            for side, results in results_by_side.items():
                own = Path(folder) / f"{side}-{number}"
                own.mkdir()
                command = [sys.executable, "-m", f"benchmarks.{name}", side, *map(str, (*model_folders, written, own))]
                process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results.append(json.loads(process.stdout.splitlines()[-1]))
    best = {side: min(result["seconds"] for result in results) for side, results in results_by_side.items()}
    least = {side: min(result["bytes"] for result in results) for side, results in results_by_side.items()}
    line = {
        "benchmark": name,
        **about,
        "letters": letters,
        **{f"{side}_letters_per_cpu_second": round(letters / seconds) for side, seconds in best.items()},
        "ratio": round(best["trl"] / best["skyrl"], 2),
        **{f"{side}_megabytes": round(size / 1e6) for side, size in least.items()},
        "memory_ratio": round(least["skyrl"] / least["trl"], 2),
        "losses": {
            side: [round(loss, 4) for loss in results[0]["losses"]] for side, results in results_by_side.items()
        },
    }
    print(json.dumps(line))

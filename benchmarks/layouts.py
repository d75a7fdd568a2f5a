"""Layouts of a learner on four CPU ranks: the order that `skyrl plan --fit` predicts, beside the measured one. A table,
and one JSON line.

    python benchmarks/layouts.py [--rounds 3]

A Qwen2 with random weights of 68 million parameters scores and trains on 32 rows of 256 tokens, four of each prompt, in
bfloat16. Six layouts take turns; each gets fresh processes in every round, and its figure is the median of the slowest
rank's seconds. The prediction is the estimate of `skyrl.config.step_time` at the rates that four ranks reach on this
machine when all of them compute, or send, at once. `pairs` is the share of pairs of layouts that it ranks as measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory import LARGE
from benchmarks.memory_peaks import Measured, batch_of, on_ranks, run_of, save_model, trainer_of

RANKS = 4
ROWS = 8
"""Rows of each data-parallel rank where all four are one."""

ROW = {"micro_train_batch_size_per_gpu": 1, "micro_forward_batch_size_per_gpu": 1}
ALL = {"micro_train_batch_size_per_gpu": 8, "micro_forward_batch_size_per_gpu": 8}
TWICE = {"micro_train_batch_size_per_gpu": 16, "micro_forward_batch_size_per_gpu": 16}

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "4 shards, 8 rows": ALL,
    "4 shards, 1 row": ROW,
    "4 shards, 8 rows, recomputed": ALL | {"recompute_activations": True},
    "4 shards, 1 row, recomputed": ROW | {"recompute_activations": True},
    "2 ranks cut matrices, 16 rows": TWICE | {"policy.tensor_parallel_size": 2},
    "2 ranks cut matrices, 1 row": ROW | {"policy.tensor_parallel_size": 2},
}


def setting(changes: Mapping[str, Any]) -> Measured:
    """The same rows for all ranks together, however many share them."""
    shared = changes.get("policy.tensor_parallel_size", 1)
    whole = {"compute_dtype": "bfloat16", "train_batch_size": 8, "policy_mini_batch_size": 8}
    return Measured(model=LARGE, changes=whole | dict(changes), ranks=RANKS, rows=ROWS * shared)


def trained(given: Measured, folder: str, ranks: Any) -> float:
    """Seconds of scoring and one update on this rank, after a first one."""
    from skyrl.learners.model_worker import token_budget
    from skyrl.learners.workers import PolicyWorker
    from skyrl.training.objective import policy_objective

    trainer = trainer_of(given, folder)
    worker = PolicyWorker(trainer, policy_objective(trainer.algorithm), ranks=ranks)
    [batch] = token_budget(trainer).plan([worker.objective.weigh(batch_of(given))])
    for _ in range(2):
        started = time.perf_counter()
        asyncio.run(worker.score(batch))
        asyncio.run(worker.update_share(batch))
        seconds = time.perf_counter() - started
    worker.close()
    return seconds


def speeds(given: Measured, folder: str, ranks: Any) -> tuple[float, float, float]:
    """Operations and bytes a second of this rank while all do the same, and seconds of a small collective."""
    import torch
    import torch.distributed as dist

    ranks.join(torch.device("cpu"))
    left, right = (torch.randn(*size, dtype=torch.bfloat16) for size in ((2048, 768), (768, 3072)))
    products = _seconds(lambda: left @ right)
    part = torch.zeros(2**22, dtype=torch.bfloat16)
    whole = torch.zeros(2**22 * RANKS, dtype=torch.bfloat16)
    gathering = _seconds(lambda: dist.all_gather_into_tensor(whole, part))
    one, four = torch.zeros(1), torch.zeros(RANKS)
    waiting = _seconds(lambda: dist.all_gather_into_tensor(four, one))
    return 2 * 2048 * 768 * 3072 / products, part.nbytes * (RANKS - 1) / gathering, waiting


def _seconds(call: Callable[[], object], times: int = 10) -> float:
    call()
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def predicted(rates: Any) -> dict[str, float]:
    """Seconds of each layout, as `skyrl plan --fit` estimates them."""
    from skyrl.config.step_time import training_seconds
    from skyrl.planning.model_shape import shape_of

    shape = shape_of(LARGE)
    return {
        name: training_seconds(run_of(setting(changes)), lambda path: shape, setting(changes).answer, rates)
        for name, changes in LAYOUTS.items()
    }


def main() -> None:
    """Measure in turns, and compare."""
    from skyrl.planning.roofline import Rates

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    took: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        save_model(LARGE, Path(folder))
        each = on_ranks(setting(ALL), folder, speeds)
        for _ in range(rounds):
            for name, changes in LAYOUTS.items():
                took[name].append(max(on_ranks(setting(changes), folder, trained)))
    flops, link, latency = (median(values) for values in zip(*each, strict=True))
    speed = {"flops": flops, "bandwidth": link, "link": link, "node_link": link, "host_link": link, "latency": latency}
    rates = Rates(**speed, overlaps=False)
    guesses, measured = predicted(rates), {name: median(values) for name, values in took.items()}
    print(f"{flops / 1e9:.0f} GFLOP/s, {link / 1e6:.0f} MB/s and {latency * 1e3:.2f} ms a collective on each rank")
    for name in sorted(LAYOUTS, key=lambda name: measured[name]):
        print(f"{name:32}{measured[name]:8.2f} s measured{guesses[name]:8.2f} s predicted")
    pairs = [(measured[a] < measured[b]) == (guesses[a] < guesses[b]) for a, b in combinations(LAYOUTS, 2)]
    seconds = {name: [round(measured[name], 3), round(guesses[name], 3)] for name in LAYOUTS}
    print(json.dumps({"benchmark": "layouts", "measured_and_predicted": seconds, "pairs": sum(pairs) / len(pairs)}))


if __name__ == "__main__":
    main()

"""Layouts of a learner on four CPU ranks: the order that `skyrl plan --fit` predicts, beside the measured one. A table,
and one JSON line.

    python benchmarks/layouts.py [--rounds 3]

A Qwen2 with random weights of 68 million parameters scores and trains on 32 rows of 256 tokens, four of each prompt, in
bfloat16. Six layouts take turns; each gets fresh processes in every round, and its figure is the median of the slowest
rank's seconds. The prediction is the estimate of `config.estimates.step_time` at the rates that four ranks reach on
this machine when all of them compute, or send, or start the operations of a layer, at once. `pairs` counts the pairs of
layouts that it ranks as measured, of those that the rounds tell apart: all seconds of one are below all of the other.
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

PASSES = 3
"""Passes of every token through a layer: one that scores, and an update's forward and backward pass."""

GATHERED = PASSES
"""Times that they need the weights of a layer."""

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
    defaults = {"compute_dtype": "bfloat16", "train_batch_size": 8, "policy_mini_batch_size": 8}
    return Measured(model=LARGE, changes=defaults | dict(changes), ranks=RANKS, rows=ROWS * shared)


def trained(case: Measured, folder: str, ranks: Any) -> float:
    """Seconds of scoring and one update on this rank, after a first one."""
    from skyrl.learners.schedule import StepSettings
    from skyrl.learners.workers.learning_worker import weighed
    from skyrl.learners.workers.model_worker import token_budget
    from skyrl.learners.workers.roles import PolicyWorker
    from skyrl.training.objective import policy_objective

    trainer = trainer_of(case, folder)
    worker, objective = PolicyWorker(trainer, ranks=ranks), policy_objective(trainer.algorithm)
    [batch] = token_budget(trainer).plan([weighed(objective, batch_of(case))])
    for _ in range(2):
        started = time.perf_counter()
        asyncio.run(worker.score(batch))
        asyncio.run(worker.forward_backward_share(batch, objective))
        asyncio.run(worker.optimizer_step(StepSettings()))
        seconds = time.perf_counter() - started
    worker.close()
    return seconds


def speeds(case: Measured, folder: str, ranks: Any) -> dict[str, float]:
    """Rates of this rank while all do the same: operations and bytes a second, and seconds of one token in a layer.
    Bytes are those of one layer's weights, gathered in 16 bits, and of its gradients, summed in 32. The latency is that
    of a collective between products, where it waits for the slowest rank.
    """
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    ranks.join(torch.device("cpu"))
    hidden, inner = case.model["hidden_size"], case.model["intermediate_size"]
    left, right = torch.randn(2048, hidden, dtype=torch.bfloat16), torch.randn(hidden, inner, dtype=torch.bfloat16)
    one, four = torch.zeros(1), torch.zeros(RANKS)
    products = _seconds(lambda: left @ right, times=50)
    together = _seconds(lambda: (left @ right, dist.all_gather_into_tensor(four, one)), times=50)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    part = torch.zeros(
        sum(parameter.numel() for parameter in model.model.layers[0].parameters()) // RANKS, dtype=torch.bfloat16
    )
    gathered, sums = torch.zeros(len(part) * RANKS, dtype=torch.bfloat16), torch.zeros(len(part))
    gradients = torch.zeros(len(part) * RANKS)
    gathering = _seconds(lambda: dist.all_gather_into_tensor(gathered, part))
    summing = _seconds(lambda: dist.reduce_scatter_tensor(sums, gradients))
    sent = (GATHERED * part.nbytes + sums.nbytes) * (RANKS - 1)

    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        scoring = _seconds(lambda: model(token, use_cache=False))
    passes = scoring + _seconds(lambda: model(token, use_cache=False).logits.sum().backward())
    return {
        "flops": 2 * len(left) * hidden * inner / products,
        "link": sent / (GATHERED * gathering + summing),
        "latency": together - products,
        "launches": passes / PASSES / case.model["num_hidden_layers"],
    }


def _seconds(call: Callable[[], object], times: int = 10) -> float:
    call()
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def predicted(rates: Any) -> dict[str, float]:
    """Seconds of each layout, as `skyrl plan --fit` estimates them."""
    from skyrl.config.estimates.step_time import training_seconds
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
        by_rank = on_ranks(setting(ALL), folder, speeds)
        for _ in range(rounds):
            for name, changes in LAYOUTS.items():
                took[name].append(max(on_ranks(setting(changes), folder, trained)))
    speed: dict[str, Any] = {name: median(rank[name] for rank in by_rank) for name in by_rank[0]}
    links = dict.fromkeys(("bandwidth", "node_link", "host_link"), speed["link"])
    guesses = predicted(Rates(**(speed | links), overlaps=False, gpus_per_node=RANKS))
    measured = {name: median(values) for name, values in took.items()}
    print(
        f"on each rank {speed['flops'] / 1e9:.0f} GFLOP/s, {speed['link'] / 1e6:.0f} MB/s, "
        f"{speed['latency'] * 1e3:.2f} ms a collective, {speed['launches'] * 1e3:.2f} ms a layer"
    )
    for name in sorted(LAYOUTS, key=lambda name: measured[name]):
        span = f"{min(took[name]):.2f} to {max(took[name]):.2f}"
        print(f"{name:32}{measured[name]:8.2f} s measured ({span}){guesses[name]:8.2f} s predicted")
    apart = [tuple(sorted(two, key=lambda name: measured[name])) for two in combinations(LAYOUTS, 2)]
    apart = [(a, b) for a, b in apart if max(took[a]) < min(took[b])]
    seconds = {name: [round(measured[name], 3), round(guesses[name], 3)] for name in LAYOUTS}
    pairs = [sum(guesses[a] < guesses[b] for a, b in apart), len(apart)]
    print(json.dumps({"benchmark": "layouts", "measured_and_predicted": seconds, "pairs": pairs}))


if __name__ == "__main__":
    main()

"""CPU-seconds of several clients' adapters in one pass, beside one client after the other. One JSON line.

    python benchmarks/many_adapters.py [clients] [rounds]

A random Qwen2 of 3 million parameters and 8 clients with adapters of rank 4 to 32 on all its layers, one torch thread,
process CPU time; the ways take turns, and the best round counts. A round is a forward and backward pass of every client
and a step of Adam of each.

`short`: one row of 64 tokens per client, which leaves a pass almost empty. `full`: each client's rows fill a pass
of 512 tokens alone. Each has the seconds of both ways and their ratio. Joining rows saves only what a pass costs
whatever its size; `gflops` is the rate of the products of the model's layers, which bounds the ratio: the faster the
products, the larger the share of what is saved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from skyrl.config import ModelConfig, RefConfig, TrainerConfig
from skyrl.training_service.backend import AdamSettings, AdapterSpec, Datum, PassRequest
from skyrl.training_service.model_bank import ModelBank

TOKENS, FULL, VOCABULARY = 64, 512, 260
RANKS = (4, 8, 16, 32)
STEP = AdamSettings(lr=1e-3)


def stored_model(folder: Path) -> Path:
    """The quick start's architecture, with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def bank_on(model: Path) -> ModelBank:
    """A bank on one thread of the CPU."""
    table = ModelConfig(path=str(model))
    trainer = TrainerConfig(ref=RefConfig(model=table), device="cpu", compute_dtype="float32", attention="sdpa")
    return ModelBank(trainer, trainer.ref, tokens_per_pass=FULL)


def requests(clients: int, rows: int) -> list[PassRequest]:
    """A pass of each client over `rows` rows."""
    random = np.random.default_rng(0)
    passes = []
    for number in range(clients):
        ids = random.integers(0, VOCABULARY, (rows, TOKENS + 1))
        ones = np.ones(TOKENS, np.float32)
        data = [Datum(tokens=row[:-1], inputs={"target_tokens": row[1:], "weights": ones}) for row in ids]
        passes.append(PassRequest(model_id=str(number), data=data, loss="cross_entropy"))
    return passes


def seconds(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU-seconds of the best round of each way, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if number:  # the first one warms up
                times[name].append(time.process_time() - start)
    return {name: round(min(values), 4) for name, values in times.items()}


def compared(bank: ModelBank, requests: list[PassRequest], rounds: int) -> dict[str, float]:
    """Both ways and their ratio."""

    def pass_and_step(some: list[PassRequest]) -> None:
        for outcome in bank.passes(some):
            if isinstance(outcome, Exception):
                raise outcome
        for request in some:
            bank.optimizer_step(request.model_id, STEP)

    def one_after_the_other() -> None:
        for request in requests:
            pass_and_step([request])

    functions = {"together": lambda: pass_and_step(requests), "one_after_the_other": one_after_the_other}
    result = seconds(functions, rounds)
    return result | {"ratio": round(result["one_after_the_other"] / result["together"], 2)}


def gflops() -> float:
    """Rate of a product of a full pass with a feed-forward matrix, in 10^9 operations a second."""
    x, weight = torch.randn(FULL, 256), torch.randn(704, 256)
    best = seconds({"product": lambda: [torch.nn.functional.linear(x, weight) for _ in range(50)]}, 3)
    return round(50 * 2 * x.numel() * 704 / best["product"] / 1e9, 1)


def main(clients: int = 8, rounds: int = 5) -> None:
    """Prints the comparison."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        bank = bank_on(stored_model(Path(folder)))
    for number in range(clients):
        bank.create(str(number), AdapterSpec(rank=RANKS[number % len(RANKS)], seed=number))
    print(
        json.dumps(
            {
                "clients": clients,
                "short": compared(bank, requests(clients, 1), rounds),
                "full": compared(bank, requests(clients, FULL // TOKENS), rounds),
                "gflops": gflops(),
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

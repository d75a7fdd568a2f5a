"""Tokens per CPU-second and peak memory of DPO beside TRL's DPOTrainer: one JSON line.

    python -m venv trl && trl/bin/pip install trl -e '.[train]'        TRL is not among skyrl's packages
    trl/bin/python -m benchmarks.preference

Same model (a random Qwen2 of 4.2M parameters), pairs, order, batches of 16 pairs, AdamW, float32, one torch thread, and
a frozen copy as the reference. Lengths of prompts and answers are log-normal: most are short, some have hundreds of
tokens. TRL takes 8 pairs at a time, its default; skyrl packs up to MICRO tokens into a micro-batch (4,096). Each side
runs in a process of its own, in turns, and the best of the rounds counts (ROUNDS, 3): CPU time of the training loop,
and the memory that it takes on top of what the process had before it. The losses of all steps are reported.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils.logging import disable_progress_bar

STEPS, BATCH, LR = 3, 16, 1e-4
ROUNDS = int(os.environ.get("ROUNDS", "3"))
MICRO = int(os.environ.get("MICRO", "4096"))
AT_A_TIME = 8
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def rows_of() -> list[dict[str, str]]:
    """Pairs of random letters."""
    rng = random.Random(0)

    def text(most: int) -> str:
        return "".join(rng.choices("abcdefgh", k=min(most, max(8, int(rng.lognormvariate(4.0, 1.1))))))

    return [{"prompt": text(450), "chosen": text(500), "rejected": text(500)} for _ in range(STEPS * BATCH)]


def skyrl_side(model: Path, rows: Path, scratch: Path) -> dict[str, Any]:
    """What skyrl's loop takes."""
    from skyrl.config import PreferenceConfig, compose
    from skyrl.experiments.preference import PreferenceExp
    from skyrl.tracking.tracker import LastMetrics, Trackers

    found: list[float] = []

    class Losses(LastMetrics):
        def log(self, step: int, metrics: Any) -> None:
            found.extend([metrics["train/loss"]] if "train/loss" in metrics else [])

    settings = {
        "model.path": str(model),
        "train_datasets": (str(rows),),
        "sampler": "sequential",
        "batch_size": BATCH,
        "max_tokens_per_microbatch": MICRO,
        "optimizer_config.lr": LR,
        "optimizer_config.weight_decay": 0.0,
        "device": "cpu",
        "run_path": str(scratch / "run"),
    }
    experiment = PreferenceExp(compose([], settings, PreferenceConfig).config)
    course = experiment.get_loop(Trackers([Losses()]))
    experiment.reference  # noqa: B018 - loads it, as TRL has before it trains
    with experiment.shutdown:
        result = measured(lambda: asyncio.run(course.run()))
    experiment.held.close()
    return {**result, "losses": found}


def trl_side(model: Path, rows: Path, scratch: Path) -> dict[str, Any]:
    """The same of TRL's."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from benchmarks.trl_settings import PLAIN

    class InOrder(DPOTrainer):  # type: ignore[misc]  # of a package that is not installed beside the others
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    chats = [{key: [{"role": role, "content": line[key]}] for key, role in ROLES.items()} for line in lines]
    settings = DPOConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=AT_A_TIME,
        gradient_accumulation_steps=BATCH // AT_A_TIME,
        learning_rate=LR,
        max_length=None,
        **PLAIN,
    )
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        args=settings,
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    result = measured(trainer.train)
    return {**result, "losses": [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]}


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


SIDES: dict[str, Callable[[Path, Path, Path], dict[str, Any]]] = {"skyrl": skyrl_side, "trl": trl_side}


def main(arguments: Sequence[str]) -> None:
    """Prints one line for both sides; with the name of a side and its files, that of this side."""
    disable_progress_bar()
    torch.set_num_threads(1)
    if arguments:
        name, *files = arguments
        print(json.dumps(SIDES[name](*map(Path, files))))
        return
    from benchmarks.sft import make_model

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        model, rows = Path(folder) / "model", Path(folder) / "rows.jsonl"
        make_model(model)
        rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of()), encoding="utf-8")
        for number in range(ROUNDS):
            for name, results in found.items():
                scratch = Path(folder) / f"{name}-{number}"
                scratch.mkdir()
                command = [sys.executable, "-m", "benchmarks.preference", name, str(model), str(rows), str(scratch)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
    best = {name: min(result["seconds"] for result in results) for name, results in found.items()}
    least = {name: min(result["bytes"] for result in results) for name, results in found.items()}
    tokens = sum(2 * len(row["prompt"]) + len(row["chosen"]) + len(row["rejected"]) for row in rows_of())
    result = {
        "benchmark": "preference",
        "steps": STEPS,
        "pairs": BATCH,
        "letters": tokens,
        **{f"{name}_letters_per_cpu_second": round(tokens / seconds) for name, seconds in best.items()},
        "ratio": round(best["trl"] / best["skyrl"], 2),
        **{f"{name}_megabytes": round(size / 1e6) for name, size in least.items()},
        "memory_ratio": round(least["skyrl"] / least["trl"], 2),
        "losses": {name: [round(loss, 4) for loss in results[0]["losses"]] for name, results in found.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])

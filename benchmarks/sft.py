"""Tokens per CPU-second of supervised fine-tuning beside TRL's SFTTrainer: one JSON line.

    python -m venv trl && trl/bin/pip install trl -e '.[train]'        TRL is not among skyrl's packages
    trl/bin/python benchmarks/sft.py
    python benchmarks/sft.py --sides skyrl                             without TRL

Same model (a random Qwen2 of 4.2M parameters), rows, order, batches of 32 rows, AdamW, float32, one torch thread; every
token but the first is learned. `heavy`: lengths are log-normal, from 8 to 1024 tokens; `short`: from 16 to 48. TRL
takes 8 rows at a time, its default (padded: its packing needs FlashAttention to keep rows apart), and of the short ones
all 32, too, of which the better counts; no recomputation. skyrl packs up to 4,096 tokens into a micro-batch. What
counts is the process's CPU time of the training loop. Both sides take turns, and the best of the rounds counts (ROUNDS,
3). The losses of the first step are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from skyrl.config import SFTConfig, compose
from skyrl.experiments.sft import SFTExp
from skyrl.starter.tiny_chat import byte_tokenizer, save
from skyrl.tracking.tracker import LastMetrics, Trackers

STEPS, BATCH, LR = 4, 32, 1e-3
ROUNDS = int(os.environ.get("ROUNDS", "3"))
LONGEST = 1024
AT_A_TIME = {"heavy": (8,), "short": (8, BATCH)}
Rows = Sequence[Sequence[int]]


def rows_of(case: str) -> Rows:
    """Token ids of every row of the run."""
    rng = random.Random(0)

    def length() -> int:
        return min(LONGEST, max(8, int(rng.lognormvariate(4.0, 1.1)))) if case == "heavy" else rng.randint(16, 48)

    return [[rng.randrange(256) for _ in range(length())] for _ in range(STEPS * BATCH)]


def make_model(folder: Path) -> None:
    """Random, since speed does not depend on what it says."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(length=LONGEST)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save(Qwen2ForCausalLM(config), tokenizer, folder)


def skyrl_seconds(model: Path, rows: Rows, scratch: Path) -> tuple[float, float]:
    """CPU seconds of the loop, and the loss of the first step."""
    data = scratch / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": list(row)}) + "\n" for row in rows))
    settings = {
        "model.path": str(model),
        "train_datasets": (str(data),),
        "sampler": "sequential",
        "batch_size": BATCH,
        "max_tokens_per_microbatch": 4096,
        "optimizer_config.lr": LR,
        "optimizer_config.weight_decay": 0.0,
        "device": "cpu",
        "run_path": str(scratch / "run"),
    }
    experiment = SFTExp(compose([], settings, SFTConfig).config)
    first = _First()
    course = experiment.get_loop(Trackers([first]))
    began = time.process_time()
    with experiment.shutdown:
        asyncio.run(course.run())
    seconds = time.process_time() - began
    experiment.resources.close()
    return seconds, first.loss


class _First(LastMetrics):
    loss = 0.0

    def log(self, step: int, metrics: Any) -> None:
        self.loss = self.loss or metrics.get("train/loss", 0.0)


def trl_seconds(model: Path, rows: Rows, scratch: Path, at_a_time: int) -> tuple[float, float]:
    """The same of TRL."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig as TRLConfig
    from trl import SFTTrainer

    from benchmarks.trl_settings import PLAIN

    class InOrder(SFTTrainer):  # type: ignore[misc]  # of a package that is not installed beside the others
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(range(len(rows)))

    settings = TRLConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=at_a_time,
        gradient_accumulation_steps=BATCH // at_a_time,
        learning_rate=LR,
        max_grad_norm=1.0,
        max_length=LONGEST,
        **PLAIN,
    )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    trainer = InOrder(
        model=loaded,
        args=settings,
        train_dataset=Dataset.from_dict({"input_ids": [list(row) for row in rows]}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    return seconds, float(trainer.state.log_history[0]["loss"])


def main() -> None:
    """Prints one line for all cases."""
    parser = argparse.ArgumentParser(description="Supervised fine-tuning, alone or beside TRL.")
    parser.add_argument("--sides", default="skyrl,trl")
    sides = parser.parse_args().sides.split(",")
    disable_progress_bar()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "sft", "steps": STEPS, "batch": BATCH}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        for case in ("heavy", "short"):
            rows = rows_of(case)
            tokens = sum(map(len, rows))
            skyrl_results: list[tuple[float, float]] = []
            trl_results: list[tuple[float, float]] = []
            for number in range(ROUNDS):
                scratch = Path(folder) / f"{case}-{number}"
                scratch.mkdir()
                skyrl_results.append(skyrl_seconds(model, rows, scratch))
                sizes = AT_A_TIME[case] if "trl" in sides else ()
                trl_results += [trl_seconds(model, rows, scratch, size) for size in sizes]
            best = min(skyrl_results)
            result[case] = {"tokens": tokens, "skyrl_tokens_per_cpu_second": round(tokens / best[0])}
            result[case]["first_losses"] = [round(best[1], 4)]
            if trl_results:
                trl = min(trl_results)
                result[case]["trl_tokens_per_cpu_second"] = round(tokens / trl[0])
                result[case]["ratio"] = round(trl[0] / best[0], 2)
                result[case]["first_losses"].append(round(trl[1], 4))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

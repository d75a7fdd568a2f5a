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

import json
import os
import random
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.trl_sides import AT_A_TIME, compare, in_order, skyrl_takes, trl_takes

STEPS, BATCH, LR = 3, 16, 1e-4
MICRO = int(os.environ.get("MICRO", "4096"))
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def rows_of() -> list[dict[str, str]]:
    """Pairs of random letters."""
    rng = random.Random(0)

    def text(most: int) -> str:
        return "".join(rng.choices("abcdefgh", k=min(most, max(8, int(rng.lognormvariate(4.0, 1.1))))))

    return [{"prompt": text(450), "chosen": text(500), "rejected": text(500)} for _ in range(STEPS * BATCH)]


def make_models(folder: Path) -> tuple[Path]:
    """The policy, of which a copy is the reference."""
    from benchmarks.sft import make_model

    make_model(folder / "model")
    return (folder / "model",)


def skyrl_side(models: Sequence[Path], rows: Path, scratch: Path) -> dict[str, Any]:
    """What skyrl's loop takes."""
    from skyrl.config import PreferenceConfig
    from skyrl.experiments.preference import PreferenceExp

    (model,) = models
    settings = {
        "model.path": str(model),
        "train_datasets": (str(rows),),
        "batch_size": BATCH,
        "max_tokens_per_microbatch": MICRO,
        "optimizer_config.lr": LR,
        "run_path": str(scratch / "run"),
    }
    loss, other = "train/loss", attrgetter("reference")
    return skyrl_takes(PreferenceExp, PreferenceConfig, settings, loss=loss, other_model=other)


def trl_side(models: Sequence[Path], rows: Path, scratch: Path) -> dict[str, Any]:
    """The same of TRL's."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from benchmarks.trl_settings import PLAIN

    (model,) = models
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
    trainer = in_order(DPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        args=settings,
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    return trl_takes(trainer)


if __name__ == "__main__":
    compare(
        "preference",
        sys.argv[1:],
        {"skyrl": skyrl_side, "trl": trl_side},
        models=make_models,
        rows=rows_of(),
        letters=sum(2 * len(row["prompt"]) + len(row["chosen"]) + len(row["rejected"]) for row in rows_of()),
        about={"steps": STEPS, "pairs": BATCH},
    )

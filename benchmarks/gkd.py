"""Tokens per CPU-second and peak memory of off-policy distillation beside TRL's GKDTrainer: one JSON line.

    python -m venv trl && trl/bin/pip install trl -e '.[train]'        TRL is not among skyrl's packages
    trl/bin/python -m benchmarks.gkd

Same student and teacher (random Qwen2 models of 4.2M parameters at 4,096 words, or WORDS), rows, order, batches of 16
rows, AdamW, float32, one torch thread, and the generalised Jensen-Shannon divergence at beta 0.5 over the whole
vocabulary, on the last message of each row (GKD's `lmbda` is 0: nothing is sampled). Lengths of prompts and answers are
log-normal. TRL takes 8 rows at a time, its default; skyrl packs up to 4,096 tokens into a micro-batch (MICRO). Each
side runs in a process of its own, in turns, and the best of the rounds counts (ROUNDS, 3): CPU time of the training
loop, and the memory that it takes on top of what the process had before it. The losses of all steps are reported.
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

STEPS, BATCH, LR, BETA = 3, 16, 1e-4, 0.5
MICRO = int(os.environ.get("MICRO", "4096"))
WORDS = int(os.environ.get("WORDS", "4096"))


def rows_of() -> list[dict[str, list[dict[str, str]]]]:
    """Chats of random letters."""
    rng = random.Random(0)

    def turn(role: str, most: int) -> dict[str, str]:
        length = min(most, max(8, int(rng.lognormvariate(4.0, 1.1))))
        return {"role": role, "content": "".join(rng.choices("abcdefgh", k=length))}

    return [{"messages": [turn("user", 450), turn("assistant", 500)]} for _ in range(STEPS * BATCH)]


def make_models(folder: Path) -> tuple[Path, Path]:
    """A student, and a teacher with other weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from benchmarks.sft import make_model

    student, teacher = folder / "student", folder / "teacher"
    make_model(student)
    shape = AutoConfig.from_pretrained(student)
    shape.vocab_size = WORDS
    for seed, model_folder in enumerate((student, teacher)):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(shape).save_pretrained(model_folder)
    AutoTokenizer.from_pretrained(student).save_pretrained(teacher)
    return student, teacher


def skyrl_side(models: Sequence[Path], rows: Path, scratch: Path) -> dict[str, Any]:
    """What skyrl's loop takes."""
    from skyrl.config import SFTConfig
    from skyrl.experiments.sft import SFTExp

    student, teacher = models
    settings = {
        "model.path": str(student),
        "distillation.teacher_path": str(teacher),
        "distillation.beta": BETA,
        "distillation.task_coef": 0.0,
        "train_datasets": (str(rows),),
        "batch_size": BATCH,
        "max_tokens_per_microbatch": MICRO,
        "optimizer_config.lr": LR,
        "run_path": str(scratch / "run"),
    }
    loss, other = "train/distillation_loss", attrgetter("teacher")
    return skyrl_takes(SFTExp, SFTConfig, settings, loss=loss, other_model=other)


def trl_side(models: Sequence[Path], rows: Path, scratch: Path) -> dict[str, Any]:
    """The same of TRL's."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from benchmarks.trl_settings import PLAIN

    settings = GKDConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=AT_A_TIME,
        gradient_accumulation_steps=BATCH // AT_A_TIME,
        learning_rate=LR,
        lmbda=0.0,
        beta=BETA,
        **PLAIN,
    )
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa") for path in models
    )
    trainer = in_order(GKDTrainer)(
        model=student,
        teacher_model=teacher,
        args=settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(models[0]),
    )
    return trl_takes(trainer)


if __name__ == "__main__":
    compare(
        "gkd",
        sys.argv[1:],
        {"skyrl": skyrl_side, "trl": trl_side},
        models=make_models,
        rows=rows_of(),
        letters=sum(len(message["content"]) for row in rows_of() for message in row["messages"]),
        about={"words": WORDS, "steps": STEPS, "rows": BATCH},
    )

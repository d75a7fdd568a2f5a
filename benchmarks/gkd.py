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

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.preference import measured

STEPS, BATCH, LR, BETA = 3, 16, 1e-4, 0.5
ROUNDS = int(os.environ.get("ROUNDS", "3"))
MICRO = int(os.environ.get("MICRO", "4096"))
WORDS = int(os.environ.get("WORDS", "4096"))
AT_A_TIME = 8


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
    for seed, place in enumerate((student, teacher)):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(shape).save_pretrained(place)
    AutoTokenizer.from_pretrained(student).save_pretrained(teacher)
    return student, teacher


def skyrl_side(student: Path, teacher: Path, rows: Path, scratch: Path) -> dict[str, Any]:
    """What skyrl's loop takes."""
    from skyrl.config import SFTConfig, compose
    from skyrl.experiments.sft import SFTExp
    from skyrl.tracking.tracker import LastMetrics, Trackers

    found: list[float] = []

    class Losses(LastMetrics):
        def log(self, step: int, metrics: Any) -> None:
            name = "train/distillation_loss"
            found.extend([metrics[name]] if name in metrics else [])

    settings = {
        "model.path": str(student),
        "distillation.teacher_path": str(teacher),
        "distillation.beta": BETA,
        "distillation.task_coef": 0.0,
        "train_datasets": (str(rows),),
        "sampler": "sequential",
        "batch_size": BATCH,
        "max_tokens_per_microbatch": MICRO,
        "optimizer_config.lr": LR,
        "optimizer_config.weight_decay": 0.0,
        "device": "cpu",
        "run_path": str(scratch / "run"),
    }
    experiment = SFTExp(compose([], settings, SFTConfig).config)
    course = experiment.get_loop(Trackers([Losses()]))
    experiment.teacher  # noqa: B018 - loads it, as TRL has before it trains
    with experiment.shutdown:
        result = measured(lambda: asyncio.run(course.run()))
    experiment.held.close()
    return {**result, "losses": found}


def trl_side(student: Path, teacher: Path, rows: Path, scratch: Path) -> dict[str, Any]:
    """The same of TRL's."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from benchmarks.trl_settings import PLAIN

    class InOrder(GKDTrainer):  # type: ignore[misc]  # of a package that is not installed beside the others
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    settings = GKDConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=AT_A_TIME,
        gradient_accumulation_steps=BATCH // AT_A_TIME,
        learning_rate=LR,
        lmbda=0.0,
        beta=BETA,
        **PLAIN,
    )
    student_model, teacher_model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        for path in (student, teacher)
    )
    trainer = InOrder(
        model=student_model,
        teacher_model=teacher_model,
        args=settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(student),
    )
    result = measured(trainer.train)
    return {**result, "losses": [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]}


SIDES: dict[str, Callable[[Path, Path, Path, Path], dict[str, Any]]] = {"skyrl": skyrl_side, "trl": trl_side}


def main(arguments: Sequence[str]) -> None:
    """Prints one line for both sides; with the name of a side and its files, that of this side."""
    disable_progress_bar()
    torch.set_num_threads(1)
    if arguments:
        name, *files = arguments
        print(json.dumps(SIDES[name](*map(Path, files))))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        models, rows = make_models(Path(folder)), Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of()), encoding="utf-8")
        for number in range(ROUNDS):
            for name, results in found.items():
                scratch = Path(folder) / f"{name}-{number}"
                scratch.mkdir()
                command = [sys.executable, "-m", "benchmarks.gkd", name, *map(str, (*models, rows, scratch))]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
    best = {name: min(result["seconds"] for result in results) for name, results in found.items()}
    least = {name: min(result["bytes"] for result in results) for name, results in found.items()}
    letters = sum(len(message["content"]) for row in rows_of() for message in row["messages"])
    result = {
        "benchmark": "gkd",
        "words": WORDS,
        "steps": STEPS,
        "rows": BATCH,
        "letters": letters,
        **{f"{name}_letters_per_cpu_second": round(letters / seconds) for name, seconds in best.items()},
        "ratio": round(best["trl"] / best["skyrl"], 2),
        **{f"{name}_megabytes": round(size / 1e6) for name, size in least.items()},
        "memory_ratio": round(least["skyrl"] / least["trl"], 2),
        "losses": {name: [round(loss, 4) for loss in results[0]["losses"]] for name, results in found.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])

"""CPU-seconds of a GRPO step of the quick start's task, beside TRL's GRPOTrainer: one JSON line.

    make demo                                   the quick start's model and data, once
    pip install trl -c constraints.txt
    python benchmarks/grpo_step.py [STEPS] [SEED ...]

Same model, prompts, reward, batch (16 prompts, 8 answers of at most 12 tokens), optimizer, schedule, float32, one torch
thread. Both sides run in processes of their own and take turns step for step, so that other work on the machine slows
both. What counts is the process's CPU time of a whole step: sampling, reward, update, weight transfer, metrics and
samples written by skyrl. Orders of prompts and random numbers differ. `to_0.8` is the first step at which the mean
reward of the last five is 0.8, where STEPS (20) are enough to get there.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

ROOT = Path(__file__).parents[1]
BASE = ROOT / "runs" / "quickstart-base"
WARM_UP = 2
"""Steps of each side that do not count."""


def main() -> None:
    """Runs each seed on both sides and prints the medians over seeds."""
    steps, seeds = int((sys.argv[1:] or ["20"])[0]), [int(seed) for seed in sys.argv[2:]] or [0]
    rounds = [one_seed(steps, seed) for seed in seeds]
    ours, theirs = ([each[side] for each in rounds] for side in ("skyrl", "trl"))
    ratios = [b["cpu_seconds"] / a["cpu_seconds"] for a, b in zip(ours, theirs, strict=True)]
    memory = median(a["peak_mb"] / b["peak_mb"] for a, b in zip(ours, theirs, strict=True))
    print(
        json.dumps(
            {
                "benchmark": "grpo_step",
                "steps": steps,
                "seeds": seeds,
                "skyrl": ours,
                "trl": theirs,
                "ratio": round(median(ratios), 2),
                "memory_ratio": round(memory, 2),
            }
        )
    )


def one_seed(steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """Both sides, step by step in turns."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Side(name, steps, seed, folder) for name in ("skyrl", "trl")}
        for _ in range(steps):
            for side in sides.values():
                side.step()
        return {name: side.result() for name, side in sides.items()}


class Side:
    """One trainer in a process of its own."""

    def __init__(self, name: str, steps: int, seed: int, folder: str) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", name, str(steps), str(seed), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
            text=True,
        )
        self._steps: list[dict[str, float]] = []

    def step(self) -> None:
        """Lets it take one step, and waits for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"cpu'):
                self._steps.append(json.loads(line))
                return
        raise SystemExit(f"{self._name} ended: see why with VERBOSE=1")

    def result(self) -> dict[str, Any]:
        """Medians of what it reported."""
        self._process.communicate()
        counted = [each["cpu"] for each in self._steps[WARM_UP:]]
        rewards = [each["reward"] for each in self._steps]
        enough = (n for n in range(5, len(rewards) + 1) if sum(rewards[n - 5 : n]) >= 4.0)
        return {
            "cpu_seconds": round(median(counted), 3),
            "to_0.8": next(enough, None),
            "last_reward": round(rewards[-1], 3),
            "peak_mb": round(max(each["peak_mb"] for each in self._steps)),
        }


class Turns:
    """The side of the process: reports a step and waits for its next turn."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes elsewhere
        self._began = 0.0

    def wait(self) -> None:
        """Returns when it is this side's turn."""
        sys.stdin.readline()
        self._began = time.process_time()

    def report(self, reward: float) -> None:
        """The step that ends here."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        taken = {"cpu": time.process_time() - self._began, "reward": reward, "peak_mb": peak}
        self._out.write(json.dumps(taken) + "\n")
        self._out.flush()


def run_skyrl(steps: int, seed: int, folder: Path) -> None:
    """The quick start's file, without evaluation and checkpoints."""
    from skyrl.config import SkyRLTrainConfig, compose
    from skyrl.experiments.ppo import BasePPOExp
    from skyrl.tracking.tracker import Tracker, Trackers

    class TakesTurns:
        """A tracker: step 0 is logged before the first step, and each step when it is over."""

        def __init__(self) -> None:
            self._turns = Turns()

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step:
                self._turns.report(metrics["reward/avg_raw_reward"])
            if step < steps:
                self._turns.wait()

        def close(self) -> None:
            """Does nothing: no resource is held."""

    class Measured(BasePPOExp):
        def get_tracker(self, first_step: int) -> Tracker:
            return Trackers([super().get_tracker(first_step), TakesTurns()])

    changes = {
        "trainer.max_training_steps": steps,
        "trainer.seed": seed,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": 0,
        "trainer.run_path": str(folder / "run"),
    }
    os.chdir(ROOT)
    Measured(compose(["examples/quickstart/grpo.toml"], changes, SkyRLTrainConfig).config).run()


def run_trl(steps: int, seed: int, folder: Path) -> None:
    """The same task, model and settings in TRL."""
    import pyarrow.parquet
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    turns, rewards = Turns(), [0.0]

    class TakesTurns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.report(rewards[0])

    def sorted_exactly(completions: Sequence[Any], ground_truth: Sequence[str], **_: Any) -> list[float | None]:
        right = zip(completions, ground_truth, strict=True)
        found: list[float | None] = [float(said[0]["content"].strip() == word) for said, word in right]
        rewards[0] = found.count(1.0) / len(found)
        return found

    rows = pyarrow.parquet.read_table(BASE / "train.parquet").to_pylist()
    data = [{"prompt": row["prompt"], "ground_truth": row["reward_spec"]["ground_truth"]} for row in rows]
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=12,
        temperature=1.0,
        beta=0.0,
        learning_rate=2e-4,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=10,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_steps=steps,
        seed=seed,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
    )
    loaded = AutoModelForCausalLM.from_pretrained(BASE / "model", dtype=torch.float32)
    trainer = GRPOTrainer(
        model=loaded,
        reward_funcs=sorted_exactly,
        args=settings,
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(BASE / "model"),
        callbacks=[TakesTurns()],
    )
    trainer.train()


def arguments() -> Iterator[Any]:
    """Steps, seed and folder of the side that this process is."""
    yield int(sys.argv[3])
    yield int(sys.argv[4])
    folder = Path(sys.argv[5]) / sys.argv[2]
    folder.mkdir()
    yield folder


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        (run_skyrl if sys.argv[2] == "skyrl" else run_trl)(*arguments())
    else:
        main()

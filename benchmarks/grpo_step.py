"""CPU-seconds of a GRPO step of the quick start's task, beside a bare loop and TRL's GRPOTrainer: one JSON line.

    make demo                                   the quick start's model and data, once
    pip install trl -c constraints.txt
    python benchmarks/grpo_step.py [--sides skyrl,bare,trl] [--against ROOT] [--file FILE] [STEPS] [SEED ...]

Same model, prompts, reward, batch (16 prompts, 8 answers of at most 12 tokens), optimizer, schedule, float32, one torch
thread. Each side runs in a process of its own, and they take turns step for step, so that other work on the machine
slows all of them. What counts is the process's CPU time of a whole step: sampling, reward, update, weight transfer,
metrics and samples written by skyrl. Orders of prompts and random numbers differ. `bare` is `bare_grpo.py`, the same
work without a framework; `--against` adds skyrl as it is in another checkout; `--sides skyrl,ray` is skyrl beside
itself with a learner and an engine on Ray, all of whose processes count, Ray's own too; `--file` is another run for
these sides. `to_0.8` is the first step at which the mean reward of the last five is 0.8, where STEPS (20) are enough to
get there. `ratios` are the medians over seeds of each other side's CPU-seconds per step over ours; `phases` says where
ours spends them, and `processes` in which process, on Ray. `arithmetic` is the time of all passes through the model,
draws of tokens and optimizer steps, without those of the canary.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

ROOT = Path(__file__).parents[1]
CODE = Path(os.environ.get("SKYRL_CODE", ROOT))
"""The checkout whose skyrl is measured."""

FILE = os.environ.get("GRPO_FILE", "examples/quickstart/grpo.toml")
BASE = ROOT / "runs" / "quickstart-base"
WARM_UP = 2
"""Steps of each side that do not count."""


def main() -> None:
    """Runs each seed on all sides and prints the medians over seeds."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--sides", default="skyrl,bare,trl")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--file", default=FILE, help="what skyrl trains; other sides know the quick start only")
    parser.add_argument("steps", type=int, nargs="?", default=20)
    parser.add_argument("seeds", type=int, nargs="*", default=[0])
    args = parser.parse_args()
    os.environ["GRPO_FILE"] = args.file
    sources = dict.fromkeys(args.sides.split(","), CODE) | ({"against": args.against} if args.against else {})
    rounds = [one_seed(sources, args.steps, seed) for seed in args.seeds]
    others = [side for side in sources if side != "skyrl"]
    summary = {
        "benchmark": "grpo_step",
        "steps": args.steps,
        "seeds": args.seeds,
        **{side: [result[side] for result in rounds] for side in sources},
        "ratios": {
            side: round(median(over_ours(result, side, "cpu_seconds") for result in rounds), 2) for side in others
        },
        "memory_ratios": {
            side: round(median(1 / over_ours(result, side, "peak_mb") for result in rounds), 2) for side in others
        },
    }
    print(json.dumps(summary))


def over_ours(results: Mapping[str, Mapping[str, float]], side: str, name: str) -> float:
    """What another side needs for each of what we need."""
    return results[side][name] / results["skyrl"][name]


def one_seed(sources: Mapping[str, Path], steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """All sides, step by step in turns."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Side(name, root, steps, seed, folder) for name, root in sources.items()}
        for _ in range(steps):
            for side in sides.values():
                side.step()
        return {name: side.result() for name, side in sides.items()}


class Side:
    """One trainer in a process of its own, with the code under `root`."""

    def __init__(self, name: str, root: Path, steps: int, seed: int, folder: str) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, str(root / "benchmarks/grpo_step.py"), "--side", name, str(steps), str(seed), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))},
        )
        self._steps: list[dict[str, Any]] = []

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
        counted = [step["cpu"] for step in self._steps[WARM_UP:]]
        rewards = [step["reward"] for step in self._steps]
        enough = (n for n in range(5, len(rewards) + 1) if sum(rewards[n - 5 : n]) >= 4.0)
        return {
            "cpu_seconds": round(median(counted), 3),
            "to_0.8": next(enough, None),
            "last_reward": round(rewards[-1], 3),
            "peak_mb": round(max(step["peak_mb"] for step in self._steps)),
            **{parts: self._medians(parts) for parts in ("phases", "processes") if parts in self._steps[0]},
        }

    def _medians(self, parts: str) -> dict[str, float]:
        """Median CPU-seconds of each phase of a step, or of each process."""
        counted = [step[parts] for step in self._steps[WARM_UP:]]
        names = dict.fromkeys(name for step in counted for name in step)
        return {name: round(median(seconds.get(name, 0.0) for seconds in counted), 4) for name in names}


class Turns:
    """The side of the process: reports a step and waits for its next turn."""

    def __init__(self, used: UsedByAll | None = None) -> None:
        """`used` counts all processes; default: this process alone."""
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes elsewhere
        self._used, self._began = used or used_here, 0.0
        self._began_by_process: Mapping[str, float] = {}

    def wait(self) -> None:
        """Returns when it is this side's turn."""
        sys.stdin.readline()
        self._began, _ = self._used()
        self._began_by_process = self._by_process()

    def report(self, reward: float, **more: object) -> None:
        """The step that ends here."""
        ended, peak = self._used()
        record = {"cpu": ended - self._began, "reward": reward, "peak_mb": peak, **more}
        if processes := self._by_process():
            before = self._began_by_process
            record["processes"] = {name: seconds - before.get(name, 0.0) for name, seconds in processes.items()}
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()

    def _by_process(self) -> Mapping[str, float]:
        return self._used.by_process if isinstance(self._used, UsedByAll) else {}


def used_here() -> tuple[float, float]:
    """CPU-seconds of this process so far, and the peak of its resident memory in MB."""
    return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class UsedByAll:
    """CPU-seconds so far of this process and of all that descend from it, and their resident memory now in MB."""

    def __init__(self) -> None:
        self._looking = 0.0
        """CPU-seconds of this process that looking took, which do not count."""
        self.by_process: dict[str, float] = {}
        """CPU-seconds so far by name and number of the process."""

    def __call__(self) -> tuple[float, float]:
        import psutil

        began = time.process_time()
        own_process = psutil.Process()
        self.by_process, memory = {"driver": began - self._looking}, own_process.memory_info().rss
        for process in own_process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                name = f"{process_name(process.cmdline())} {process.pid}"
                self.by_process[name] = sum(process.cpu_times()[:2])
                memory += process.memory_info().rss
        self._looking += time.process_time() - began
        return sum(self.by_process.values()), memory / 1e6


def process_name(command: Sequence[str]) -> str:
    """What a process of Ray is: `gcs_server`, `raylet`, `ray::Host`, a module of its dashboard."""
    words = [word for word in command if not word.startswith("-")] or ["ended"]
    is_python = Path(words[0]).name.startswith("python")
    return Path(words[1 if is_python and len(words) > 1 else 0]).name.split(".")[0][:24]


def run_ray(steps: int, seed: int, folder: Path) -> None:
    """The quick start's file with a learner and an engine in processes of their own."""
    run_skyrl(steps, seed, folder, executor="ray", used=UsedByAll())


def run_skyrl(
    steps: int,
    seed: int,
    folder: Path,
    executor: str = "in_process",
    used: UsedByAll | None = None,
) -> None:
    """The quick start's file, without evaluation and checkpoints."""
    from skyrl.processes.torch_environment import set_torch_environment

    set_torch_environment()  # as the command does, before torch is imported

    from skyrl.config import SkyRLTrainConfig, compose
    from skyrl.experiments.ppo import BasePPOExp
    from skyrl.tracking.timing import Clock
    from skyrl.tracking.tracker import Tracker, Trackers

    phases: dict[str, float] = {}
    running: list[str] = []

    @contextmanager
    def cpu_time(name: str) -> Iterator[None]:
        began = time.process_time()
        running.append(name)
        yield
        running.remove(name)
        phases[name] = phases.get(name, 0.0) + time.process_time() - began

    def arithmetic(seconds: float) -> None:
        if "sync_weights" not in running:  # the canary computes to check, not to train
            phases["arithmetic"] = phases.get("arithmetic", 0.0) + seconds

    _time_arithmetic(arithmetic)

    class TakesTurns:
        """A tracker: step 0 is logged before the first step, and each step when it is over."""

        def __init__(self) -> None:
            self._turns = Turns(used)

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step:
                self._turns.report(metrics["reward/avg_raw_reward"], phases=phases)
            phases.clear()
            if step < steps:
                self._turns.wait()

        def close(self) -> None:
            """Does nothing: no resource is held."""

    class Measured(BasePPOExp):
        def __init__(self, config: SkyRLTrainConfig) -> None:
            super().__init__(config)
            self.clock = Clock(cpu_time)

        def get_tracker(self, first_step: int) -> Tracker:
            return Trackers([super().get_tracker(first_step), TakesTurns()])

    changes = {
        "trainer.max_training_steps": steps,
        "trainer.seed": seed,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": 0,
        "trainer.run_path": str(folder / "run"),
        "trainer.placement.executor": executor,
    }
    os.chdir(ROOT)
    Measured(compose([FILE], changes, SkyRLTrainConfig).config).run()


def _time_arithmetic(add: Callable[[float], None]) -> None:
    """Call `add` with the CPU-seconds of each pass through the model, each draw of tokens and each optimizer step."""
    from skyrl.inference.torch.causal_lm import CausalLM
    from skyrl.inference.torch.decode_batch import DecodeBatch
    from skyrl.learners.fsdp2 import Fsdp2
    from skyrl.learners.workers import roles

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                add(time.thread_time() - began)

        return call

    owners: dict[type, Sequence[str]] = {
        CausalLM: ("prefill", "decode"),
        DecodeBatch: ("_sample",),
        Fsdp2: ("backward", "step"),
    }
    for owner, names in owners.items():
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))
    log_probabilities = roles._log_probabilities

    def timed_log_probabilities(*args: Any, **options: Any) -> Any:
        return timed(log_probabilities(*args, **options))

    roles._log_probabilities = timed_log_probabilities


def run_bare(steps: int, seed: int, folder: Path) -> None:
    """The same work without a framework."""
    from benchmarks import bare_grpo

    turns = Turns()
    bare_grpo.run(BASE, steps, seed, begin=turns.wait, end=turns.report)


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
        scores: list[float | None] = [float(completion[0]["content"].strip() == word) for completion, word in right]
        rewards[0] = scores.count(1.0) / len(scores)
        return scores

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
        runs = {"skyrl": run_skyrl, "against": run_skyrl, "ray": run_ray, "bare": run_bare, "trl": run_trl}
        runs[sys.argv[2]](*arguments())
    else:
        main()

"""Whole GRPO runs by the command `skyrl run`, as a user starts it: seconds of each phase, of the start, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_session.device import watched
from benchmarks.gpu_session.runner import ROOT
from benchmarks.gpu_session.shapes import settings
from benchmarks.gpu_session.stages import Job, Parts, Result

EMBEDDED: Mapping[str, Any] = {}
VLLM: Mapping[str, Any] = {
    "generator.inference_engine.backend": "vllm",
    "generator.inference_engine.gpu_memory_utilization": 0.4,
    "trainer.placement.executor": "ray",
    "trainer.placement.colocate_all": True,
    "trainer.placement.policy_num_gpus_per_node": 1,
}
"""A run on Ray in which one engine and the learner take turns on one GPU."""

ON_RAY: Mapping[str, Any] = {"trainer.placement.executor": "ray"}


def embedded(job: Job) -> Parts:
    """Everything in one process, with the embedded engine."""
    return [("skyrl, embedded engine", partial(run, job, "embedded", EMBEDDED))]


def vllm(job: Job) -> Parts:
    """A vLLM engine and the learner, on Ray."""
    return [("skyrl, vLLM on Ray", partial(run, job, "vllm", VLLM))]


def fsdp2(job: Job) -> Parts:
    """FSDP2 on one rank of Ray."""
    return [("FSDP2", partial(run, job, "fsdp2", {**ON_RAY, "trainer.strategy": "fsdp2"}))]


def deepspeed(job: Job) -> Parts:
    """DeepSpeed, stages 1 and 3 of ZeRO, on one rank of Ray."""
    stage = "trainer.policy.deepspeed_config.zero_optimization.stage"
    for number in (1, 3):
        more = {**ON_RAY, "trainer.strategy": "deepspeed", stage: number}
        yield f"DeepSpeed, ZeRO-{number}", partial(run, job, f"deepspeed-{number}", more)


def megatron(job: Job) -> Parts:
    """Megatron on one rank of Ray."""
    return [("Megatron", partial(run, job, "megatron", {**ON_RAY, "trainer.strategy": "megatron"}))]


def configuration(job: Job, folder: Path, run_path: Path, more: Mapping[str, Any]) -> str:
    """The file of a run, in TOML."""
    values = settings(job.shape, folder, run_path, job.device, **more)
    values["trainer.max_training_steps"] = job.shape.steps
    values |= job.changes
    head = 'extends = "preset:cuda"\n' if job.device == "cuda" else ""
    return head + "".join(f"{path} = {json.dumps(value)}\n" for path, value in values.items())


def data_folder(job: Job) -> Path:
    """The language model's folder for its shapes, and a random model's otherwise."""
    is_language = job.shape_name.startswith("smollm2") and job.language_model is not None
    return job.language_model.resolve() if is_language and job.language_model else job.folder


def run(job: Job, name: str, more: Mapping[str, Any]) -> Result:
    """Starts `skyrl run` and follows its metrics. Raises RuntimeError if it fails."""
    run_path = job.work / f"run-{job.shape_name}-{name}-{time.time_ns()}"
    file = run_path.with_suffix(".toml")
    file.write_text(configuration(job, data_folder(job), run_path, more), encoding="utf-8")
    start = time.time()
    with watched(job.device) as use:
        process = subprocess.Popen(
            [sys.executable, "-m", "skyrl.cli", "run", str(file)], cwd=ROOT, stdin=subprocess.DEVNULL
        )
        written = _Written(run_path / "metrics.jsonl", process)
        estimate = _estimate(file)
        code = process.wait()
        times = written.times()
    if code != 0:
        raise RuntimeError(f"skyrl run ended with exit code {code}; its output is in the log of the stage")
    result = phases_of(run_path / "metrics.jsonl", job.shape.rows * job.shape.answer_tokens)
    result["start_seconds"] = times[1] - result["steps"][0] - start
    result["whole_seconds"] = time.time() - start
    result["plan_bytes"] = estimate
    return result | ({} if use.peak_bytes is None else {"device_bytes": use.peak_bytes, "gpu_busy": use.busy})


class _Written:
    """When each step's line was written."""

    def __init__(self, file: Path, process: subprocess.Popen[bytes]) -> None:
        self._file, self._process, self._times = file, process, dict[int, float]()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while True:
            ended = self._process.poll() is not None
            if self._file.exists():
                for line in self._file.read_text(encoding="utf-8").split("\n")[:-1]:
                    self._times.setdefault(json.loads(line)["step"], time.time())
            if ended:
                return
            time.sleep(0.02)

    def times(self) -> dict[int, float]:
        """Step -> seconds since the epoch, once the process has ended."""
        self._thread.join()
        return self._times


def phases_of(metrics: Path, tokens: int) -> Result:
    """Medians over the steps after the first, in seconds, and the mean reward of the first and of the last steps.

    `tokens` are those of a step's longest answers.
    """
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "timing/step" in line]
    counted = steps[1:] or steps
    names = sorted({key.removeprefix("timing/") for line in counted for key in line if key.startswith("timing/")})
    phases = {
        name: median(line[f"timing/{name}"] for line in counted if f"timing/{name}" in line)
        for name in names
        if name != "all_steps"
    }
    rewards = [line["reward/avg_raw_reward"] for line in steps]
    return {
        "seconds": phases["step"],
        "tokens_per_second": tokens / phases["step"],
        "phases": phases,
        "steps": [line["timing/step"] for line in steps],
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
    }


def _estimate(file: Path) -> int | None:
    """Bytes that `skyrl plan` expects on the GPU in the phase that needs most."""
    from skyrl.config import compose
    from skyrl.tools.run_plan import memory_of

    phases = memory_of(compose([str(file)], {}).config)["phases"]
    return max(phase["bytes"] for phase in phases) if phases else None

"""The steps of `steps.py` by TRL's GRPOTrainer, with transformers' `generate` or a colocated vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_session.device import watched
from benchmarks.gpu_session.stages import Job, Parts, Result
from benchmarks.gpu_session.steps import data_folder


def with_generate(job: Job) -> Parts:
    """TRL, sampling with transformers."""
    return [("TRL, generate", partial(_train, job, use_vllm=False))]


def with_vllm(job: Job) -> Parts:
    """TRL, sampling with vLLM in its process, which keeps its memory while the model learns."""
    return [("TRL, vLLM", partial(_train, job, use_vllm=True))]


def _train(job: Job, *, use_vllm: bool) -> Result:
    start = time.time()
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    shape, folder, on_gpu = job.shape, data_folder(job), job.device == "cuda"
    steps, started = list[float](), list[float]()
    spent: dict[str, list[float]] = {"generate": [], "sync_weights": [], "score": []}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            started.append(time.time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            steps.append(time.time() - started[-1])

    score, rewards = score_of(folder / "reward.py"), list[float]()

    def reward(completions: Sequence[Any], ground_truth: Sequence[str], **_: Any) -> list[float | None]:
        answers = zip(completions, ground_truth, strict=True)
        scores = [float(score(answer[0]["content"], truth)) for answer, truth in answers]
        rewards.append(sum(scores) / len(scores))
        return list(scores)

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    data = [{"prompt": row["prompt"], "ground_truth": row["reward_spec"]["ground_truth"]} for row in rows]
    vllm: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": shape.prompt_tokens + shape.answer_tokens,
    }
    arguments = GRPOConfig(
        output_dir=str(job.work / "trl"),
        per_device_train_batch_size=shape.padded_rows,
        gradient_accumulation_steps=shape.rows // shape.padded_rows,
        num_generations=shape.samples,
        max_completion_length=shape.answer_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=shape.learning_rate,
        lr_scheduler_type="constant",
        max_steps=shape.steps,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=shape.recompute and on_gpu,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **(vllm if use_vllm else {}),
    )
    with watched(job.device) as use:
        trainer = GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(data),
            callbacks=[Clock()],
        )
        _time_method(trainer, "_generate", spent["generate"])
        _time_method(trainer, "_generate_and_score_completions", spent["score"])
        if use_vllm:
            _time_method(trainer.vllm_generation, "sync_weights", spent["sync_weights"])
        trainer.train()
    # Timed calls contain each other: scoring contains generation, which contains the transfer of weights.
    sums = {name: median(times[1:] or times) for name, times in spent.items() if times}
    step = median(steps[1:] or steps)
    sync = sums.get("sync_weights", 0.0)
    result: Result = {
        "seconds": step,
        "tokens_per_second": shape.rows * shape.answer_tokens / step,
        "phases": {"step": step, "generate": sums["generate"] - sync, "policy_train": step - sums["score"]}
        | ({"sync_weights": sync} if use_vllm else {}),
        "steps": steps,
        "start_seconds": started[0] - start,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
    }
    return result | ({} if use.peak_bytes is None else {"device_bytes": use.peak_bytes, "gpu_busy": use.busy})


def _time_method(owner: Any, name: str, seconds: list[float]) -> None:
    """Replaces a method by one that appends how long each call takes; what TRL calls otherwise is not timed."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.time() - start)

    setattr(owner, name, timed)


def score_of(file: Path) -> Callable[[str, str], float]:
    """The function `score` of a file, as a run of skyrl finds it."""
    spec = spec_from_file_location("reward_of_the_task", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    score: Callable[[str, str], float] = module.score
    return score

"""What `gpu.py` measures, each by a function of the shape, the folder with its model, and the device."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_shapes import (
    Shape,
    dtype_of,
    finish,
    matmul_rate,
    peak_bytes,
    prepare,
    rollouts,
    settings,
    training_flops,
)
from skyrl.batch import TrainingBatch
from skyrl.config import SamplingParams, compose

Result = dict[str, Any]

REPEATS = 3
STEPS = 3
"""Steps of a whole run; the first only warms up."""


def model(shape: Shape, folder: Path, device: torch.device) -> Result:
    """Writes the model, and measures how fast the device multiplies."""
    prepare(shape, folder, device)
    size = 8192 if device.type == "cuda" else 256
    rate = matmul_rate(device, dtype_of(device), size)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "matmul_flops": rate, "torch": torch.__version__}


def timed(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median of seconds, after one run that does not count."""
    work()
    taken = []
    for _ in range(repeats):
        finish(device)
        begun = time.perf_counter()
        work()
        finish(device)
        taken.append(time.perf_counter() - begun)
    return median(taken)


def learner(shape: Shape, folder: Path, device: torch.device) -> Result:
    """One update of skyrl's learner: packed rows, with and without one copy of each prompt, and padded rows."""
    ways: dict[str, dict[str, Any]] = {
        "shared_prompts": {},
        "packed": {"trainer.share_group_prompts": False},
        "padded": {
            "trainer.use_sample_packing": False,
            "trainer.max_tokens_per_microbatch": -1,
            "trainer.micro_train_batch_size_per_gpu": shape.padded_rows,
        },
    }
    batch = rollouts(shape)
    return {name: _learner(shape, folder, device, batch, more, name) for name, more in ways.items()}


def _learner(
    shape: Shape, folder: Path, device: torch.device, batch: TrainingBatch, more: Mapping[str, Any], name: str
) -> Result:
    from skyrl.learners.workers import PolicyWorker
    from skyrl.training.objective import policy_objective

    trainer = compose([], settings(shape, folder, folder / "unused", device.type, **more)).config.trainer
    worker = PolicyWorker(trainer, policy_objective(trainer.algorithm), 100)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = timed(device, lambda: asyncio.run(worker.update(batch)))
    found = _rate(shape, batch, seconds, shared=name == "shared_prompts") | {"peak_bytes": peak_bytes(device)}
    if name == "shared_prompts":
        found["profile"] = _profile(device, lambda: asyncio.run(worker.update(batch)))
    worker.close()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _rate(shape: Shape, batch: TrainingBatch, seconds: float, *, shared: bool) -> Result:
    flops = training_flops(shape, batch, shared=shared) / seconds
    return {"seconds": seconds, "tokens_per_second": int(batch.lengths.sum()) / seconds, "flops": flops}


def _profile(device: torch.device, work: Callable[[], object]) -> list[Result]:
    """The twenty operators that take the most time of the device, or of the CPU."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as seen:
        work()
        finish(device)
    own = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: -float(getattr(event, own)))[:20]
    return [{"name": event.key[:80], "ms": getattr(event, own) / 1000, "calls": event.count} for event in events]


def plain(shape: Shape, folder: Path, device: torch.device) -> Result:
    """The same update as a script writes it: padded micro-batches through transformers, with the table of logits."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    loaded.to(device)
    if device.type == "cuda":
        loaded.gradient_checkpointing_enable()
        loaded.train()
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-6, fused=device.type == "cuda")
    batch = rollouts(shape)

    def update() -> None:
        for micro in batch.split(shape.padded_rows):
            rows = micro.to(device)
            assert rows.advantages is not None
            with torch.autocast(device.type, dtype_of(device), enabled=device.type == "cuda"):
                logits = loaded(input_ids=rows.input_ids, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), -1)
            chosen = logprobs.gather(-1, rows.input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            (-(chosen * rows.advantages[:, 1:]).sum() / int(batch.loss_mask.sum())).backward()
        torch.nn.utils.clip_grad_norm_(loaded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = timed(device, update)
    return {"plain": _rate(shape, batch, seconds, shared=False) | {"peak_bytes": peak_bytes(device)}}


def generation(shape: Shape, folder: Path, device: torch.device) -> Result:
    """All answers of a step, each of the greatest length: skyrl's embedded engine, and transformers' `generate`."""
    from transformers import AutoTokenizer, GenerationConfig

    from skyrl.inference.torch_engine import TorchEngine
    from skyrl.models.loading import load_causal_lm

    loaded = load_causal_lm(str(folder / "model"), dtype=dtype_of(device), attention="sdpa", device=device).eval()
    loaded.generation_config.eos_token_id = None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.eos_token = None  # lengths are what is asked for
    prompts = rollouts(shape).input_ids[:: shape.samples, : shape.prompt_tokens]
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=shape.answer_tokens, pad_token_id=0)

    def generate() -> None:
        ids = prompts.repeat_interleave(shape.samples, dim=0).to(device)
        with torch.inference_mode():
            loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

    engine = TorchEngine(loaded, tokenizer, max_num_seqs=shape.rows)
    sides = {"transformers": generate, "torch_engine": lambda: asyncio.run(_answers(shape, engine, prompts))}
    seconds = {name: timed(device, work, repeats=1) for name, work in sides.items()}
    tokens = shape.rows * shape.answer_tokens
    return {name: {"seconds": taken, "tokens_per_second": tokens / taken} for name, taken in seconds.items()}


async def _answers(shape: Shape, engine: Any, prompts: torch.Tensor) -> None:
    from skyrl.inference.engine import GenerationRequest, SampleKey

    sampling = SamplingParams(max_generate_length=shape.answer_tokens)
    requests = [
        GenerationRequest(
            prompt_ids=tuple(ids),
            sampling=sampling,
            keys=tuple(
                SampleKey(run_seed=0, weight_version=0, prompt_id=str(i), sample_index=j) for j in range(shape.samples)
            ),
        )
        for i, ids in enumerate(prompts.tolist())
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))


def step(shape: Shape, folder: Path, device: torch.device) -> Result:
    """Whole GRPO steps of a run in this process, with the embedded engine."""
    return {"skyrl": _steps(shape, folder, device, "in_process")}


def step_vllm(shape: Shape, folder: Path, device: torch.device) -> Result:
    """Whole GRPO steps of a run on Ray, in which a vLLM engine and the learner take turns on the GPU."""
    return {"skyrl_vllm": _steps(shape, folder, device, "vllm", **VLLM_ON_ONE_GPU)}


VLLM_ON_ONE_GPU: Mapping[str, Any] = {
    "generator.inference_engine.backend": "vllm",
    "generator.inference_engine.enforce_eager": False,
    "generator.inference_engine.gpu_memory_utilization": 0.4,
    "trainer.placement.executor": "ray",
    "trainer.placement.colocate_all": True,
    "trainer.placement.policy_num_gpus_per_node": 1,
}
"""Settings of a run in which one engine and the learner take turns."""


def _steps(shape: Shape, folder: Path, device: torch.device, name: str, **more: Any) -> Result:
    from skyrl.experiments.ppo import BasePPOExp

    run = folder / f"run-{name}"
    values = settings(shape, folder, run, device.type, **more) | {"trainer.max_training_steps": STEPS}
    BasePPOExp(compose([], values).config).run()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    counted = [line for line in lines if "timing/step" in line][1:]
    parts = {key.removeprefix("timing/"): key for key in counted[0] if key.startswith("timing/")}
    found: Result = {key: median(line[metric] for line in counted if metric in line) for key, metric in parts.items()}
    rate = shape.rows * shape.answer_tokens / found["step"]
    return {"seconds": found["step"], "tokens_per_second": rate, "parts": found, "peak_bytes": peak_bytes(device)}


def step_trl(shape: Shape, folder: Path, device: torch.device) -> Result:
    """The same steps by TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times[-1] = time.perf_counter() - times[-1]

    def score(completions: list[Any], **_: Any) -> list[float | None]:
        return [len(set(said[0]["content"])) % 7 / 7 for said in completions]

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=shape.padded_rows,
        gradient_accumulation_steps=shape.rows // shape.padded_rows,
        num_generations=shape.samples,
        max_completion_length=shape.answer_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=STEPS,
        bf16=device.type == "cuda",
        use_cpu=device.type == "cpu",
        gradient_checkpointing=device.type == "cuda",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    GRPOTrainer(
        model=str(folder / "model"), reward_funcs=score, args=arguments, train_dataset=data, callbacks=[Clock()]
    ).train()
    seconds = median(times[1:])
    rate = shape.rows * shape.answer_tokens / seconds
    return {"trl": {"seconds": seconds, "tokens_per_second": rate, "peak_bytes": peak_bytes(device)}}

"""All answers of a step, each of the greatest length: the embedded engine, transformers' `generate`, vLLM's `LLM`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_session.learner import timed
from benchmarks.gpu_session.shapes import Shape, dtype_of, peak_bytes, rollouts
from benchmarks.gpu_session.stages import Job, Parts, Result
from skyrl.config import SamplingParams


def generation(job: Job) -> Parts:
    """Each side in turn; vLLM last, since it changes its process for good."""
    yield "embedded engine", partial(_embedded, job)
    yield "transformers", partial(_transformers, job)
    if importlib.util.find_spec("vllm") is not None:
        yield "vLLM", partial(_vllm, job)


def _rates(job: Job, work: Callable[[], object]) -> Result:
    seconds = timed(job.device, work, repeats=2)
    tokens = job.shape.rows * job.shape.answer_tokens
    result = {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": peak_bytes(torch.device(job.device)),
    }
    return result | {"step_ms": seconds / job.shape.answer_tokens * 1000}


def _prompts(shape: Shape) -> torch.Tensor:
    return rollouts(shape).input_ids[:: shape.samples, : shape.prompt_tokens]


def _model(job: Job) -> Any:
    from skyrl.models.files.loading import load_causal_lm

    device = torch.device(job.device)
    loaded = load_causal_lm(str(job.folder / "model"), dtype=dtype_of(device), attention="sdpa", device=device).eval()
    loaded.generation_config.eos_token_id = None
    return loaded


def _embedded(job: Job) -> Result:
    from transformers import AutoTokenizer

    from skyrl.inference.torch.engine import TorchEngine

    tokenizer: Any = AutoTokenizer.from_pretrained(job.folder / "model")
    tokenizer.eos_token = None  # every answer has the greatest length
    engine = TorchEngine(_model(job), tokenizer, max_num_seqs=job.shape.rows)
    return _rates(job, lambda: asyncio.run(_answers(job.shape, engine)))


async def _answers(shape: Shape, engine: Any) -> None:
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
        for i, ids in enumerate(_prompts(shape).tolist())
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))


def _transformers(job: Job) -> Result:
    from transformers import GenerationConfig

    loaded, prompts = _model(job), _prompts(job.shape)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=job.shape.answer_tokens, pad_token_id=0)

    def generate() -> None:
        ids = prompts.repeat_interleave(job.shape.samples, dim=0).to(loaded.device)
        with torch.inference_mode():
            loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

    return _rates(job, generate)


def _vllm(job: Job) -> Result:
    from vllm import LLM, SamplingParams

    shape = job.shape
    on_gpu: dict[str, Any] = {"gpu_memory_utilization": 0.5}
    on_cpu: dict[str, Any] = {"gpu_memory_utilization": 0.05, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    engine = LLM(
        model=str(job.folder / "model"),
        dtype="bfloat16" if job.device == "cuda" else "float32",
        max_model_len=shape.prompt_tokens + shape.answer_tokens,
        max_num_seqs=shape.rows,
        enable_prefix_caching=False,  # as in a step, whose prompts are new
        disable_log_stats=True,
        **(on_gpu if job.device == "cuda" else on_cpu),
    )
    sampling = SamplingParams(
        n=shape.samples, temperature=1.0, max_tokens=shape.answer_tokens, ignore_eos=True, logprobs=0
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in _prompts(shape).tolist()]
    result = _rates(job, lambda: engine.generate(prompts, sampling, use_tqdm=False))
    del result["peak_bytes"]  # of its process, which has set memory aside for the cache
    return result

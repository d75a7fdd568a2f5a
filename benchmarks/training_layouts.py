"""Tokens per CPU-second of forward and backward, by how rows go through the model. One JSON line.

    python benchmarks/training_layouts.py [tiny] [mid]

Two random Qwen2, of 3 and 68 million parameters; prompts of 64 tokens with 8 answers each, whose lengths are
log-normal. `padded`: micro-batches of a fixed number of rows, padded. `packed`: micro-batches bounded by tokens, rows
end to end. `shared`: the same with one copy of each prompt. One torch thread, process CPU time, the ways take turns and
the best round counts. Useful tokens are those of all rows, each prompt counted for each of its answers, so that
the ways are compared by the same work. The loss and the norm of the gradient are reported for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attrs import evolve, frozen
from transformers import Qwen2Config, Qwen2ForCausalLM

from skyrl.batch import TrainingBatch
from skyrl.learners.budget import TokenBudget, micro_batches
from skyrl.learners.forward import ForwardOptions, compute_logprobs, probe_forward
from skyrl.models.segment_attention import SEGMENTS, register

PROMPT, SAMPLES, ROUNDS = 64, 8, 3


@frozen(kw_only=True)
class Case:
    """A model, how many prompts, how long answers are, and how micro-batches are bounded."""

    model: dict[str, Any]
    prompts: int
    mean: float
    longest: int
    rows: int
    """Of a padded micro-batch."""

    tokens: int
    """Of a packed one."""


CASES = {
    "tiny": Case(
        model={"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
        prompts=8,
        mean=88,
        longest=512,
        rows=16,
        tokens=2048,
    ),
    "mid": Case(
        model={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12},
        prompts=2,
        mean=59,
        longest=251,
        rows=8,
        tokens=768,
    ),
}


def model_of(case: Case) -> Any:
    """Random, since speed does not depend on what it says."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, num_key_value_heads=2, max_position_embeddings=1024, **case.model)
    return Qwen2ForCausalLM._from_config(config, attn_implementation=SEGMENTS).eval()


def batch_of(case: Case) -> TrainingBatch:
    """Groups of eight, lengths log-normal with the case's mean, one of them the longest."""
    generator = torch.Generator().manual_seed(0)
    rows = case.prompts * SAMPLES
    drawn = torch.randn(rows, generator=generator).mul(1.0).exp()
    answers = (drawn * (case.mean / drawn.mean())).clamp(1, case.longest).long()
    answers[0] = case.longest
    lengths = answers + PROMPT
    columns = torch.arange(int(lengths.max()))
    ids = torch.randint(0, 512, (rows, len(columns)), generator=generator)
    ids[:, :PROMPT] = ids[::SAMPLES, :PROMPT].repeat_interleave(SAMPLES, 0)
    return TrainingBatch(
        input_ids=ids,
        lengths=lengths,
        loss_mask=(columns >= PROMPT) & (columns < lengths.unsqueeze(1)),
        rollout_logprobs=torch.zeros(ids.shape),
        rewards=torch.zeros(ids.shape),
        groups=torch.arange(rows) // SAMPLES,
        answer_lengths=answers,
    )


def once(model: Any, batch: TrainingBatch, reads: ForwardOptions, case: Case) -> dict[str, float]:
    """Forward and backward over all micro-batches of the mean negative log-probability."""
    budget = TokenBudget(tokens=case.tokens if reads.pack else None, keep_groups=reads.share_prompts)
    model.zero_grad()
    tokens, total, start = int(batch.loss_mask.sum()), 0.0, time.process_time()
    [planned] = budget.plan([batch])
    for _, micro in micro_batches(planned, case.rows):
        loss = -compute_logprobs(model, reads.prepare(micro), reads, temperature=1.0).values.sum() / tokens
        loss.backward()
        total += loss.item()
    seconds = time.process_time() - start
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    return {"rate": int(batch.lengths.sum()) / seconds, "loss": total, "norm": norm.item()}


def compare(case: Case) -> dict[str, Any]:
    """The best of the rounds of each way."""
    model, batch = model_of(case), batch_of(case)
    shared = probe_forward(model, pack=True, share_prompts=True, device=torch.device("cpu"))
    ways = {
        "padded": evolve(shared, pack=False),
        "packed": evolve(shared, share_prompts=False),
        "shared": shared,
    }
    rounds = [{name: once(model, batch, reads, case) for name, reads in ways.items()} for _ in range(ROUNDS)]
    best = {name: max((each[name] for each in rounds), key=lambda result: result["rate"]) for name in ways}
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "packed_over_padded": round(best["packed"]["rate"] / best["padded"]["rate"], 2),
        "shared_over_packed": round(best["shared"]["rate"] / best["packed"]["rate"], 2),
        "tokens_per_cpu_second": {name: round(result["rate"]) for name, result in best.items()},
        "loss": {name: round(result["loss"], 6) for name, result in best.items()},
        "gradient_norm": {name: round(result["norm"], 6) for name, result in best.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    register()
    names = sys.argv[1:] or list(CASES)
    print(json.dumps({"benchmark": "training_layouts", **{name: compare(CASES[name]) for name in names}}))

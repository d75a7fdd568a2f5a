"""Tokens per CPU-second of forward and backward, by how rows go through the model. One JSON line.

    python benchmarks/training_layouts.py [tiny] [mid]

Two random Qwen2, of 3 and 68 million parameters; prompts of 64 tokens with 8 answers each, whose lengths are
log-normal. `padded`: micro-batches of a fixed number of rows, padded. `packed`: micro-batches bounded by tokens, rows
end to end. `shared`: the same with one copy of each prompt. `bare`: a plain loop over transformers' own model that
computes each prompt once, too, group by group (`bare_grpo.py`). One torch thread, process CPU time, the ways take turns
and the best round counts. Useful tokens are those of all rows, each prompt counted for each of its answers, so that
the ways are compared by the same work. The loss and the norm of the gradient are reported for each.

`matmul_share` is the floor: the time of the matrix products of the model's linear layers, each measured alone and by
the faster of MKL and oneDNN, over the time of `shared` and `bare`. `mfu` is what is computed in a second, the products
of linear layers and those of attention between tokens that see each other, over the rate of one large product: by MKL,
which is torch's own, and by oneDNN.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.bare_grpo import logprobs_of
from skyrl.batch import TrainingBatch
from skyrl.learners.budget import TokenBudget, micro_batches
from skyrl.learners.forward import ForwardOptions, compute_logprobs, probe_forward
from skyrl.models.attention.segment_attention import SEGMENTS, register
from skyrl.models.onednn import compute_with_onednn, is_available, padded_rows, product

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


def model_of(case: Case, attention: str) -> Any:
    """Random, since speed does not depend on what it says."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, num_key_value_heads=2, max_position_embeddings=1024, **case.model)
    return Qwen2ForCausalLM._from_config(config, attn_implementation=attention).eval()


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
    return _measured(model, batch, time.process_time() - start, total)


def bare_once(model: Any, batch: TrainingBatch) -> dict[str, float]:
    """The same by a plain loop, one group at a time."""
    model.zero_grad()
    tokens, total, start = int(batch.loss_mask.sum()), 0.0, time.process_time()
    for first in range(0, len(batch.input_ids), SAMPLES):
        rows = range(first, first + SAMPLES)
        answers = [batch.input_ids[row, PROMPT : int(batch.lengths[row])] for row in rows]
        loss = -logprobs_of(model, [batch.input_ids[first, :PROMPT]], [answers]).sum() / tokens
        loss.backward()
        total += loss.item()
    return _measured(model, batch, time.process_time() - start, total)


def _measured(model: Any, batch: TrainingBatch, seconds: float, loss: float) -> dict[str, float]:
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return {"rate": int(batch.lengths.sum()) / seconds, "loss": loss, "norm": norm.item(), "seconds": seconds}


def products_alone(model: Any, batch: TrainingBatch, case: Case) -> float:
    """CPU-seconds of the linear layers' products, forward and backward, of micro-batches that share prompts."""
    answered = int(batch.loss_mask.sum())
    computed = answered + case.prompts * PROMPT
    parts = -(-computed // case.tokens)
    return parts * sum(
        _layer_alone(layer, (answered if layer is model.lm_head else computed) // parts)
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    )


def flops_of(model: Any, batch: TrainingBatch) -> float:
    """Operations of forward and backward with one copy of each prompt: 6 for each weight that a token meets, and 12 for
    each pair of tokens and each column of the queries.
    """
    answers = batch.loss_mask.sum(1)
    prompts = len(batch) // SAMPLES
    computed, answered = int(answers.sum()) + prompts * PROMPT, int(answers.sum())
    head = model.lm_head.weight.numel()
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)) - head
    pairs = prompts * PROMPT**2 / 2 + float((answers * PROMPT + answers**2 / 2).sum())
    config = model.config
    attention = 12 * config.num_hidden_layers * config.hidden_size * pairs
    return float(6 * (linear * computed + head * answered) + attention)


def rates() -> dict[str, float]:
    """Operations per CPU-second of a product of 1,024 x 1,024 x 1,024, by library."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    libraries = dict(zip(("mkl", "onednn"), PRODUCTS, strict=False))
    return {name: 2 * 1024**3 / _seconds(multiply, left, right) for name, multiply in libraries.items()}


def _layer_alone(layer: nn.Linear, rows: int) -> float:
    x, errors = torch.randn(padded_rows(rows), layer.in_features), torch.randn(padded_rows(rows), layer.out_features)
    weight = layer.weight.detach()
    pairs = (x, weight), (errors, weight.t()), (errors.t(), x.t())
    return sum(min(_seconds(multiply, left, right) for multiply in PRODUCTS) for left, right in pairs)


PRODUCTS: list[Callable[[Tensor, Tensor], Tensor]] = [nn.functional.linear, *([product] if is_available() else [])]


def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> float:
    multiply(left, right)  # compiles a kernel
    seconds = []
    for _ in range(5):
        start = time.process_time()
        multiply(left, right)
        seconds.append(time.process_time() - start)
    return min(seconds)


def compare(case: Case) -> dict[str, Any]:
    """The best of the rounds of each way."""
    model, plain, batch = model_of(case, SEGMENTS), model_of(case, "sdpa"), batch_of(case)
    compute_with_onednn(model)
    shared = probe_forward(model, pack=True, share_prompts=True, device=torch.device("cpu"))
    variants: dict[str, Callable[[], dict[str, float]]] = {
        "padded": lambda: once(model, batch, evolve(shared, pack=False), case),
        "packed": lambda: once(model, batch, evolve(shared, share_prompts=False), case),
        "shared": lambda: once(model, batch, shared, case),
        "bare": lambda: bare_once(plain, batch),
    }
    rounds = [{name: variant() for name, variant in variants.items()} for _ in range(ROUNDS)]
    best = {name: max((results[name] for results in rounds), key=lambda result: result["rate"]) for name in variants}
    product_seconds = products_alone(model, batch, case)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "packed_over_padded": round(best["packed"]["rate"] / best["padded"]["rate"], 2),
        "shared_over_packed": round(best["shared"]["rate"] / best["packed"]["rate"], 2),
        "shared_over_bare": round(best["shared"]["rate"] / best["bare"]["rate"], 2),
        "matmul_share": {name: round(product_seconds / best[name]["seconds"], 2) for name in ("shared", "bare")},
        "mfu": {
            name: round(flops_of(model, batch) / best["shared"]["seconds"] / rate, 2) for name, rate in rates().items()
        },
        "gflops_of_a_product": {name: round(rate / 1e9) for name, rate in rates().items()},
        "tokens_per_cpu_second": {name: round(result["rate"]) for name, result in best.items()},
        "loss": {name: round(result["loss"], 6) for name, result in best.items()},
        "gradient_norm": {name: round(result["norm"], 6) for name, result in best.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    register()
    names = sys.argv[1:] or list(CASES)
    print(json.dumps({"benchmark": "training_layouts", **{name: compare(CASES[name]) for name in names}}))

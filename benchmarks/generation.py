"""Tokens per CPU-second of the embedded engine beside transformers' `generate`: one JSON line.

    python benchmarks/generation.py

Same model (a random Qwen2 of 3.4M parameters), prompts, numbers of tokens and sampling (temperature 1, nothing cut),
one torch thread, process CPU time. The two sides take turns, and the best of the rounds counts: other work on the
machine can only add to a round. Compare the ratios, not the rates. Neither side knows an end-of-sequence token, so
that lengths are what is asked for; `generate` has no length per row, so it runs to the longest, and tokens beyond a
row's length are not counted for it. The engine also returns log-probabilities, `generate` does not.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attrs import frozen
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from skyrl.config import SamplingParams
from skyrl.inference.engine import GenerationRequest, SampleKey
from skyrl.inference.torch_engine import TorchEngine

VOCABULARY, ROWS, ROUNDS = 512, 64, 5


@frozen
class Case:
    """Requests of `samples` each; request i gets `lengths[i]` tokens per sample."""

    prompts: Sequence[tuple[int, ...]]
    samples: int
    lengths: Sequence[int]

    @property
    def useful(self) -> int:
        return self.samples * sum(self.lengths)


def cases() -> dict[str, Case]:
    """64 rows each: one length for all; log-normal lengths (mean about 46, longest 256); a long prompt shared by 8."""
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[tuple[int, ...]]:
        return [tuple(row) for row in torch.randint(0, VOCABULARY, (count, length), generator=generator).tolist()]

    tail = torch.randn(ROWS, generator=generator).mul(1.1).add(3.3).exp().clamp(1, 256).int().tolist()
    tail[0] = 256
    return {
        "uniform": Case(prompts(8, 64), 8, [64] * 8),
        "heavy_tail": Case(prompts(ROWS, 64), 1, tail),
        "long_prompt": Case(prompts(8, 512), 8, [32] * 8),
    }


def model() -> Any:
    """Random, since speed does not depend on what it says."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


def tokenizer() -> Any:
    """Only there to be asked for text: each id is a word."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def of_engine(engine: TorchEngine, case: Case) -> None:
    """All requests at once, as a rollout makes them."""

    async def everything() -> None:
        answers = await asyncio.gather(*(engine.generate(request(i)) for i in range(len(case.prompts))))
        assert sum(len(sample.token_ids) for group in answers for sample in group) == case.useful

    def request(i: int) -> GenerationRequest:
        return GenerationRequest(
            prompt_ids=case.prompts[i],
            sampling=SamplingParams(max_generate_length=case.lengths[i]),
            keys=tuple(
                SampleKey(run_seed=0, weight_version=0, prompt_id=str(i), sample_index=j) for j in range(case.samples)
            ),
        )

    asyncio.run(everything())


def of_generate(reference: Any, case: Case) -> None:
    """One batch of all rows, to the longest length."""
    ids = torch.tensor(case.prompts).repeat_interleave(case.samples, dim=0)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(case.lengths), pad_token_id=0)
    with torch.inference_mode():
        made = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert made.shape == (ROWS, ids.shape[1] + max(case.lengths))


def rates(case: Case, sides: dict[str, Callable[[Case], None]]) -> dict[str, float]:
    """Useful tokens per CPU-second of each side, best of the rounds; the first round only warms up."""
    best = dict.fromkeys(sides, 0.0)
    for attempt in range(ROUNDS + 1):
        for name, run in sides.items():
            begun = time.process_time()
            run(case)
            rate = case.useful / (time.process_time() - begun)
            best[name] = max(best[name], rate) if attempt else 0.0
    return best


def main() -> None:
    """Prints the line."""
    torch.set_num_threads(1)
    reference, words = model(), tokenizer()
    engines = {
        "engine": TorchEngine(copy.deepcopy(reference), words, max_num_seqs=ROWS),
        "engine_deterministic": TorchEngine(copy.deepcopy(reference), words, max_num_seqs=ROWS, deterministic=True),
    }
    sides: dict[str, Callable[[Case], None]] = {"transformers": lambda case: of_generate(reference, case)}
    for name, engine in engines.items():
        sides[name] = lambda case, engine=engine: of_engine(engine, case)  # type: ignore[misc]  # bound by its default
    result: dict[str, Any] = {"benchmark": "generation", "unit": "tokens per CPU-second", "rows": ROWS}
    for name, case in cases().items():
        measured = rates(case, sides)
        result[name] = {side: round(rate) for side, rate in measured.items()}
        result[name]["ratio"] = round(measured["engine"] / measured["transformers"], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

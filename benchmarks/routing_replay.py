"""Rollout routing replay: how far a learner's log-probabilities are from the engine's, with and without. One JSON line.

    python benchmarks/routing_replay.py [--layers 4] [--experts 16] [--prompts 16] [--samples 4] [--tokens 48]
                                        [--dtype bfloat16]

A random mixture of experts (Qwen3-MoE, 2 experts a token) is sampled from by the torch engine in `--dtype` and scored
by a learner in float32, which first routes by itself and then replays the experts that the engine chose. `mean`, `p99`
and `max` are absolute differences in nats over all sampled tokens; `tokens_routed_otherwise` is the share of computed
tokens for which the learner's own experts differ from the engine's in some layer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl.batch import TrainingBatch
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import ModelConfig, PolicyConfig, SamplingParams, SkyRLTrainConfig, TrainerConfig
from skyrl.config.loading.resolve import resolve
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.inference.torch.engine import TorchEngine
from skyrl.learners.workers.roles import PolicyWorker
from skyrl.models.routers import ChoiceRecorder
from skyrl.tree import evolve_at
from skyrl.weight_sync.canary import rows

VOCABULARY = 256


class Numbers:
    """A tokenizer whose texts are numbers of tokens: nothing here is read as text."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        """The numbers, with spaces between."""
        return " ".join(map(str, ids))

    def get_vocab(self) -> dict[str, int]:
        """All of the model's tokens."""
        return {str(number): number for number in range(VOCABULARY)}


def save_mixture(folder: Path, *, layers: int, experts: int) -> None:
    """A random model of 64 hidden sizes whose router is as sharp as a trained one's."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"head_dim": 16}  # which transformers' class takes without saying so
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


async def drawn(folder: Path, dtype: str, *, prompts: int, samples: int, tokens: int) -> TrainingBatch:
    """Answers of the engine as a batch, with its log-probabilities and the experts that it chose."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    tokenizer: ChatTokenizer | Any = Numbers()
    engine = TorchEngine(model, tokenizer, max_num_seqs=64, returns_experts=True)
    generator = torch.Generator().manual_seed(1)
    requests = [
        GenerationRequest(
            prompt_ids=tuple(torch.randint(1, VOCABULARY, (8 + number % 9,), generator=generator).tolist()),
            sampling=SamplingParams(max_generate_length=tokens),
            keys=tuple(
                SampleKey(run_seed=0, weight_version=0, prompt_id=str(number), sample_index=index)
                for index in range(samples)
            ),
        )
        for number in range(prompts)
    ]
    answers: list[tuple[Completion, ...]] = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    return rows(
        [(request.prompt_ids, completion) for request, own in zip(requests, answers, strict=True) for completion in own]
    )


def learner(folder: Path, *, replays: bool) -> PolicyWorker:
    """A learner in float32 on one rank."""
    model = ModelConfig(path=str(folder))
    trainer = TrainerConfig(policy=PolicyConfig(model=model), device="cpu", strategy="fsdp2")
    run = evolve_at(SkyRLTrainConfig(trainer=trainer), "generator.inference_engine.backend", "torch")
    settled = evolve_at(resolve(run).trainer, "policy.moe_enable_routing_replay", replays)
    return PolicyWorker(settled)


def differences(scores: Tensor, batch: TrainingBatch) -> dict[str, float]:
    """Absolute differences to the engine's log-probabilities, in nats."""
    assert batch.rollout_logprobs is not None
    apart = (scores - batch.rollout_logprobs)[batch.loss_mask].abs()
    return {
        "mean": round(float(apart.mean()), 5),
        "p99": round(float(apart.quantile(0.99)), 5),
        "max": round(float(apart.max()), 5),
    }


def routed_otherwise(folder: Path, batch: TrainingBatch) -> float:
    """Share of computed tokens that a model in float32 gives to other experts than the engine did, in some layer."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    recorder = ChoiceRecorder(model)
    assert batch.routed_experts is not None
    differs = []
    with torch.no_grad():
        for ids, length, chosen in zip(batch.input_ids, batch.lengths.tolist(), batch.routed_experts, strict=True):
            model(ids[None, : length - 1], use_cache=False)
            recomputed, recorded = recorder.take().sort(-1).values, chosen[: length - 1].sort(-1).values
            differs.append((recomputed != recorded).flatten(1).any(1))
    return round(float(torch.cat(differs).float().mean()), 4)


def measured(folder: Path, batch: TrainingBatch) -> dict[str, Any]:
    """What the learner's scores of a batch are, with and without replay."""
    without, replayed = (asyncio.run(learner(folder, replays=replays).score(batch)) for replays in (False, True))
    return {
        "tokens": int(batch.loss_mask.sum()),
        "tokens_routed_otherwise": routed_otherwise(folder, batch),
        "without_replay": differences(without, batch),
        "with_replay": differences(replayed, batch),
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    sizes = {"layers": 4, "experts": 16, "prompts": 16, "samples": 4, "tokens": 48}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_mixture(path, layers=args.layers, experts=args.experts)
        batch = asyncio.run(drawn(path, args.dtype, prompts=args.prompts, samples=args.samples, tokens=args.tokens))
        print(json.dumps({"dtype": args.dtype, **measured(path, batch)}))


if __name__ == "__main__":
    main()

"""Models and a tokenizer small enough to check the engine against transformers, and the requests to check it with."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from skyrl.config import SamplingParams
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey

EOS, PAD = 256, 257
VOCABULARY = 258


def nano_tokenizer() -> Any:
    """One token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen2, tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 16,
            "tie_word_embeddings": False,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2, eager": (Qwen2Config, Qwen2ForCausalLM, {"attn_implementation": "eager"}),
    "qwen2, windows of 6": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}


def nano_model(kind: str = "qwen2", seed: int = 0, **changes: Any) -> Any:
    """Two layers of 32 with weights large enough that every token of the context counts; `changes` are further fields
    of the model's configuration.
    """
    config, model, extra = KINDS[kind]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    torch.manual_seed(seed)
    return model(config(**sizes | extra | changes)).eval()


def keys(name: str, count: int) -> tuple[SampleKey, ...]:
    return tuple(SampleKey(run_seed=7, weight_version=0, prompt_id=name, sample_index=i) for i in range(count))


def request(prompt: tuple[int, ...], count: int = 1, name: str | None = None, **sampling: Any) -> GenerationRequest:
    """`count` samples of a prompt, named after its length unless a name is given."""
    name = f"of {len(prompt)} tokens" if name is None else name
    sampling.setdefault("max_generate_length", 12)
    return GenerationRequest(prompt_ids=prompt, sampling=SamplingParams(**sampling), keys=keys(name, count))


def prompts(*lengths: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Random prompts of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, EOS, (length,), generator=generator).tolist()) for length in lengths]


def full_forward_logprobs(model: Any, prompt: tuple[int, ...], completion: Completion, temperature: float) -> Tensor:
    """What a learner computes: one forward pass over prompt and completion, without cache or padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0]
    sampled = torch.tensor(completion.token_ids)
    scores = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    chosen: Tensor = scores.gather(1, sampled[:, None])[:, 0]
    return chosen

"""Random models of known shapes, batches for them, and how much arithmetic they take."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from skyrl.batch import TrainingBatch

REWARD = '''def score(completion, ground_truth, **others):
    """Another number for almost every answer, so that groups have variance."""
    return len(set(completion)) % 7 / 7
'''


@frozen(kw_only=True)
class Shape:
    """A model of Qwen2's architecture, with the sizes of a step on it."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    prompts: int
    samples: int
    """Answers to each prompt."""

    prompt_tokens: int
    answer_tokens: int
    """Longest answer."""

    micro_batch_tokens: int
    padded_rows: int
    """Rows of a micro-batch of the loops that pad."""

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


SHAPES = {
    "tiny": Shape(
        hidden=64,
        inner=128,
        layers=2,
        heads=4,
        kv_heads=2,
        vocabulary=384,
        prompts=2,
        samples=4,
        prompt_tokens=12,
        answer_tokens=8,
        micro_batch_tokens=512,
        padded_rows=4,
    ),
    "0.5b": Shape(  # Qwen2.5-0.5B
        hidden=896,
        inner=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        vocabulary=151_936,
        prompts=16,
        samples=8,
        prompt_tokens=256,
        answer_tokens=256,
        micro_batch_tokens=16_384,
        padded_rows=8,
    ),
    "1.5b": Shape(  # Qwen2.5-1.5B
        hidden=1536,
        inner=8960,
        layers=28,
        heads=12,
        kv_heads=2,
        vocabulary=151_936,
        prompts=16,
        samples=8,
        prompt_tokens=256,
        answer_tokens=256,
        micro_batch_tokens=16_384,
        padded_rows=8,
    ),
}


def prepare(shape: Shape, folder: Path, device: torch.device) -> None:
    """Writes `model/` with its tokenizer, `train.jsonl` and `reward.py`."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    symbols = sorted(ByteLevel.alphabet())
    special = ["<|unknown|>", "<|end|>", "<|pad|>"]
    symbols += [f"w{number}" for number in range(shape.vocabulary - len(symbols) - len(special))]
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)},
        merges=[],
        unk_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
        chat_template="{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}",
    )
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefgh", k=shape.prompt_tokens - 1)) for _ in range(8 * shape.prompts)]
    rows = [{"prompt": [{"role": "user", "content": text}], "reward_spec": {"ground_truth": ""}} for text in texts]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def rollouts(shape: Shape) -> TrainingBatch:
    """A batch as a step of GRPO has it: log-normal lengths of answers, of which the longest is `answer_tokens`."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(shape.rows, generator=generator).mul(0.8).exp()
    answers = (spread * shape.answer_tokens / 5).clamp(1, shape.answer_tokens).long()
    answers[0] = shape.answer_tokens
    lengths = answers + shape.prompt_tokens
    columns = torch.arange(int(lengths.max()))
    mask = (columns >= shape.prompt_tokens) & (columns < lengths.unsqueeze(1))
    ids = torch.randint(0, shape.vocabulary - 3, mask.shape, generator=generator)
    groups = torch.arange(shape.rows) // shape.samples
    ids[:, : shape.prompt_tokens] = ids[groups * shape.samples, : shape.prompt_tokens]
    return TrainingBatch(
        input_ids=ids,
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        rewards=torch.zeros(mask.shape),
        groups=groups,
        answer_lengths=answers,
        advantages=torch.randn(shape.rows, 1, generator=generator) * mask,
    )


def training_flops(shape: Shape, batch: TrainingBatch, *, shared: bool) -> float:
    """Forward and backward over the real tokens, nothing computed twice: 6 for each weight and token, the output matrix
    for the answers only, and 12 x hidden for each pair of a query and a key in each layer. `shared`: prompts once.
    """
    answers = batch.lengths - shape.prompt_tokens
    prompts = shape.prompts if shared else shape.rows
    tokens = prompts * shape.prompt_tokens + int(answers.sum())
    pairs = prompts * shape.prompt_tokens**2 / 2 + float((answers * (shape.prompt_tokens + answers / 2)).sum())
    heads = 2 * shape.hidden + 2 * shape.hidden * shape.kv_heads // shape.heads
    layer = shape.hidden * heads + 3 * shape.hidden * shape.inner
    linear = 6.0 * (shape.layers * layer * tokens + shape.vocabulary * shape.hidden * int(answers.sum()))
    return linear + 12.0 * shape.hidden * shape.layers * pairs


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations per second of a product of square matrices, best of ten."""
    import time

    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(10):
        finish(device)
        begun = time.perf_counter()
        one @ other
        finish(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - begun))
    return best


def finish(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """Largest memory of tensors on a GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def dtype_of(device: torch.device) -> torch.dtype:
    """The type that is computed in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def settings(shape: Shape, folder: Path, run: Path, device: str, **more: Any) -> dict[str, Any]:
    """A run of GRPO on the model in `folder`, with dotted paths."""
    return {
        "data.train_data": [str(folder / "train.jsonl")],
        "environment.env_class": f"{folder / 'reward.py'}:score",
        "generator.n_samples_per_prompt": shape.samples,
        "generator.sampling_params.max_generate_length": shape.answer_tokens,
        "generator.inference_engine.backend": "torch",
        "trainer.device": device,
        "trainer.flash_attn": False,
        "trainer.max_tokens_per_microbatch": shape.micro_batch_tokens,
        "trainer.train_batch_size": shape.prompts,
        "trainer.policy_mini_batch_size": shape.prompts,
        "trainer.max_prompt_length": shape.prompt_tokens,
        "trainer.policy.model.path": str(folder / "model"),
        "trainer.algorithm.use_kl_loss": False,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": 0,
        "trainer.run_path": str(run),
        **more,
    }

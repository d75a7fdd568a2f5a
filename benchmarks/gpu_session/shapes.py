"""Random models of known shapes, batches for them, and how much arithmetic they take."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import evolve, frozen

from skyrl.batch import TrainingBatch

REWARD = '''def score(completion, ground_truth, **others):
    """Another number for almost every answer, so that groups have variance."""
    return len(set(completion)) % 7 / 7
'''


@frozen(kw_only=True)
class Shape:
    """A model of Qwen2's or Qwen3's architecture, with the sizes of a step on it."""

    family: Literal["qwen2", "qwen3"] = "qwen2"
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int = 4096
    """Longest sequence, in tokens."""

    prompts: int
    samples: int
    """Answers to each prompt."""

    prompt_tokens: int
    answer_tokens: int
    """Longest answer."""

    micro_batch_tokens: int = 16_384
    padded_rows: int = 8
    """Rows of a micro-batch of the loops that pad."""

    learning_rate: float = 1e-6
    steps: int = 4
    """Steps of a whole run; the first only warms up."""

    recompute: bool = True
    """Whether the steps of a whole run compute activations again in backward."""

    rl_rows: tuple[int, ...] = ()
    sft_rows: tuple[int, ...] = ()
    lora_rows: tuple[int, ...] = ()
    """Lengths of single rows, in tokens."""

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self.prompts * self.samples

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        attention = 2 * self.hidden * self.attention_width + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + 3 * self.hidden * self.inner

    @property
    def weights(self) -> int:
        """Weights of all matrices; the embedding is that of the output."""
        return self.layers * self.layer_weights + self.vocabulary * self.hidden


_HALF = Shape(  # Qwen2.5-0.5B
    hidden=896,
    inner=4864,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    vocabulary=151_936,
    prompts=16,
    samples=8,
    prompt_tokens=256,
    answer_tokens=256,
)
_SMOLLM2 = Shape(  # SmolLM2-135M, whose weights come from a folder
    hidden=576,
    inner=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49_152,
    prompts=32,
    samples=8,
    prompt_tokens=64,
    answer_tokens=24,
    padded_rows=64,
    learning_rate=1e-5,
    steps=10,
    recompute=False,
)
_QWEN3 = Shape(  # Qwen3-0.6B
    family="qwen3",
    hidden=1024,
    inner=3072,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    positions=131_072,
    prompts=1,
    samples=1,
    prompt_tokens=1,
    answer_tokens=16_383,
    rl_rows=(16_384, 65_536),
    sft_rows=(8_192, 16_384),
    lora_rows=(16_384,),
)
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        hidden=64,
        inner=128,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocabulary=384,
        prompts=2,
        samples=4,
        prompt_tokens=12,
        answer_tokens=8,
        micro_batch_tokens=512,
        padded_rows=4,
        steps=3,
        rl_rows=(64, 128),
        sft_rows=(64,),
        lora_rows=(64,),
    ),
    "0.5b": _HALF,
    "0.6b": _QWEN3,
    "0.6b-groups": evolve(_QWEN3, prompts=16, samples=8, prompt_tokens=256, answer_tokens=256),
    "1.5b": evolve(_HALF, hidden=1536, inner=8960, layers=28, heads=12, head_dim=128),  # Qwen2.5-1.5B
    "smollm2": _SMOLLM2,
    "smollm2-long": evolve(_SMOLLM2, prompts=16, answer_tokens=256, padded_rows=32, steps=5),
}


def ensure_model(shape: Shape, folder: Path, device: str) -> Path:
    """The folder, with a random model, `train.jsonl` and `reward.py` in it.

    If it is not there, another process writes it, so that this one holds no memory of the device.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            unfinished = Path(scratch, "model-and-data")
            unfinished.mkdir()
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                process.submit(prepare, shape, unfinished, device).result()
            unfinished.rename(folder)
    return folder


def prepare(shape: Shape, folder: Path, device: str) -> None:
    """Writes `model/` with its tokenizer, `train.jsonl` and `reward.py`."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

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
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
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


def one_row(shape: Shape, tokens: int) -> TrainingBatch:
    """A batch of one row, of which every token but the first is learned."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(tokens) > 0).unsqueeze(0)
    return TrainingBatch(
        input_ids=torch.randint(0, shape.vocabulary - 3, (1, tokens), generator=generator),
        lengths=torch.tensor([tokens]),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(1, tokens),
        rewards=torch.zeros(1, tokens),
        groups=torch.zeros(1, dtype=torch.long),
        answer_lengths=torch.tensor([tokens - 1]),
        advantages=torch.randn(1, tokens, generator=generator) * mask,
    )


def training_flops(shape: Shape, batch: TrainingBatch, *, shared: bool) -> float:
    """Forward and backward over the real tokens, nothing computed twice: 6 for each weight and token, the output matrix
    for learned tokens only, and 12 x width of the heads for each pair of a query and a key in each layer. `shared`:
    prompts once.
    """
    answers = batch.loss_mask.sum(1)
    prompts_of = batch.lengths - answers
    if shared:
        first = torch.ones_like(batch.groups, dtype=torch.bool)
        first[1:] = batch.groups[1:] != batch.groups[:-1]
        prompts = prompts_of * first
    else:
        prompts = prompts_of
    tokens = int(prompts.sum() + answers.sum())
    pairs = float((prompts * prompts_of / 2 + answers * (prompts_of + answers / 2)).sum())
    linear = 6.0 * (shape.layers * shape.layer_weights * tokens + shape.vocabulary * shape.hidden * int(answers.sum()))
    return linear + 12.0 * shape.attention_width * shape.layers * pairs


DATASHEET_FLOPS = 989e12
"""Dense bfloat16 of an H100 SXM and an H200, operations per second, from NVIDIA's data sheets."""


def flops_as_prime_rl(shape: Shape, tokens: int, *, lora: bool = False) -> float:
    """Operations for each token of a row of `tokens`, as prime-rl's benchmarks count them.

    6 for each weight, of which frozen ones need no gradient and count 4, and 6 x layers x width of the heads x tokens
    for causal attention.
    """
    return (4.0 if lora else 6.0) * shape.weights + 6.0 * shape.layers * shape.attention_width * tokens


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
        "trainer.gradient_checkpointing": shape.recompute,
        "trainer.max_tokens_per_microbatch": shape.micro_batch_tokens,
        "trainer.train_batch_size": shape.prompts,
        "trainer.policy_mini_batch_size": shape.prompts,
        "trainer.max_prompt_length": shape.prompt_tokens,
        "trainer.policy.model.path": str(folder / "model"),
        "trainer.policy.optimizer_config.lr": shape.learning_rate,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": 0,
        "trainer.run_path": str(run),
        **more,
    }

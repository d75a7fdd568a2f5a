"""The quick start's GRPO step as a plain script: torch, transformers, and no framework. `grpo_step.py` runs it.

Same model, data, batch, objective, optimizer and schedule, and the same work: each prompt is prefilled once for its
eight answers, finished answers leave the batch, and the update computes each prompt once and leaves out groups without
advantage. Nothing else: no second copy of the weights, no checks, no metrics but the reward, no files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow.parquet
import torch
from attrs import frozen
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, get_inverse_sqrt_schedule

PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 12
LEARNING_RATE, WARM_UP = 2e-4, 10


@frozen(kw_only=True)
class Row:
    """A prompt and the right answer to it."""

    ids: tuple[int, ...]
    answer: str


def run(base: Path, steps: int, seed: int, begin: Callable[[], None], end: Callable[[float], None]) -> None:
    """Train for so many steps: `begin()` before each of them, `end(mean reward)` after it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(base / "model")
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    schedule = get_inverse_sqrt_schedule(optimizer, num_warmup_steps=WARM_UP)
    batches = rows_of(base, tokenizer, seed)
    for _ in range(steps):
        begin()
        rows = next(batches)
        answers = sample(model, [row.ids for row in rows], tokenizer.eos_token_id)
        words = tokenizer.batch_decode([answer.tolist() for answer in answers], skip_special_tokens=True)
        right = [word.strip() == rows[index // SAMPLES].answer for index, word in enumerate(words)]
        rewards = torch.tensor(right, dtype=torch.float32)
        update(model, [row.ids for row in rows], answers, rewards)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        end(rewards.mean().item())


def rows_of(base: Path, tokenizer: Any, seed: int) -> Iterator[list[Row]]:
    """Batches of prompts in a random order."""
    table = pyarrow.parquet.read_table(base / "train.parquet").to_pylist()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, len(order), PROMPTS):
        chosen = [table[index] for index in order[start : start + PROMPTS]]
        texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in chosen]
        ids = tokenizer(texts, add_special_tokens=False).input_ids
        yield [
            Row(ids=tuple(token_ids), answer=row["reward_spec"]["ground_truth"])
            for token_ids, row in zip(ids, chosen, strict=True)
        ]


@torch.no_grad()
def sample(model: Any, prompts: Sequence[Sequence[int]], eos: int) -> list[Tensor]:
    """Answers of at most NEW_TOKENS ids, SAMPLES to each prompt, from the model's own distribution."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[eos] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    mask = torch.arange(longest) >= longest - lengths
    positions = (torch.arange(longest) - (longest - lengths)).clamp(min=0)
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
    ).logits
    cache.batch_repeat_interleave(SAMPLES)
    logits, mask, lengths = (tensor.repeat_interleave(SAMPLES, 0) for tensor in (logits, mask, lengths))
    tokens = torch.full((len(logits), NEW_TOKENS), eos)
    live = torch.arange(len(logits))
    for column in range(NEW_TOKENS):
        drawn = torch.softmax(logits[:, -1], -1).div_(torch.empty_like(logits[:, -1]).exponential_()).argmax(-1)
        tokens[live, column] = drawn
        going = (drawn != eos).nonzero().squeeze(1)
        if column == NEW_TOKENS - 1 or not len(going):
            break
        if len(going) < len(live):
            cache.batch_select_indices(going)
            live, mask, lengths, drawn = live[going], mask[going], lengths[going], drawn[going]
        mask = torch.cat([mask, torch.ones(len(live), 1, dtype=torch.bool)], 1)
        logits = model(
            input_ids=drawn.unsqueeze(1),
            attention_mask=mask,
            position_ids=lengths + column,
            past_key_values=cache,
        ).logits
    ends = torch.where((tokens == eos).any(1), (tokens == eos).int().argmax(1) + 1, NEW_TOKENS)
    return [row[:end] for row, end in zip(tokens, ends.tolist(), strict=True)]


def update(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Tensor], rewards: Tensor) -> None:
    """Add the gradient of the mean over tokens of -advantage x log-probability, advantages relative to the group."""
    groups = rewards.view(-1, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    tokens = sum(map(len, answers))
    used = [group for group in range(len(prompts)) if groups[group].min() != groups[group].max()]
    if not used:
        return
    own = [answers[group * SAMPLES : (group + 1) * SAMPLES] for group in used]
    logprobs = logprobs_of(model, [torch.tensor(prompts[group]) for group in used], own)
    lengths = torch.tensor([len(answer) for answer in answers]).view(-1, SAMPLES)
    weights = advantages[used].flatten().repeat_interleave(lengths[used].flatten())
    loss = -(logprobs * weights).sum() / tokens
    loss.backward()


def logprobs_of(model: Any, prompts: Sequence[Tensor], answers: Sequence[Sequence[Tensor]]) -> Tensor:
    """Log-probability of each token of the answers to each prompt, one after the other; a prompt is computed once."""
    layouts = [layout(len(prompt), own) for prompt, own in zip(prompts, answers, strict=True)]
    ids = pad_sequence([torch.cat([p, *own]) for p, own in zip(prompts, answers, strict=True)], batch_first=True)
    positions, parts = (pad_sequence([row_layout[n] for row_layout in layouts], batch_first=True) for n in (0, 1))
    before = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    seen = ((parts.unsqueeze(2) == parts.unsqueeze(1)) | (parts == 0).unsqueeze(1)) & before
    hidden = model.model(
        input_ids=ids, position_ids=positions, attention_mask=seen.unsqueeze(1), use_cache=False
    ).last_hidden_state
    predicting = torch.cat([row * ids.shape[1] + row_layout[2] for row, row_layout in enumerate(layouts)])
    logprobs = torch.log_softmax(model.lm_head(hidden.flatten(0, 1)[predicting]), -1)
    targets = torch.cat([token for own in answers for token in own])
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)


def layout(prompt: int, answers: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Answers behind one copy of their prompt: the position of each token, its part (0 is the prompt) and, for each
    token of an answer, the place of the token that predicts it.
    """
    sizes = torch.tensor([prompt, *map(len, answers)])
    starts = sizes.cumsum(0) - sizes
    parts = torch.arange(len(sizes)).repeat_interleave(sizes)
    indices = torch.arange(len(parts))
    positions = torch.where(parts == 0, indices, indices - starts[parts] + prompt)
    predicting = torch.where(indices == starts[parts], prompt - 1, indices - 1)
    return positions, parts, predicting[prompt:]

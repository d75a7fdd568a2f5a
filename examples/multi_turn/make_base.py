"""Makes what the multi-turn example needs: a tokenizer, a small model that listens badly, and two datasets.

    python examples/multi_turn/make_base.py [--out runs/multi-turn-base]

Nothing is downloaded and no GPU is needed; two cores take less than a minute. A folder that is complete is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

# Threads of torch that wait for each other by spinning bring a shared machine to a stop. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from guess_env import hint
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

STEPS, BATCH, LEARNING_RATE = 200, 64, 2e-3
LISTENS = 0.3
"""Share of the worked conversations in which the second try uses what was told; in the others it is any digit."""

TRAIN_ROWS, VALIDATION_ROWS = 1024, 128

CHAT_TEMPLATE = """\
{%- for message in messages %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


def build_tokenizer() -> Any:
    """One token for each byte, and four special ones. The class is what transformers builds beside a Qwen2 model."""
    return Qwen2Tokenizer(
        vocab={character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # a byte is never unknown
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=64,
    )


def build_model(tokenizer: Any) -> Any:
    """Qwen2 in miniature, fresh: half a million parameters."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        **special,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """A guess, what it was told, and a second try that sometimes listens."""
    secret, guess = rng.randrange(10), rng.randrange(10)
    if secret == guess:
        return [{"role": "user", "content": "digit?"}, {"role": "assistant", "content": str(guess)}]
    answer = secret if rng.random() < LISTENS else rng.randrange(10)
    return [
        {"role": "user", "content": "digit?"},
        {"role": "assistant", "content": str(guess)},
        {"role": "user", "content": hint(secret)},
        {"role": "assistant", "content": str(answer)},
    ]


def warm_start(model: Any, tokenizer: Any, rng: random.Random) -> None:
    """Supervised steps on worked conversations. Only what the assistant says is learned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, step / 20, (STEPS - step + 1) / 100)
        loss = model(**batch(tokenizer, [conversation(rng) for _ in range(BATCH)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"  step {step} of {STEPS}: loss {loss.item():.2f}", flush=True)


def batch(tokenizer: Any, conversations: list[list[dict[str, str]]]) -> dict[str, torch.Tensor]:
    """Right-padded (B, L) ids, and labels that are -100 outside what the assistant says and its ends."""
    rows = []
    for messages in conversations:
        ids, labels = [], []
        for message in messages:
            header = tokenizer.encode(f"<|{message['role']}|>")
            said = [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
            ids += header + said
            labels += [-100] * len(header) + (said if message["role"] == "assistant" else [-100] * len(said))
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    padded = [
        (ids + [tokenizer.pad_token_id] * (width - len(ids)), labels + [-100] * (width - len(ids)))
        for ids, labels in rows
    ]
    return {"input_ids": torch.tensor([ids for ids, _ in padded]), "labels": torch.tensor([each for _, each in padded])}


def write_rows(path: Path, count: int) -> None:
    """Every row asks the same; the secrets go round."""
    rows = [
        {
            "data_source": "guess",
            "prompt": [{"role": "user", "content": "digit?"}],
            "reward_spec": {"method": "rule", "ground_truth": str(number % 10)},
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Fill the folder, the model last."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "train.jsonl", TRAIN_ROWS)
    write_rows(out / "validation.jsonl", VALIDATION_ROWS)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    warm_start(model, tokenizer, rng)
    model.save_pretrained(out / "model.tmp")
    tokenizer.save_pretrained(out / "model.tmp")
    (out / "model.tmp").rename(out / "model")


def main() -> None:
    """Unless it is there already."""
    parser = argparse.ArgumentParser(
        description="Make the tokenizer, the model and the data of the multi-turn example."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/multi-turn-base"), help="folder to make (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of model and warm start (%(default)s)")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    if (arguments.out / "model").exists():
        print(f"{arguments.out} is complete already: nothing to do")
        return
    make(arguments.out, arguments.seed)
    print(f"made {arguments.out}")


if __name__ == "__main__":
    main()

"""Makes the example of MCP tools and trains it: prompts, a small model that rarely looks anything up, a run.

    python examples/mcp/train.py [PATH=VALUE ...]        arguments go to `skyrl run`

Nothing is downloaded and no GPU is needed.
"""

from __future__ import annotations

import os
import random
import string
import sys
from pathlib import Path

from digits_server import digit

from skyrl.starter.tiny_chat import (
    TOOL_TEMPLATE,
    byte_tokenizer,
    make_once,
    save,
    seeded,
    small_qwen2,
    train,
    warm_start,
    write_rows,
)

BASE = Path("runs/mcp-base")
CONFIG = Path(__file__).with_name("grpo.toml")
STEPS, BATCH, LEARNING_RATE = 400, 64, 2e-3
LOOKS = 0.3
"""Share of the worked conversations that look the digit up; in the others it is guessed."""

TRAIN_ROWS, VALIDATION_ROWS = 1024, 128
CALL = ('<tool_call>{"name": "look", "arguments": {"key": "', '"}}</tool_call>')
"""Beginning and end of a call, each one token of the model."""


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """A question, and an answer that is looked up or guessed. The template shows tools as the system message."""
    pair = drawn(rng)
    prompt = [{"role": "system", "content": "look"}, {"role": "user", "content": f"{pair}?"}]
    if rng.random() >= LOOKS:
        return [*prompt, {"role": "assistant", "content": str(rng.randrange(10))}]
    return [
        *prompt,
        {"role": "assistant", "content": pair.join(CALL)},
        {"role": "tool", "content": digit(pair)},
        {"role": "assistant", "content": digit(pair)},
    ]


def drawn(rng: random.Random) -> str:
    """A pair of letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=2))


def rows(rng: random.Random, count: int) -> list[dict[str, object]]:
    """Questions with their digits."""
    pairs = [drawn(rng) for _ in range(count)]
    return [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{pair}?"}],
            "reward_spec": {"method": "rule", "ground_truth": digit(pair)},
        }
        for pair in pairs
    ]


def make(out: Path, seed: int = 0) -> None:
    """Fill the folder."""
    rng = seeded(seed)
    write_rows(out / "train.jsonl", rows(rng, TRAIN_ROWS))
    write_rows(out / "validation.jsonl", rows(rng, VALIDATION_ROWS))
    tokenizer = byte_tokenizer(length=96, words=CALL, template=TOOL_TEMPLATE)
    model = small_qwen2(tokenizer, hidden_size=128, layers=2)
    warm_start(model, tokenizer, lambda: conversation(rng), steps=STEPS, batch_size=BATCH, lr=LEARNING_RATE)
    save(model, tokenizer, out / "model")


def main() -> None:
    """Make what is missing, and train."""
    make_once(BASE, make)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the server's python
    train(CONFIG)


if __name__ == "__main__":
    main()

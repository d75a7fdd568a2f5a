"""Makes the multi-turn example and trains it: prompts, a small model that listens badly, a run.

    python examples/multi_turn/train.py [PATH=VALUE ...]        arguments go to `skyrl run`

Nothing is downloaded and no GPU is needed.
"""

from __future__ import annotations

import random
from pathlib import Path

from guess_env import hint

from skyrl.starter.tiny_chat import byte_tokenizer, make_once, save, seeded, small_qwen2, train, warm_start, write_rows

BASE = Path("runs/multi-turn-base")
CONFIG = Path(__file__).with_name("grpo.toml")
STEPS, BATCH, LEARNING_RATE = 200, 64, 2e-3
LISTENS = 0.3
"""Share of the worked conversations in which the second try uses what was told; in the others it is any digit."""

TRAIN_ROWS, VALIDATION_ROWS = 1024, 128


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


def rows(count: int) -> list[dict[str, object]]:
    """Every row asks the same; the secrets go round."""
    return [
        {
            "data_source": "guess",
            "prompt": [{"role": "user", "content": "digit?"}],
            "reward_spec": {"method": "rule", "ground_truth": str(number % 10)},
        }
        for number in range(count)
    ]


def make(out: Path, seed: int = 0) -> None:
    """Fill the folder."""
    rng = seeded(seed)
    write_rows(out / "train.jsonl", rows(TRAIN_ROWS))
    write_rows(out / "validation.jsonl", rows(VALIDATION_ROWS))
    tokenizer = byte_tokenizer(length=64)
    model = small_qwen2(tokenizer, hidden_size=128, layers=2)
    warm_start(model, tokenizer, lambda: conversation(rng), steps=STEPS, batch_size=BATCH, lr=LEARNING_RATE)
    save(model, tokenizer, out / "model")


def main() -> None:
    """Make what is missing, and train."""
    make_once(BASE, make)
    train(CONFIG)


if __name__ == "__main__":
    main()

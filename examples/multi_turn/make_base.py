"""Makes what the multi-turn example needs: a tokenizer, a small model that listens badly, and two datasets.

    python examples/multi_turn/make_base.py [--out runs/multi-turn-base]

Nothing is downloaded and no GPU is needed; two cores take less than a minute. A folder that is complete is left alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is

from guess_env import hint
from tiny_chat import byte_tokenizer, made_whole, save, seeded, small_qwen2, warm_start

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
    """Fill the folder."""
    rng = seeded(seed)
    write_rows(out / "train.jsonl", TRAIN_ROWS)
    write_rows(out / "validation.jsonl", VALIDATION_ROWS)
    tokenizer = byte_tokenizer(length=64)
    model = small_qwen2(tokenizer, hidden_size=128, layers=2)
    warm_start(model, tokenizer, lambda: conversation(rng), steps=STEPS, batch_size=BATCH, lr=LEARNING_RATE)
    save(model, tokenizer, out / "model")


def main() -> None:
    """Unless it is there already."""
    parser = argparse.ArgumentParser(
        description="Make the tokenizer, the model and the data of the multi-turn example."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/multi-turn-base"), help="folder to make (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of model and warm start (%(default)s)")
    arguments = parser.parse_args()
    if (arguments.out / "model").exists():
        print(f"{arguments.out} is complete already: nothing to do")
        return
    with made_whole(arguments.out) as folder:
        make(folder, arguments.seed)
    print(f"made {arguments.out}")


if __name__ == "__main__":
    main()

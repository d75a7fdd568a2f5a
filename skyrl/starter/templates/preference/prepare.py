"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in seconds.
"""

import random
from itertools import product

from skyrl.starter.tiny_chat import Conversation, make_task

WORDS = ["".join(letters) for letters in product("abcdefgh", repeat=3) if letters[0] != letters[2]]
HELD_OUT = WORDS[3::5]
"""Words for validation. Training does not see them."""


def row(word: str) -> dict[str, object]:
    """A row is a pair of answers to a prompt: here the word backwards is better than the word as it is."""
    return {"prompt": word, "chosen": word[::-1], "rejected": word}


def example(rng: random.Random) -> Conversation:
    """What the model starts from: either answer, as often as the other."""
    word = rng.choice(WORDS)
    return [{"role": "user", "content": word}, {"role": "assistant", "content": word[:: rng.choice((1, -1))]}]


if __name__ == "__main__":
    training = [row(word) for word in WORDS if word not in HELD_OUT]
    make_task(training, [row(word) for word in HELD_OUT], example, training_rows=2048, steps=150)

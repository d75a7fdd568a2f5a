"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in seconds.
"""

from itertools import product

from skyrl.starter.tiny_chat import make_task

WORDS = ["".join(letters) for letters in product("abcdefgh", repeat=3)]
HELD_OUT = WORDS[3::5]
"""Words for validation. Training does not see them."""


def row(word: str) -> dict[str, object]:
    """A row is a chat; what the assistant says is learned: here the word backwards."""
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}


if __name__ == "__main__":
    make_task(
        [row(word) for word in WORDS if word not in HELD_OUT], [row(word) for word in HELD_OUT], training_rows=2048
    )

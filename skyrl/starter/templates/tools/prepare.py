"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in about a minute.

The model is trained on example chats first, or it would never call the tool. For a tool of your own, replace
`shelf_row`, `shelf_example` and `WORDS`, the texts that get a token of their own: "A tool of your own on a small model"
in the documentation (docs/tools.md) has all three. Then remove data/ and model/, and run this again.
"""

from tools import SHELVES

from skyrl.starter.shelves import WORDS, shelf_example, shelf_row
from skyrl.starter.tiny_chat import TOOL_TEMPLATE, make_task

PAIRS = [(shelf, str(thing)) for shelf in SHELVES for thing in range(10)]
HELD_OUT = PAIRS[5::9]
"""Shelves for validation, each with what lies on it. Training does not see them."""

LOOKS_WHERE_ASKED = 0.3
"""Share of the example chats that look at the shelf of the question, without which training hardly finds the right
call; the others look anywhere, so that it remains to be learned."""


def row(shelf: str, thing: str) -> dict[str, object]:
    """The columns of a task: a prompt, the answer, and what the tool looks up."""
    return shelf_row(shelf, thing, shelves={shelf: thing})


if __name__ == "__main__":
    make_task(
        [row(*pair) for pair in PAIRS if pair not in HELD_OUT],
        [row(*pair) for pair in HELD_OUT],
        lambda rng: shelf_example(SHELVES, rng, right=LOOKS_WHERE_ASKED),
        validation_rows=64,
        steps=300,
        words=WORDS,
        template=TOOL_TEMPLATE,
    )

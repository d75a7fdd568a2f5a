"""Chats about things on shelves, for templates whose policy calls a tool: rows, and examples to start from."""

from __future__ import annotations

import random
from collections.abc import Sequence

OPENING, CLOSING = '<tool_call>{"name": "look", "arguments": {"shelf": "', '"}}</tool_call>'
WORDS = (OPENING, CLOSING, "<|system|>", "<|tool|>", "nothing", "look")
"""Texts with a token of their own."""


def shelf_row(shelf: str, thing: str, **columns: object) -> dict[str, object]:
    """The columns of a question about one shelf, on which the thing lies; the others are empty."""
    return {
        "data_source": "shelves",
        "prompt": [{"role": "user", "content": shelf}],
        "reward_spec": {"ground_truth": thing},
        **columns,
    }


def shelf_example(shelves: Sequence[str], rng: random.Random, *, right: float) -> list[dict[str, str]]:
    """A question, a call, its result and an answer; what an empty shelf is answered with is any digit.

    `right` is the share of examples that look at the shelf of the question; the others look anywhere.
    """
    shelf, thing = rng.choice(shelves), str(rng.randrange(10))
    looked = shelf if rng.random() < right else rng.choice(shelves)
    content = thing if looked == shelf else "nothing"
    return [
        {"role": "system", "content": "look"},  # as the template shows the tools
        {"role": "user", "content": shelf},
        {"role": "assistant", "content": OPENING + looked + CLOSING},
        {"role": "tool", "content": content},
        {"role": "assistant", "content": content if content != "nothing" else str(rng.randrange(10))},
    ]

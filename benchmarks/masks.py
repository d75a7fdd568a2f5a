"""Rows per second of masking long chats, and how time grows with the number of turns: one JSON line.

    python benchmarks/masks.py [ROWS]        10,000 rows of 100 turns, and as many of 50, by default

Qwen2.5's chat format with a byte tokenizer, every answer learned. `ratio` is the time of 100 turns by that of 50: 2 is
linear. Both sizes take turns, a tenth of the rows at a time, so that a busy machine slows both.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from skyrl.chats.masks import ChatMasks
from skyrl.models.files.chat_templates import BUILT_IN
from skyrl.starter.tiny_chat import byte_tokenizer

TURNS = (50, 100)
PARTS = 10


def chat(turns: int, number: int) -> list[dict[str, Any]]:
    """Questions and answers of a few words."""
    return [
        {"role": role, "content": f"{text} {number} {turn}"}
        for turn in range(turns)
        for role, text in (("user", "How much is it?"), ("assistant", "It is as much as you say."))
    ]


def main() -> None:
    """Print the line."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    tokenizer = byte_tokenizer(1 << 20)
    tokenizer.chat_template = BUILT_IN["qwen3_with_thinking"]
    masks = ChatMasks(tokenizer, all_messages=True)
    seconds = dict.fromkeys(TURNS, 0.0)
    tokens = dict.fromkeys(TURNS, 0)
    for part in range(PARTS):
        for turns in TURNS:
            began = time.process_time()
            for number in range(part, rows, PARTS):
                ids, mask = masks(chat(turns, number))
                assert mask.any()
                tokens[turns] += len(ids)
            seconds[turns] += time.process_time() - began
    line = {f"rows_per_second_{turns}_turns": round(rows / seconds[turns], 1) for turns in TURNS}
    line |= {f"tokens_per_second_{turns}_turns": round(tokens[turns] / seconds[turns]) for turns in TURNS}
    print(json.dumps({"rows": rows, **line, "ratio": round(seconds[TURNS[1]] / seconds[TURNS[0]], 3)}))


if __name__ == "__main__":
    main()

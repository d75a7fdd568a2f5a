"""An agent with a calculator, written with OpenAI's client. It asks a model, computes what the model calls, asks again.

Nothing in this file knows that the model is being trained: with another `base_url` and `api_key` it runs as it is.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import openai

SHOWN: list[dict[str, str]] = [
    {"role": "system", "content": "Use the calculator. It is called as in calc(21 + 45)."},
    {"role": "user", "content": "What is 21 + 45?"},
    {"role": "assistant", "content": "calc(21 + 45)"},
    {"role": "user", "content": "66"},
    {"role": "assistant", "content": "66"},
]
"""What every conversation begins with: how the calculator is used, shown for a sum."""

CALL = re.compile(r"calc\((\d{1,6}) ?([-+*]) ?(\d{1,6})\)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MOST_TURNS = 2


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """Plays one task, at most two turns, and returns the last answer."""
    messages: list[Any] = [*SHOWN, *task["messages"]]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MOST_TURNS):
            answer = await client.chat.completions.create(model=model, messages=messages)
            content = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": content})
            call = CALL.fullmatch(content.strip())
            if call is None:
                break
            messages.append({"role": "user", "content": str(OPERATORS[call[2]](int(call[1]), int(call[3])))})
    return content

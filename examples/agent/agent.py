"""An agent with a tool, written with OpenAI's client: it asks a model which shelf to look at, and for what lies there.

Nothing in this file knows that the model is being trained: with another `base_url` and `api_key` it runs as it is.
"""

import json
from typing import Any

import openai

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a shelf.",
        "parameters": {"type": "object", "properties": {"shelf": {"type": "string"}}, "required": ["shelf"]},
    },
}
MOST_TURNS = 3


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Play one task, at most three turns; 1.0 if the last answer names what lies on the shelf that was asked for."""
    shelves = {task["extra_info"]["shelf"]: task["reward_spec"]["ground_truth"]}
    messages: list[Any] = list(task["messages"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MOST_TURNS):
            answer = await client.chat.completions.create(model=model, messages=messages, tools=[LOOK])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                if call.type == "function":
                    result = look(call.function.arguments, shelves)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return float(message.content == task["reward_spec"]["ground_truth"])


def look(arguments: str, shelves: dict[str, str]) -> str:
    """Say what lies on a shelf."""
    return shelves.get(json.loads(arguments).get("shelf"), "nothing")

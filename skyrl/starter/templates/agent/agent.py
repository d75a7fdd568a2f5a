"""The agent: a program of its own, which calls a model over OpenAI's protocol and knows nothing of training.

Replace it by yours; any client of the protocol will do. With another `base_url` and `api_key` it works as it is.
"""

import json
from typing import Any

import httpx

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a shelf.",
        "parameters": {"type": "object", "properties": {"shelf": {"type": "string"}}, "required": ["shelf"]},
    },
}
SHELVES = "abcdefgh"
MOST_TURNS = 3


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Play one task; 1.0 if the last answer names what lies on the shelf that was asked for."""
    thing = task["reward_spec"]["ground_truth"]
    messages: list[dict[str, Any]] = list(task["messages"])
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=600) as client:
        for _ in range(MOST_TURNS):
            body = {"model": model, "messages": messages, "tools": [LOOK]}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or []:
                content = look(call["function"]["arguments"], {task["extra_info"]["shelf"]: thing})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if not message.get("tool_calls"):
                break
    return float(message["content"] == thing)


def look(arguments: str, shelves: dict[str, str]) -> str:
    """What lies on a shelf."""
    return shelves.get(json.loads(arguments).get("shelf"), "nothing")

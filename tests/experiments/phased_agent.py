"""An agent that tells when it is in the middle of its episode."""

from __future__ import annotations

from typing import Any

import httpx

from tests.experiments.phases import enter


async def asks_twice(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """One question, and another behind the answer."""
    messages = list(task["messages"])
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=120) as http:
        for more in ("a", None):
            body = {"model": model, "messages": messages, "max_tokens": 2}
            answer = await http.post(f"{base_url}/chat/completions", json=body)
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
            if more:
                enter("agent")
                messages.append({"role": "user", "content": more})
    return str(messages[-1]["content"])

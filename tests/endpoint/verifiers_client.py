"""Two turns by verifiers' training client: `python tests/endpoint/verifiers_client.py URL TOKENIZER` prints them.

Runs where verifiers 0.4 is installed, whose dependencies do not fit beside vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import sys

import verifiers.v1 as vf
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.types import AssistantMessage, UserMessage


async def two_turns(url: str, tokenizer: str) -> list[dict[str, object]]:
    """Token ids and log-probabilities of both turns, as the client hands them to a trainer."""
    renderer = Qwen3RendererConfig(thinking_retention="all")  # extends the tokens of earlier turns
    client = TrainClient(
        TrainClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY", renderer_model_name=tokenizer, renderer=renderer)
    )
    task = vf.TraceTask(type="Letters", data=vf.TaskData(idx=0, prompt="ab"))
    trace = vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()))
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=6)
    messages, turns = [UserMessage(content="ab")], []
    for question in ("ba", "unasked"):
        turn = prepare_turn(trace, list(messages))
        response = await client.get_response(ChatDialect(), {"model": "tiny"}, sampling, "session", turn)
        turn.commit(response)
        names = ("prompt_ids", "completion_ids", "completion_logprobs")
        turns.append({name: getattr(response.tokens, name) for name in names})
        messages += [AssistantMessage(content=response.message.content), UserMessage(content=question)]
    return turns


if __name__ == "__main__":
    print(json.dumps(asyncio.run(two_turns(*sys.argv[1:]))))

"""`POST /inference/v1/generate`: token ids in, token ids and log-probabilities out, as verifiers' training client asks.

{"token_ids": [...], "sampling_params": {"temperature": 1, "max_tokens": 64, "n": 1, "logprobs": 1, ...}}
-> {"request_id": ..., "choices": [{"index": 0, "token_ids": [...], "logprobs": {...}, "finish_reason": ...}]}
"""

from __future__ import annotations

import secrets
from typing import Any

from skyrl.endpoint.fields import Fields
from skyrl.endpoint.policy import MOST_ANSWERS, Policy
from skyrl.endpoint.reply import Json, Reply
from skyrl.endpoint.sampling import drawn
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.inference.engine import Completion

_BOOKKEEPING = ("cache_salt", "priority", "request_id", "kv_transfer_params")


async def generate(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> Reply:
    """The answer to one request. Raises `RequestError`."""
    policy.refuse_other_models(body.text("model"))
    body.refuse("features", "the engines read tokens alone", harmless=({},))
    body.refuse("stream", "this route answers as a whole", harmless=(False,))
    body.ignore(*_BOOKKEEPING)
    settings = Fields(body.mapping("sampling_params"))
    ours = policy.served.sampling if trajectory is None else trajectory.sampling
    wanted = drawn(settings, ours, fixed=trajectory is not None, lengths=("max_tokens",))
    count = settings.integer("n", 1, least=1, most=MOST_ANSWERS) or 1
    why = "the engines return the log-probability of the drawn token alone"
    settings.refuse("logprobs", why, harmless=(0, 1))
    settings.ignore("skip_special_tokens", "detokenize", "spaces_between_special_tokens")
    ids = body.ids("token_ids")
    settings.finish()
    body.finish()
    with policy.admitted(count, trajectory):
        prompt = await policy.tokens(ids, trajectory)
        completions = await policy.sample(prompt, wanted, count, trajectory)
        for completion in completions:
            policy.record(trajectory, prompt, completion)
    choices = [_choice(index, completion) for index, completion in enumerate(completions)]
    return Reply({"request_id": secrets.token_hex(12), "choices": choices})


def _choice(index: int, completion: Completion) -> Json:
    """Log-probabilities in nats, in the form of OpenAI's chats, with the ids of tokens as `token_id:N`."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": list(completion.token_ids),
        "logprobs": {"content": content},
        "weight_versions": list(completion.weight_versions),
        "finish_reason": completion.stop_reason,
    }

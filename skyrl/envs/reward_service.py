"""A reward model as an HTTP service.

    POST /score   {"chats": [[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], ...]}
         -> {"scores": [0.71, ...]}    one for each chat, higher is better
    GET  /health  -> {"model": "runs/rm/model"}

An invalid request is answered with 400 and `{"error": ...}`. Without a token, only this machine is served; with one,
every request must carry it.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl.errors import DataError
from skyrl.models.reward_model import RewardModel
from skyrl.processes.service import body_of, has_token

MOST_CHATS = 256


def reward_app(model: RewardModel, name: str, token: str | None = None) -> Starlette:
    """The service, for any ASGI server. With a token, every request needs `Authorization: Bearer TOKEN`."""

    async def score(request: Request) -> JSONResponse:
        if not has_token(token, request):
            return JSONResponse({"error": "this service requires its token: Authorization: Bearer ..."}, 401)
        try:
            chats = chats_of(await body_of(request))
            return JSONResponse({"scores": await run_in_threadpool(model.scores, chats)})
        except (ValueError, RecursionError, DataError) as error:
            return JSONResponse({"error": str(error)}, 400)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"model": name})

    return Starlette(routes=[Route("/score", score, methods=["POST"]), Route("/health", health)])


def chats_of(body: bytes) -> list[list[dict[str, Any]]]:
    """Chats of one request. Raises `ValueError` with a sentence for the client."""
    given = json.loads(body)
    chats = given.get("chats") if isinstance(given, dict) else None
    if not isinstance(chats, list) or not chats or len(chats) > MOST_CHATS:
        raise ValueError(f"the body has to be an object with 'chats', a list of 1 to {MOST_CHATS} chats")
    for chat in chats:
        if not isinstance(chat, list) or not chat or not all(_is_message(message) for message in chat):
            raise ValueError("a chat is a list of messages with the texts 'role' and 'content'")
    return chats


def _is_message(given: object) -> bool:
    return isinstance(given, dict) and all(isinstance(given.get(name), str) for name in ("role", "content"))

"""A reward model as an HTTP service.

    POST /score   {"chats": [[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], ...]}
         -> {"scores": [0.71, ...]}    one for each chat, higher is better
    GET  /health  -> {"model": "runs/rm/model"}

An invalid request is answered with 400 and `{"error": ...}`. Without a token, only this machine is served; with one,
every request must carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl.errors import DataError, RequestError
from skyrl.models.saving.reward_model import RewardModel
from skyrl.processes.service_app import ServiceThreads, json_object, post_route, service_app

MOST_CHATS = 256


def reward_app(model: RewardModel, name: str, token: str | None = None) -> Starlette:
    """The service, for any ASGI server. With a token, every request needs `Authorization: Bearer TOKEN`."""
    workers = ServiceThreads(1, "skyrl-reward")  # the model computes for one request at a time

    async def score(request: Request, body: bytes) -> JSONResponse:
        chats = chats_of(json_object(body))
        try:
            scores = await workers.run(lambda gone: model.scores(chats, gone.has_happened))
        except DataError as error:
            raise RequestError(str(error)) from error
        return JSONResponse({"scores": scores})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"model": name})

    return service_app([post_route("/score", score), Route("/health", health)], token=token)


def chats_of(body: Mapping[str, object]) -> list[list[dict[str, Any]]]:
    """Chats of one request. Raises `RequestError`."""
    chats = body.get("chats")
    if not isinstance(chats, list) or not chats or len(chats) > MOST_CHATS:
        raise RequestError(f"the body has to be an object with 'chats', a list of 1 to {MOST_CHATS} chats")
    for chat in chats:
        if not isinstance(chat, list) or not chat or not all(_is_message(message) for message in chat):
            raise RequestError("a chat is a list of messages with the texts 'role' and 'content'")
    return chats


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))

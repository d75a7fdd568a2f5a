"""Records what the real client sends: `python -m tests.training_service.record_client` writes `client_0_38_0.json`."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import tinker
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker import types

from skyrl.training_service import routes, serving
from tests.training_service.running import KEY, client_of, running
from tests.training_service.test_client_methods import BASE, DATA, GREEDY, PROMPT

RECORD = Path(__file__).with_name("client_0_38_0.json")

SESSION = "s-" + "0" * 16
"""Id in place of the session's, of the same length, as protobuf counts bytes."""


class _Recording:
    """Notes the requests that pass through to an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.requests: list[tuple[str, str, str, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()

        async def noted() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        await self._app(scope, noted, send)
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["method"], scope["path"], headers.get("content-type", ""), bytes(body)))


def record() -> None:
    """Let the client use what it can, and write one request of each kind."""
    original = routes.training_app
    recordings: list[_Recording] = []

    def recorded(*arguments: object, **named: object) -> _Recording:
        app: Starlette = original(*arguments, **named)  # type: ignore[arg-type]  # whatever the app is made with
        recordings.append(_Recording(app))
        return recordings[-1]

    with (
        mock.patch.object(serving, "training_app", recorded),
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder)) as service,
        client_of(service.url) as client,
    ):
        session = client.holder.get_session_id()
        training = client.create_lora_training_client(BASE, rank=4, seed=7).result()
        training.forward_backward(DATA, "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        path = training.save_state("one", overwrite=True, ttl_seconds=3600, user_metadata={"a": "b"}).result().path
        training.save_weights_for_sampler("two").result()
        client.create_training_client_from_state_with_optimizer(path).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        sampling.sample(PROMPT, 2, GREEDY, topk_prompt_logprobs=2).result()
        client.create_sampling_client(model_path=path).result()
        rest = tinker.RestClient(base_url=service.url, api_key=KEY)
        rest.get_weights_info_by_tinker_path(path).result()
        rest.copy_weights(path, destination_project_id="p").result()
    kept: dict[tuple[str, str, tuple[str, ...]], dict[str, str]] = {}
    for method, route, kind, body in recordings[0].requests:
        route, body = route.replace(session, SESSION), body.replace(session.encode(), SESSION.encode())
        fields = () if "json" not in kind else tuple(json.loads(body))
        kept.setdefault(
            (method, route, fields), {"method": method, "path": route, "type": kind, "body": _text(kind, body)}
        )
    RECORD.write_text(json.dumps(list(kept.values()), indent=1) + "\n")


def _text(kind: str, body: bytes) -> str:
    return base64.b64encode(body).decode() if kind == "application/x-protobuf" else body.decode()


if __name__ == "__main__":
    os.environ |= {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": KEY}
    record()

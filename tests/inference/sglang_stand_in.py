"""A stand-in for SGLang's server: its documented routes, over a torch engine. SGLang has no build for a CPU.

The engine computes on the loop of the server's own thread. What the routes do not say is not done: an unknown field of
the sampling parameters is refused, a pause in place does not flush, and weights are named by whoever sends them.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import uvicorn
from attrs import evolve
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from skyrl.config import SamplingParams
from skyrl.errors import SkyRLError
from skyrl.inference.adapters import shared
from skyrl.inference.engine import Completion, GenerationRequest, InFlight, NewTokens, SampleKey
from skyrl.inference.torch.engine import TorchEngine
from skyrl.models.files.naming import named_weights
from skyrl.processes.service import listen
from skyrl.weight_receiver.incoming_weights import SharedWeights

Handler = Callable[[dict[str, Any]], Coroutine[Any, Any, Any]]

_PAUSES: dict[str, InFlight] = {"abort": "finish", "retract": "recompute", "in_place": "keep"}

SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "min_new_tokens"),
    *("max_new_tokens", "stop", "stop_token_ids", "sampling_seed", "skip_special_tokens", "no_stop_trim"),
}
"""Sampling parameters that the stand-in understands."""


class SGLangStandIn:
    """`with SGLangStandIn(engine, model_path) as server:` answers at `server.url` until it is left."""

    def __init__(
        self,
        engine: TorchEngine,
        model_path: Path,
        *,
        enable_lora: bool = True,
        joins_groups: bool = True,
        port: int = 0,
    ) -> None:
        self._engine, self._model_path, self._enable_lora = engine, str(model_path), enable_lora
        self._joins_groups = joins_groups
        self.groups: dict[str, ProcessGroupGloo] = {}
        """Groups through which weights come, by name."""
        self.adapters: list[str] = []
        """Names of the adapters that are loaded. The engine computes with the last one, and refuses the others."""
        self._names: dict[int, str] = {0: "default"}
        self.asked: list[str] = []
        """Paths of the requests, in order."""
        self.answering = 0
        """Requests for samples that somebody waits for."""
        self.pausing = False
        """It was asked to pause, and not yet to resume."""
        routes: dict[str, Handler] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._rename,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/init_weights_update_group": self._join_group,
            "/update_weights_from_distributed": self._update_from_group,
            "/destroy_weights_update_group": self._leave_group,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/health": self._health,
            "/metrics": self._metrics,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._take,
        }
        self._app = Starlette(
            routes=[
                Route(path, self._answering(path, handle), methods=["GET", "POST"]) for path, handle in routes.items()
            ]
        )
        self._socket = listen("127.0.0.1", port, None, "")
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._app, log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()

    def _answering(self, path: str, handle: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            self.asked.append(path)
            content = await request.body()
            body = await request.json() if content else {}
            if body.get("stream"):
                return StreamingResponse(self._events(body), media_type="text/event-stream")
            generates = path == "/generate"
            self.answering += generates
            work = asyncio.ensure_future(handle(body))
            gone = asyncio.ensure_future(_disconnected(request))
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            work.cancel()
            self.answering -= generates
            try:
                answer = await work
                return PlainTextResponse(answer) if isinstance(answer, str) else JSONResponse(answer)
            except SkyRLError as error:
                return JSONResponse({"success": False, "message": str(error)}, status_code=400)
            except asyncio.CancelledError:
                return Response(status_code=499)

        return answer

    async def _generate(
        self, body: dict[str, Any], on_tokens: Callable[[NewTokens], None] | None = None
    ) -> dict[str, Any]:
        sampling_params = body["sampling_params"]
        if body.get("lora_path") != (self.adapters[-1] if self.adapters else None):
            raise SkyRLError(f"there is no adapter {body.get('lora_path')} here, or another one is computed with")
        unknown = set(sampling_params) - SAMPLING
        if unknown:
            raise SkyRLError(f"unexpected sampling parameters: {sorted(unknown)}")
        request = evolve(_request(body["input_ids"], sampling_params), on_tokens=on_tokens)
        (completion,) = await self._engine.generate(request)
        (text, ids) = completion.text, list(completion.token_ids)
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "finish_reason": _reason(completion, sampling_params),
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "output_token_logprobs": [
                    [value, token, None] for value, token in zip(completion.logprobs, ids, strict=True)
                ],
                "weight_version": self._named(self._engine.weight_version),
                "weight_versions": self._spans(completion.weight_versions),
            },
        }

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """All tokens so far with every event; the last one is the whole answer."""
        so_far: list[int] = []
        new: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(tokens: NewTokens) -> None:
            loop.call_soon_threadsafe(new.put_nowait, tokens.token_ids)

        self.answering += 1
        work = asyncio.ensure_future(self._generate(body, listen))
        try:
            while not work.done():
                coming = asyncio.ensure_future(new.get())
                await asyncio.wait((work, coming), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    break
                so_far += coming.result()
                meta = {"completion_tokens": len(so_far), "finish_reason": None}
                yield f"data: {json.dumps({'output_ids': so_far, 'meta_info': meta})}\n\n"
            yield f"data: {json.dumps(await work)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            work.cancel()
            self.answering -= 1

    async def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        self.pausing = True
        await self._engine.pause(_PAUSES[body["mode"]])
        return {"status": "ok"}

    async def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        self.pausing = False
        await self._engine.resume()
        return {"status": "ok"}

    async def _update_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        tensors = await asyncio.to_thread(_stored, Path(body["model_path"]))
        version = self._engine.weight_version + 1
        self._names[version] = body["weight_version"]
        await self._engine.load_weights(SharedWeights(tuple(tensors.items())), version)
        return {"success": True, "message": "Succeeded to update model weights."}

    async def _join_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._joins_groups:
            return {"success": False, "message": "Failed to initialize custom process group"}
        self.groups[body["group_name"]] = await asyncio.to_thread(_place_in_group, body)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def _update_from_group(self, body: dict[str, Any]) -> dict[str, Any]:
        group = self.groups[body["group_name"]]
        received = await asyncio.to_thread(_received, group, body["names"], body["dtypes"], body["shapes"])
        version = self._engine.weight_version + 1
        self._names[version] = self._names[version - 1]
        weights = dict(named_weights(self._engine._causal_lm.hf_model)) | received
        await self._engine.load_weights(SharedWeights(tuple(weights.items())), version)
        return {"success": True, "message": "Succeeded to update parameter online."}

    async def _leave_group(self, body: dict[str, Any]) -> dict[str, Any]:
        del self.groups[body["group_name"]]
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def _rename(self, body: dict[str, Any]) -> dict[str, Any]:
        self._names[self._engine.weight_version] = body["new_version"]
        return {"success": True, "new_version": body["new_version"]}

    async def _load_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._enable_lora:
            raise SkyRLError("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if body["lora_name"] in self.adapters:
            raise SkyRLError(f"LoRA with name {body['lora_name']} already exists")
        folder = Path(body["lora_path"])
        settings = json.loads((folder / "adapter_config.json").read_text())
        tensors = tuple(load_file(folder / "adapter_model.safetensors").items())
        version = self._engine.weight_version + 1
        self._names[version] = self._names[version - 1]
        await self._engine.load_weights(shared(tensors, rank=settings["r"], alpha=settings["lora_alpha"]), version)
        self.adapters.append(body["lora_name"])
        return {"success": True, "loaded_adapters": self.adapters}

    async def _unload_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        self.adapters.remove(body["lora_name"])
        return {"success": True, "loaded_adapters": self.adapters}

    async def _model_info(self, body: dict[str, Any]) -> dict[str, Any]:
        name = self._named(self._engine.weight_version)
        return {"model_path": self._model_path, "is_generation": True, "weight_version": name}

    async def _server_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"tp_size": 1}

    async def _health(self, body: dict[str, Any]) -> None:
        return None

    async def _metrics(self, body: dict[str, Any]) -> str:
        """As with `--enable-metrics`."""
        load = await self._engine.current_load()
        return f'sglang:num_queue_reqs{{model_name="a model"}} {load.waiting if load else 0:.1f}\n'

    async def _release(self, body: dict[str, Any]) -> None:
        await self._engine.sleep()

    async def _take(self, body: dict[str, Any]) -> None:
        await self._engine.wake()

    def _named(self, version: int) -> str:
        return self._names[version]

    def _spans(self, versions: tuple[int, ...]) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(versions):
            if not spans or spans[-1]["version"] != self._named(version):
                spans.append({"version": self._named(version), "start": index, "end": index})
            spans[-1]["end"] = index + 1
        return spans


def _stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _place_in_group(body: Mapping[str, Any]) -> ProcessGroupGloo:
    """The place of a worker, in the keys that torch.distributed gives to a group of this name."""
    patience, name = timedelta(seconds=60), body["group_name"]
    assert body["backend"] == "gloo"
    store = TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=patience)
    keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(keys, body["rank_offset"], body["world_size"], patience)


def _received(group: Any, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> dict[str, Tensor]:
    """The tensors that rank 0 broadcasts one after the other."""
    tensors = {name: torch.empty(s, dtype=getattr(torch, d)) for name, d, s in zip(names, dtypes, shapes, strict=True)}
    for tensor in tensors.values():
        group.broadcast([tensor], BroadcastOptions()).wait()
    return tensors


def _request(prompt: list[int], sampling_params: dict[str, Any]) -> GenerationRequest:
    known = set(inspect.signature(SamplingParams).parameters)
    sampling = {name: value for name, value in sampling_params.items() if name in known}
    sampling["stop"] = tuple(sampling_params["stop"]) or None
    sampling["stop_token_ids"] = tuple(sampling_params["stop_token_ids"]) or None
    key = SampleKey(run_seed=sampling_params["sampling_seed"], weight_version=0, prompt_id="a request", sample_index=0)
    settings = SamplingParams(max_generate_length=sampling_params["max_new_tokens"], **sampling)
    return GenerationRequest(prompt_ids=tuple(prompt), sampling=settings, keys=(key,))


def _reason(completion: Completion, sampling_params: dict[str, Any]) -> dict[str, Any]:
    if completion.stop_reason == "length":
        return {"type": "length", "length": len(completion.token_ids)}
    matched = next(
        (stop for stop in sampling_params["stop"] if completion.text.endswith(stop)), completion.token_ids[-1]
    )
    return {"type": "stop", "matched": matched}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""Engines over servers, for the contract that every engine keeps: each server is started once in a process of tests."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from skyrl.inference.engine import InferenceEngine
from skyrl.inference.servers.answers import mapping
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.servers.vllm_server import EXTENSION, VLLMServer
from skyrl.inference.torch.engine import TorchEngine
from tests.inference import gated_serve
from tests.inference.nano import nano_tokenizer
from tests.inference.sglang_stand_in import SGLangStandIn
from tests.inference.steps import Steps, gate_of_model, gate_of_processes

SERVERS = ("sglang server", "vllm server", "our server")
"""Kinds of engine whose weights are sent as files."""

ROOT = Path(__file__).parents[2]
DEADLINES = ServerDeadlines(start=240.0, call=120.0, heartbeat=120.0)

_STAND_INS: list[SGLangStandIn] = []
_STARTED: dict[str, tuple[str, Steps]] = {}
"""Address and gate of each server that was started as a process."""


def engine_over(kind: str, folder: Path, **options: Any) -> tuple[InferenceEngine, Steps]:
    """An engine over a server of this kind, and the gate in front of the server's steps."""
    if kind == "sglang server":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        steps = gate_of_model(model)
        stand_in = SGLangStandIn(TorchEngine(model, nano_tokenizer(), max_num_seqs=16, max_model_len=96), folder)
        _STAND_INS.append(stand_in.__enter__())
        server: Any = SGLangServer(Connection(stand_in.url), Connection(stand_in.url), DEADLINES)
    else:
        if kind not in _STARTED:
            steps = gate_of_processes()
            gate = ("--logits-processors", "tests.inference.vllm_gate:AskTheGate")
            _STARTED[kind] = (vllm_server(folder, *gate) if kind == "vllm server" else _gated(folder), steps)
        url, steps = _STARTED[kind]
        server = VLLMServer(Connection(url), Connection(url), DEADLINES)
    return HttpEngine(server, model_path=str(folder), heartbeat=120.0, tokenizer=nano_tokenizer(), **options), steps


async def arrived(kind: str) -> None:
    """Returns when the server has taken the pause that was asked for."""
    if kind == "sglang server":
        while not any(stand_in.pausing for stand_in in _STAND_INS):
            await asyncio.sleep(0.01)
    if kind in _STARTED:
        asking = Connection(_STARTED[kind][0])
        if kind == "vllm server":  # whose loop takes one request after the other, and hands a pause on at once
            for _ in range(3):
                await asking.get("/health", seconds=60)
        else:
            while not mapping(await asking.get("/is_paused", seconds=60), "a state")["is_paused"]:
                await asyncio.sleep(0.01)
        await asking.close()


async def hung_up(kind: str) -> None:
    """Returns when the server has noticed that nobody waits for its requests."""
    if kind == "sglang server":
        while any(stand_in.answering for stand_in in _STAND_INS):
            await asyncio.sleep(0.01)
    if kind in _STARTED:
        asking = Connection(_STARTED[kind][0])
        while await _requests(kind, asking):
            await asyncio.sleep(0.01)
        await asking.close()


async def waiting_at(kind: str, count: int) -> None:
    """Returns when so many requests for samples have reached the server, which stands in front of its first step."""
    if kind == "sglang server":
        while sum(stand_in.answering for stand_in in _STAND_INS) < count:
            await asyncio.sleep(0.01)
    if kind in _STARTED:
        asking = Connection(_STARTED[kind][0])
        while await _requests(kind, asking) < count:
            await asyncio.sleep(0.01)
        await asking.close()


async def _requests(kind: str, asking: Connection) -> int:
    """How many requests the server has that it has not answered."""
    if kind == "vllm server":
        return int(mapping(await asking.get("/load", seconds=60), "a load")["server_load"])
    lines = str(await asking.get("/metrics", seconds=60)).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("vllm:num_requests_"))


def _end_with_the_parent() -> None:
    """Called in a new process: it gets SIGTERM when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def vllm_server(folder: Path, *more: str, env: dict[str, str] | None = None) -> str:
    """Starts vLLM's own server over this model on a CPU; its address. It ends with this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)),
        *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"),
        *("--max-model-len", "96", "--kv-cache-memory-bytes", str(64 << 20), "--generation-config", "vllm"),
        *("--enable-scale-out", "--enable-server-load-tracking", "--worker-extension-cls", EXTENSION),
        *("--logprobs-mode", "processed_logits", *more),
    ]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        **(env or {}),
    }
    _start(command, folder / f"server-{port}.log", variables)
    return f"http://127.0.0.1:{port}"


def _gated(folder: Path) -> str:
    settings = ("trainer.max_prompt_length=80", "generator.sampling_params.max_generate_length=16")
    return our_server(folder, "generator.inference_engine.max_num_seqs=16", *settings, module=gated_serve.__name__)


def our_server(folder: Path, *settings: str, module: str = "skyrl.cli") -> str:
    """Starts `skyrl serve --takes-weights` over this model; its address. It ends with this process."""
    command = [
        *(sys.executable, "-m", module, "serve", str(folder), "--port", "0", "--takes-weights"),
        *("generator.inference_engine.backend=torch", "generator.inference_engine.model_dtype=float32"),
        *("trainer.device=cpu", *settings),
    ]
    log = folder / "our-server.log"
    process = _start(command, log, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert line, log.read_text()  # it has ended
    return line.split()[-1].removesuffix("/v1")


def _start(
    command: list[str], log: Path, variables: dict[str, str], *, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts a server that ends with this process."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            preexec_fn=_end_with_the_parent,
            env=os.environ | variables,
            stdout=written if stdout is None else stdout,
            stderr=written,
            start_new_session=True,
        )
    atexit.register(_end, process)
    return process

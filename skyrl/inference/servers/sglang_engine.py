"""SGLang started by the run: a server on this machine, used through SGLang's native routes. Not tested on a GPU.

    SGLangEngine --python -m sglang.launch_server--> server on loopback <--SGLangServer-- HttpEngine

The server ends with the process of the engine. See `launch_command` for the option that each setting becomes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl.config import InferenceEngineConfig
from skyrl.config.derive.engine_backends import engine_dtype
from skyrl.config.derive.engine_options import refused_options
from skyrl.errors import ConfigError, ProcessError
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.models.files.loading import load_config, load_tokenizer
from skyrl.models.files.overrides import values_as_given
from skyrl.processes.dies_with_parent import start_dependent
from skyrl.processes.event_loop import run_in_daemon_thread
from skyrl.tree import FrozenDict, thaw


class SGLangEngine(HttpEngine):
    """An `InferenceEngine` over a server that it starts. All calls must be made on one event loop.

    Example: `SGLangEngine(run.generator.inference_engine, model_path="Qwen/Qwen3-0.6B", device="cuda", log=folder)`
    """

    def __init__(
        self,
        config: InferenceEngineConfig,
        *,
        model_path: str,
        device: str,
        log: Path,
        seed: int = 0,
        max_model_len: int | None = None,
        deadlines: ServerDeadlines | None = None,
        overrides: Mapping[str, Any] = FrozenDict(),
        tokenizer_path: str | None = None,
        lora_rank: int = 0,
    ) -> None:
        """Returns while the server is loading; the first call waits for it. `device` is `cpu` or `cuda`. The server
        prints to a file in the folder `log`. Arguments as for `VLLMEngine`.

        Raises `ConfigError` for settings that SGLang does not support.
        """
        within = deadlines or ServerDeadlines()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = launch_command(
            config,
            model_path=model_path,
            device=device,
            port=port,
            seed=seed,
            max_model_len=max_model_len,
            overrides=values_as_given(load_config(model_path), overrides),
            lora_rank=lora_rank,
        )
        url = f"http://127.0.0.1:{port}"
        samples, control = Connection(url, most=config.max_num_seqs), Connection(url, most=8, starting=True)
        super().__init__(
            SGLangServer(samples, control, within, workers=config.tensor_parallel_size),
            model_path=model_path,
            heartbeat=within.heartbeat,
            max_model_len=max_model_len,
            tokenizer=load_tokenizer(tokenizer_path or model_path),
            overrides=overrides,
        )
        self._log = log / f"sglang-{port}.log"
        self._process = start_dependent(command, self._log, {})

    async def close(self) -> None:
        """Finishes running requests, refuses waiting and later ones, and ends the server."""
        await super().close()
        assert self._process.stdin is not None
        self._process.stdin.close()  # ends the server and its children
        await asyncio.to_thread(self._process.wait)

    async def _connect(self) -> None:
        """Waits for the server to start. Raises `ProcessError` if it ends before it answers."""
        if self._connected or self._closed:
            return
        connecting = asyncio.ensure_future(super()._connect())
        ending = asyncio.ensure_future(run_in_daemon_thread(self._process.wait))
        try:
            await asyncio.wait((connecting, ending), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise ProcessError(
                    f"SGLang ended with exit code {ending.result()} before it answered: "
                    f"{lines[-1][:300] if lines else 'it printed nothing'} ({self._log})"
                )
            connecting.result()
        finally:
            connecting.cancel()
            ending.cancel()
            await asyncio.gather(connecting, ending, return_exceptions=True)


def launch_command(
    config: InferenceEngineConfig,
    *,
    model_path: str,
    device: str,
    port: int,
    seed: int = 0,
    max_model_len: int | None = None,
    overrides: Mapping[str, Any] = FrozenDict(),
    lora_rank: int = 0,
) -> list[str]:
    """The command that starts the server; `overrides` are values of the model's own configuration. Raises `ConfigError`
    for options of `engine_init_kwargs` that are set elsewhere.
    """
    if problems := list(refused_options(config)):
        raise ConfigError(problems, "SGLang cannot serve this run")
    options: dict[str, object] = {
        "model_path": model_path,
        "host": "127.0.0.1",
        "port": port,
        "device": device,
        "dtype": engine_dtype(config, "float32"),
        "random_seed": seed % 2**31,
        "context_length": max_model_len,
        "tp_size": config.tensor_parallel_size,
        "max_running_requests": config.max_num_seqs,
        "mem_fraction_static": config.gpu_memory_utilization,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager,
        "enable_deterministic_inference": bool(config.deterministic),
        "enable_metrics": True,
        "log_level_http": "warning",  # no line for each request, of which a long run has millions
        "json_model_override_args": dict(overrides) or None,
    }
    if lora_rank:
        options |= {"enable_lora": True, "max_lora_rank": lora_rank, "lora_target_modules": ["all"]}
    words = (
        word for name, value in (options | dict(config.engine_init_kwargs)).items() for word in _option(name, value)
    )
    return [sys.executable, "-m", "sglang.launch_server", *words]


def _option(name: str, value: object) -> Iterator[str]:
    """The words of one option: none if it is off, only its name if it is a switch that is on."""
    if value is None or value is False:
        return
    yield f"--{name.replace('_', '-')}"
    if isinstance(value, Mapping):
        yield json.dumps(thaw(value))
    elif isinstance(value, list | tuple):
        yield from map(str, value)
    elif value is not True:
        yield str(value)

"""Builds engines over servers that run already. The engines live in this process: nothing is started."""

from __future__ import annotations

import time

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of, server_urls
from skyrl.config.derive.model_overrides import engine_overrides
from skyrl.config.derive.sizes import joins_servers, workers_of_an_engine
from skyrl.config.foundation.import_paths import load_builtin
from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.errors import UserError
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerApi, ServerDeadlines
from skyrl.models.files.loading import load_tokenizer
from skyrl.processes.credentials import api_key
from skyrl.processes.naming.names import awaited
from skyrl.tree import required

_ENGINE = "generator.inference_engine"


def server_engines(run: SkyRLTrainConfig, *, takes_weights: bool, needed: int = 0) -> list[InferenceEngine]:
    """One engine for each server. Without `takes_weights`, the server samples with the weights that it has. `needed` is
    the number of tokens of the run's longest sequence.
    """
    engine, deadlines = run.generator.inference_engine, server_deadlines(run)
    path = required(run.trainer.policy.model.path, "trainer.policy.model.path")
    tokenizer = load_tokenizer(run.trainer.tokenizer_path or path, use_fast=not run.trainer.disable_fast_tokenizer)
    router, urls = _addresses(engine, deadlines.start)
    return [
        HttpEngine(
            _dialect(engine, url, router, deadlines, workers_of_an_engine(run) if joins_servers(run) else None),
            model_path=path,
            heartbeat=deadlines.heartbeat,
            needed=needed,
            tokenizer=tokenizer,
            overrides=engine_overrides(run),
            takes_weights=takes_weights,
            served_model_name=engine.served_model_name,
        )
        for url in urls or (required(router, f"{_ENGINE}.external_proxy_url"),)
    ]


def server_deadlines(run: SkyRLTrainConfig) -> ServerDeadlines:
    """Deadlines of calls to a server."""
    placement = run.trainer.placement
    return ServerDeadlines(
        start=placement.start_timeout_seconds,
        call=placement.call_timeout_seconds,
        heartbeat=placement.heartbeat_timeout_seconds,
    )


def _addresses(engine: InferenceEngineConfig, seconds: float) -> tuple[str | None, list[str]]:
    """The address of the router, if there is one, and those of the engines. Names are looked up, waiting until they are
    published.

    Raises `UserError` if two of them lead to the same engine, which would get the weights of both.
    """
    deadline = time.monotonic() + seconds

    def resolve(url: str) -> str:
        return awaited(url, max(0.0, deadline - time.monotonic()))

    router = None if engine.external_proxy_url is None else resolve(engine.external_proxy_url)
    urls = [resolve(url) for url in server_urls(engine)]
    for url in urls:
        named = [name for name, at in zip(server_urls(engine), urls, strict=True) if at == url]
        if len(named) > 1:
            raise UserError(
                f"{' and '.join(named)} are the same engine, at {url}, but each gets weights of its own: list it once"
            )
    return router, urls


def _dialect(
    engine: InferenceEngineConfig, url: str, router: str | None, deadlines: ServerDeadlines, workers: int | None
) -> ServerApi:
    token = None if engine.external_token is None else api_key(engine.external_token.name)
    samples = Connection(router or url, token=token, most=engine.max_num_seqs)
    control = Connection(url, token=token, most=8)  # a separate one: a command does not wait behind samples
    server_class: type[ServerApi] = load_builtin(backend_of(engine).server_api)
    return server_class.of_engine(engine, samples, control, deadlines, workers)

"""Engines over servers that run already, from the configuration. They belong to this process: nothing is started."""

from __future__ import annotations

from skyrl.config import SkyRLTrainConfig
from skyrl.config.engines import InferenceEngineConfig, kind_of_engine, server_urls
from skyrl.config.model_overrides import engine_overrides
from skyrl.config.sizes import joins_servers, workers_of_an_engine
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.http_connection import Connection
from skyrl.inference.http_engine import HttpEngine
from skyrl.inference.server_dialects import Dialect, ServerDeadlines
from skyrl.inference.sglang_server import SGLangServer
from skyrl.inference.vllm_server import VLLMServer
from skyrl.models.loading import load_tokenizer
from skyrl.processes.credentials import api_key
from skyrl.tree import required

_ENGINE = "generator.inference_engine"


def server_engines(run: SkyRLTrainConfig, *, takes_weights: bool) -> list[InferenceEngine]:
    """One engine for each server. Without `takes_weights` its own are sampled from."""
    engine, placement = run.generator.inference_engine, run.trainer.placement
    path = required(run.trainer.policy.model.path, "trainer.policy.model.path")
    tokenizer = load_tokenizer(run.trainer.tokenizer_path or path, use_fast=not run.trainer.disable_fast_tokenizer)
    deadlines = ServerDeadlines(
        start=placement.start_timeout_seconds,
        call=placement.call_timeout_seconds,
        heartbeat=placement.heartbeat_timeout_seconds,
    )
    return [
        HttpEngine(
            _dialect(engine, url, deadlines, workers_of_an_engine(run) if joins_servers(run) else None),
            model_path=path,
            heartbeat=deadlines.heartbeat,
            tokenizer=tokenizer,
            overrides=engine_overrides(run),
            takes_weights=takes_weights,
            served_model_name=engine.served_model_name,
        )
        for url in server_urls(engine) or (required(engine.external_proxy_url, f"{_ENGINE}.external_proxy_url"),)
    ]


def _dialect(engine: InferenceEngineConfig, url: str, deadlines: ServerDeadlines, workers: int | None) -> Dialect:
    token = None if engine.external_token is None else api_key(engine.external_token.name)
    samples = Connection(engine.external_proxy_url or url, token=token, most=engine.max_num_seqs)
    control = Connection(url, token=token, most=8)  # of its own: a command does not wait behind samples
    if kind_of_engine(engine) == "sglang":
        return SGLangServer(samples, control, deadlines)
    return VLLMServer(
        samples,
        control,
        deadlines,
        model=engine.served_model_name or "",
        workers=workers,
        overrides_group=engine.override_existing_update_group != "disable",
    )

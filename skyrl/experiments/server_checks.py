"""Checks of runs whose engines are servers that run already. `skyrl doctor` runs them without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import server_urls
from skyrl.config.derive.sizes import samples, starts_engines
from skyrl.errors import Problem
from skyrl.tree.rules import Check

_ENGINE = "generator.inference_engine"


def servers_receive_trained_weights(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Servers get the trained weights: samples of a model that never changes are not those of the policy."""
    engine = run.generator.inference_engine
    if not samples(run) or starts_engines(run):
        return
    if engine.weight_sync_backend == "none":
        hint = "set it to disk; skyrl eval and skyrl generate take servers with their own weights"
        message = "the engines would never receive the trained weights"
        yield Problem(path=f"{_ENGINE}.weight_sync_backend", message=message, hint=hint)
    elif not server_urls(engine):
        message = "a router cannot receive weights, and no address of an engine behind it is given"
        yield Problem(path=f"{_ENGINE}.external_server_urls", message=message, hint="list the engines' addresses")


def tokens_of_servers_are_there(environ: Mapping[str, str]) -> Check[SkyRLTrainConfig]:
    """The check that the variable with the servers' token is set among these."""

    def servers_have_their_token(run: SkyRLTrainConfig) -> Iterator[Problem]:
        token = run.generator.inference_engine.external_token
        if token is not None and not starts_engines(run) and not environ.get(token.name):
            message = f"the variable {token.name} is not set"
            yield Problem(path=f"{_ENGINE}.external_token", message=message, hint="set it where the run is started")

    return servers_have_their_token

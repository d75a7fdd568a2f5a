"""The policy of a run as its endpoint serves it."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.endpoint.client_access import TOKEN_VARIABLE, Address, ClientAccess
from skyrl.endpoint.policy import ServedPolicy
from skyrl.experiments.factories import longest_sequence
from skyrl.processes.credentials import api_key
from skyrl.tree import required


def served_policy(run: SkyRLTrainConfig, *, name: str | None = None, adapters: Sequence[str] = ()) -> ServedPolicy:
    """Names and limits of the policy. `name` is another name of it, besides `served_model_name` and its path;
    `adapters` are the names of further adapters in the engines.

    At most twice the engines' `max_num_seqs` answers are sampled or wait; a request beyond that is refused with 429.
    """
    engine = run.generator.inference_engine
    path = required(run.trainer.policy.model.path, "trainer.policy.model.path")
    return ServedPolicy(
        names=(engine.served_model_name,) if engine.served_model_name else tuple(dict.fromkeys([name or path, path])),
        sampling=run.generator.sampling_params,
        max_model_len=longest_sequence(run),
        most_samples=2 * engine.max_num_seqs * engine.num_engines,
        template_arguments=run.generator.chat_template_kwargs,
        scores_prompts=backend_of(engine).scores_prompts,
        adapters=tuple(adapters),
    )


def address_of_clients(run: SkyRLTrainConfig) -> Address | None:
    """The address that clients of the run's endpoint use; None if the run has no endpoint for clients."""
    engine = run.generator.inference_engine
    if not engine.enable_http_endpoint:
        return None
    access = ClientAccess(token=api_key(TOKEN_VARIABLE))
    return Address(host=engine.http_endpoint_host, port=engine.http_endpoint_port, access=access)

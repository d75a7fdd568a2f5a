"""Draws by keys inside vLLM's workers: one computation for all rows of a batch.

vLLM gives each request with a seed a generator of its own, and lets each fill its row of the vocabulary with noise: as
many calls for each token as there are requests, which take longer than a small model. Here the number behind a token is
a function of the sample's seed and the token's position (`draws.py`), and inverts the cumulative distribution, as in
the torch engine. Requests without a key are left to vLLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from skyrl.inference.draws import uniforms
from skyrl.inference.sampling import draw

SEED = "skyrl_seed"
"""Name of the sample's seed among the `extra_args` of vLLM's sampling parameters."""

Forward = Callable[[Tensor, dict[int, torch.Generator], Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
"""Draws from logits (R, V), with the rows' generators, top-k (R,) and top-p (R,): tokens (R,), and the cut logits."""

Cut = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Logits (R, V) with -infinity for tokens outside of top-k (R,) and top-p (R,)."""


def keyed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's sampling parameters with the seed where `KeyedDraws` reads it and vLLM makes no generator."""
    others = {name: value for name, value in arguments.items() if name != "seed"}
    return others | {"extra_args": {**(arguments.get("extra_args") or {}), SEED: arguments["seed"]}}


class Runner(Protocol):
    """The part of vLLM's model runner that is used here."""

    input_batch: Any
    requests: Any


class Sampler(Protocol):
    """The part of vLLM's sampler that is used here."""

    topk_topp_sampler: Any
    sample: Any
    gather_logprobs: Any


class KeyedDraws:
    """Replaces the drawing of vLLM's sampler for rows whose requests have a key."""

    def __init__(self, runner: Runner, draw_by_vllm: Forward, cut: Cut) -> None:
        """`runner` is vLLM's model runner; rows are in the order of its `input_batch`."""
        self._runner, self._draw_by_vllm, self._cut = runner, draw_by_vllm, cut
        self._batch: Any = None
        self._some = self._all = False
        self._seeds, self._keyed = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)

    def __call__(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One token for each row of (R, V), and the logits after top-k and top-p; may change `logits`."""
        self._read_seeds(logits.device)
        if not self._some or len(self._seeds) != len(logits):  # the latter: rows of speculated tokens
            return self._draw_by_vllm(logits, generators, k, p)
        others = None if self._all else self._draw_by_vllm(logits.clone(), generators, k, p)[0]
        cut = self._cut(logits, k, p)
        batch, rows = self._runner.input_batch, len(self._seeds)
        drawn = batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]  # tokens of each request so far
        positions = torch.from_numpy(drawn.astype("int64")).to(logits.device, non_blocking=True)
        tokens = draw(cut, uniforms(self._seeds, positions))
        return (tokens if others is None else torch.where(self._keyed, tokens, others)), cut

    def _read_seeds(self, device: torch.device) -> None:
        """Read the seeds of the rows' requests, if there are other rows than at the last call."""
        batch = self._runner.input_batch
        if self._batch is batch.sampling_metadata:  # vLLM makes another one whenever rows change
            return
        self._batch = batch.sampling_metadata
        parameters = [self._runner.requests[request].sampling_params for request in batch.req_ids]
        seeds = [(parameter.extra_args or {}).get(SEED) if parameter is not None else None for parameter in parameters]
        self._some, self._all = any(seed is not None for seed in seeds), None not in seeds
        self._seeds = torch.tensor([seed or 0 for seed in seeds], dtype=torch.int64).to(device, non_blocking=True)
        self._keyed = torch.tensor([seed is not None for seed in seeds]).to(device, non_blocking=True)


def draw_by_keys(sampler: Sampler, runner: Runner) -> None:
    """Makes a sampler of vLLM draw the rows of `runner`, whose requests have keys, by these."""
    cut = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
    inner = sampler.topk_topp_sampler
    inner.forward = KeyedDraws(runner, inner.forward, cut)

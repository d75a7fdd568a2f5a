"""The contract of the models of a service: passes, optimizer steps, snapshots and samples, whatever computes them.

    client -> http -> queue (order, retries, journal) -> Backend -> learners and engines

`experiments/training_service.py` connects learners and engines to this contract. Methods that compute are called one
after the other, never concurrently, except `sample`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from skyrl.inference.engine import TopLogprobs

Array = NDArray[np.generic]


@frozen(kw_only=True)
class ServedModel:
    """The base model of the service, as clients see it."""

    names: tuple[str, ...]
    """Names that clients may use for it; the first one is the name that answers give."""

    context: int
    """Maximum number of tokens of a sequence, prompt and samples included."""

    vocabulary: int
    """Number of tokens of the vocabulary."""

    tokenizer: str
    """Name or folder from which clients load the tokenizer."""

    architecture: str = ""

    full: bool = False
    """Whether all weights are trained, of one model at a time, in place of adapters."""


@frozen(kw_only=True)
class AdapterSpec:
    """A LoRA adapter that a client asks for (arXiv:2106.09685)."""

    rank: int
    seed: int
    """Seed of the factors A; B starts at 0."""

    train_attn: bool = True
    """Whether the projections of the attention are adapted."""

    train_mlp: bool = True
    """Whether the linear layers of feed-forward blocks are adapted."""

    train_unembed: bool = True
    """Whether the output head is adapted, where its weight is not shared with the embedding."""

    value_head: bool = False
    """Whether the model is a critic: in place of the output head, it has a value head, which starts at 0."""


@frozen(kw_only=True, eq=False)
class Datum:
    """One sequence of a pass: the tokens that the model sees, and arrays for the loss at each of them.

    Position t of `inputs["target_tokens"]` is the token to predict after `tokens[: t + 1]`: targets are shifted by the
    client, not here.
    """

    tokens: NDArray[np.int64]
    """(T,)."""

    inputs: Mapping[str, Array]
    """Arrays (T,) or (T, K) by the names that the loss reads: `target_tokens`, `weights`, `logprobs`, `advantages`;
    those of a critic are `values` and `returns`."""


@frozen(kw_only=True, eq=False)
class PassRequest:
    """One forward pass of one model over some sequences, with or without its gradient."""

    model_id: str
    data: Sequence[Datum]
    loss: str
    """Name of the loss, such as `importance_sampling`."""

    loss_config: Mapping[str, float] = field(factory=dict)
    """Settings of the loss; an unknown one is refused by name."""

    backward: bool = True
    """Whether the gradient is added to those that the next `optimizer_step` uses."""


@frozen(kw_only=True, eq=False)
class PassResult:
    """Outcome of a pass."""

    outputs: Sequence[Mapping[str, Array]]
    """For each datum, float32 arrays by name: `logprobs` (T,), log-probabilities in nats of `target_tokens` ((T, K)
    where targets are), or, of a critic, `values` (T,) before these tokens."""

    metrics: Mapping[str, float]
    """Numbers by `name:reduction`, as the client splits names: always `loss:sum`."""


@frozen(kw_only=True)
class AdamSettings:
    """Settings of one Adam step (arXiv:1412.6980; weight decay as in AdamW, arXiv:1711.05101)."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """Norm that the gradient is clipped to; 0: not clipped."""


@frozen(kw_only=True)
class SampleRequest:
    """A prompt and the samples requested from one sampler."""

    sampler: str | None
    """Name of a published snapshot; None for the base model."""

    prompt: tuple[int, ...]
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    """0 takes the likeliest token."""

    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""

    seed: int = 0
    """Equal requests with equal seeds draw equal samples from equal weights."""

    stop: tuple[str, ...] | None = None
    """Texts that end a sample, which contains them, besides the tokens that end it."""

    stop_tokens: tuple[int, ...] | None = None
    """Tokens that end a sample, in place of the model's end tokens; empty: none does."""

    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    """Number of the likeliest tokens reported at each place of the prompt."""

    topk_sample_logprobs: int = 0
    """Number of the likeliest tokens reported at each sampled token."""


@frozen(kw_only=True, eq=False)
class SampledSequence:
    """One sample."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token, in nats, under the tempered distribution that it was drawn from, before top-p and
    top-k cut it."""

    ended: bool
    """True if an end token or a stop ended it, False if the length did."""

    top: TopLogprobs | None = None


@frozen(kw_only=True, eq=False)
class SampleResult:
    """All samples of a request."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: tuple[float, ...] | None = None
    """(P,): of each token of the prompt, in nats at temperature 1; NaN for the first one."""

    prompt_top: TopLogprobs | None = None
    """At each place of the prompt after the first: (P - 1, k)."""


class Backend(Protocol):
    """The models of a service. A request that a client got wrong raises `RequestError`, which names the argument; the
    model is then as it was before.
    """

    async def create(self, model_id: str, spec: AdapterSpec | None) -> None:
        """A new model: an adapter on the base, or, for None, all weights of the one model that is fully trained."""

    async def passes(self, requests: Sequence[PassRequest]) -> Sequence[PassResult | Exception]:
        """Passes of different models, computed together where that is possible, each with its own outcome. A model
        occurs at most once. Same requests in the same composition give the same bits. Raises `PassError`, which ends
        the service, if these passes would end the next one, too.
        """

    async def optimizer_step(self, model_id: str, settings: AdamSettings) -> Mapping[str, float]:
        """One Adam step with the gradients accumulated since the last one, which are dropped. Returns metrics by
        `name:reduction`, among them `grad_norm:mean`.
        """

    async def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Write the model into a new folder: an adapter in PEFT's format or a model in Hugging Face's, and with
        `optimizer` also moments, step count and accumulated gradients. The folder is whole when this returns.
        """

    async def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Replace the model's weights by those in the folder, and with `optimizer` its moments, step count and
        gradients, which are otherwise new. The next steps are bit for bit those that the stored model would have taken.
        """

    async def unload(self, model_id: str) -> None:
        """Forget the model, which frees its memory."""

    async def publish(self, model_id: str, sampler: str) -> None:
        """Make the model's current weights a sampler of this name, which later steps do not change."""

    async def publish_stored(self, folder: Path, sampler: str) -> None:
        """Make a model that `save` wrote a sampler of this name."""

    async def unpublish(self, sampler: str) -> None:
        """Forget a sampler, once its samples in progress are drawn."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples of one prompt. Calls may run concurrently, and while models learn."""

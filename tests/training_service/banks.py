"""Banks of models, sequences and requests for the tests of what the training service learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from skyrl.config import TrainerConfig
from skyrl.errors import RequestError
from skyrl.training_service.adapter_layout import AdapterLayout
from skyrl.training_service.backend import AdamSettings, AdapterSpec, Array, Datum, PassRequest, PassResult
from skyrl.training_service.model_bank import ModelBank
from skyrl.tree import evolve_at
from tests.nano_run import config

VOCABULARY = 250
"""Tokens that are drawn; the nano model has more."""


def trainer_of(nano: Path, out: Path, model: Path) -> TrainerConfig:
    """The table `trainer` of a run whose reference, which has no optimizer, is the model."""
    return evolve_at(config(nano, out).trainer, "ref.model.path", str(model))


def bank_of(trainer: TrainerConfig, *, tokens_per_pass: int = 4096, **options: Any) -> ModelBank:
    return ModelBank(trainer, trainer.ref, tokens_per_pass=tokens_per_pass, **options)


def held_elements(bank: ModelBank) -> int:
    """Number of elements of the base's weights on a rank."""
    return sum(tensor.numel() for _, tensor in bank.strategy.shards(optimizer=False))


def datum(tokens: int, seed: int, *, targets: int = 0, **arrays: float) -> Datum:
    """A sequence of random tokens, each with the next one as its target, or with `targets` random ones. Weights,
    advantages and old log-probabilities are drawn, too; `arrays` are constant.
    """
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCABULARY, tokens + 1)
    shape = (tokens, targets) if targets else (tokens,)
    inputs: dict[str, Array] = {
        "target_tokens": random.integers(0, VOCABULARY, shape) if targets else ids[1:],
        "weights": random.uniform(0.2, 1.0, shape).astype(np.float32),
        "advantages": random.normal(size=shape).astype(np.float32),
        "logprobs": random.uniform(-7, -4, shape).astype(np.float32),
        "sequence_ratio_mask": np.ones(shape, np.float32),
    }
    inputs |= {name: np.full(shape, value, np.float32) for name, value in arrays.items()}
    return Datum(tokens=ids[:-1], inputs=inputs)


def shared_beginning(row: Datum, tokens: int, seed: int) -> Datum:
    """The sequence with a beginning that all of this seed have."""
    beginning = np.random.default_rng(seed).integers(0, VOCABULARY, tokens)
    return evolve(row, tokens=np.concatenate([beginning, row.tokens[tokens:]]))


READ = {
    "cross_entropy": {"target_tokens", "weights"},
    "gspo": {"target_tokens", "logprobs", "advantages", "sequence_ratio_mask"},
}


def request(model_id: str, data: Sequence[Datum], loss: str = "cross_entropy", **changes: Any) -> PassRequest:
    """A pass over the data with the arrays that the loss reads."""
    names = READ.get(loss, {"target_tokens", "logprobs", "advantages"}) | {"clip_low_threshold", "clip_high_threshold"}
    rows = [evolve(row, inputs={name: row.inputs[name] for name in row.inputs if name in names}) for row in data]
    return PassRequest(model_id=model_id, data=rows, loss=loss, **changes)


def result(outcome: PassResult | Exception) -> PassResult:
    """The result of a pass that succeeded."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def weights(bank: ModelBank, model_id: str) -> dict[str, Any]:
    """Copies of a model's own tensors."""
    return {name: tensor.detach().clone() for name, tensor in bank._awake(model_id).state.weights.items()}


def layout_of(bank: ModelBank, model_id: str) -> AdapterLayout:
    """The layers of an adapter."""
    layout = bank._awake(model_id).layout
    assert layout is not None
    return layout


MIXED = (
    AdapterSpec(rank=4, seed=1),
    AdapterSpec(rank=8, seed=2, train_mlp=False),
    AdapterSpec(rank=16, seed=3, train_attn=False),
    AdapterSpec(rank=32, seed=4),
    AdapterSpec(rank=4, seed=5, train_attn=False),
    AdapterSpec(rank=8, seed=6, train_unembed=False),
    AdapterSpec(rank=16, seed=7, train_mlp=False, train_attn=False),
    AdapterSpec(rank=32, seed=8, train_unembed=False, train_mlp=False),
)
"""Adapters of eight clients."""

LOSSES_OF_MIXED = ("cross_entropy", "ppo", "importance_sampling", "cispo", "gspo", "dro", "dppo", "cross_entropy")
CONFIGS = {"dro": {"beta": 0.1}}


def requests_of(specs: Sequence[AdapterSpec], round_: int) -> list[PassRequest]:
    """A pass for each adapter, with rows of different lengths, number and losses."""
    requests = []
    for index, _ in enumerate(specs):
        rows = [datum(3 + 5 * index + 7 * row, seed=100 * round_ + 10 * index + row) for row in range(1 + index % 3)]
        loss = LOSSES_OF_MIXED[index]
        requests.append(request(f"m{index}", rows, loss, loss_config=CONFIGS.get(loss, {})))
    return requests


CRITIC = AdapterSpec(rank=4, seed=1, value_head=True)


def critic_pass(model_id: str, seed: int) -> PassRequest:
    """A pass of a critic over two sequences with returns, old values and weights."""
    random, data = np.random.default_rng(seed), []
    for row in (datum(6 + seed, seed), datum(11, seed + 100)):
        drawn = {name: random.normal(size=len(row.tokens)).astype(np.float32) for name in ("values", "returns")}
        kept = {name: row.inputs[name] for name in ("target_tokens", "weights")}
        data.append(evolve(row, inputs={**kept, **drawn}))
    return PassRequest(model_id=model_id, data=data, loss="ppo_critic")


STEP = AdamSettings(lr=3e-3, eps=1e-4, weight_decay=0.1, max_grad_norm=1.0)
"""With a large `eps`: a smaller one makes Adam step as far for a gradient of rounding errors as for any other."""


class Short(ModelBank):
    """A bank whose rank 1 has no memory for long sequences."""

    def _computed(self, requests: Sequence[PassRequest]) -> Any:
        if self._peers.rank and any(len(request.data) > 1 for request in requests):
            raise RuntimeError("out of memory")
        return super()._computed(requests)


class Torn(ModelBank):
    """A bank whose rank 1 cannot read files."""

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        if self._peers.rank:
            raise RequestError("no such file here")

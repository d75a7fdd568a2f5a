"""The losses of clients against plain formulas, and what is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.errors import RequestError
from skyrl.training_service.backend import Datum
from skyrl.training_service.loss_functions import LOSSES, loss_tokens, refuse_unusable, settings_of
from tests.training_service.banks import datum, request

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, torch.clamp(ratio, low, high) * advantages)


def _gspo(now: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp((now.detach() - old).mean() + now - now.detach())
    return _clipped(ratio, advantages, 0.5, 1.5)


def _dppo(now: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    moved = (now.exp() - old.exp()).detach()
    cut = ((advantages > 0) & (moved > 0.1)) | ((advantages < 0) & (moved < -0.05))
    return torch.where(cut, 0.0, -(now - old).exp() * advantages)


FORMULAS: Mapping[str, tuple[dict[str, float], Formula]] = {
    "importance_sampling": ({}, lambda now, old, a: -(now - old).exp() * a),
    "ppo": ({}, lambda now, old, a: _clipped((now - old).exp(), a, 0.8, 1.2)),
    "cispo": ({}, lambda now, old, a: -torch.clamp((now - old).exp(), 0.0, 4.0).detach() * a * now),
    "gspo": ({"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}, _gspo),
    "dro": ({"beta": 0.3}, lambda now, old, a: -(now * a - 0.15 * (now - old) ** 2)),
    "dppo": ({"delta_low": 0.05, "delta_high": 0.1}, _dppo),
}


def _computed(data: list[Datum], logprobs: list[Tensor], loss: str, settings: dict[str, float]) -> Tensor:
    pass_request = request("m", data, loss, loss_config=settings)
    return LOSSES[loss].compute(loss_tokens(pass_request.data, logprobs, settings_of(pass_request)))


@pytest.mark.long
def test_every_loss_but_cross_entropy_has_a_formula_here() -> None:
    assert LOSSES.keys() == FORMULAS.keys() | {"cross_entropy", "ppo_critic"}  # test_critic.py


@pytest.mark.sampled(6)
@pytest.mark.parametrize("loss", FORMULAS)
def test_a_loss_and_its_gradient_are_those_of_its_formula(loss: str) -> None:
    settings, formula = FORMULAS[loss]
    data = [datum(6, seed=1), datum(11, seed=2)]
    now = [(torch.from_numpy(row.inputs["logprobs"]) + torch.randn(len(row.tokens)) * 0.6) for row in data]
    now = [tensor.clamp(max=-0.01).requires_grad_() for tensor in now]
    plain = [tensor.detach().clone().requires_grad_() for tensor in now]

    losses = _computed(data, list(now), loss, settings)
    expected = [
        formula(logprobs, torch.from_numpy(row.inputs["logprobs"]), torch.from_numpy(row.inputs["advantages"]))
        for logprobs, row in zip(plain, data, strict=True)
    ]

    torch.testing.assert_close(losses, torch.cat(expected))
    losses.sum().backward()
    torch.cat(expected).sum().backward()
    for tensor, other in zip(now, plain, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)


@pytest.mark.long
def test_cross_entropy_weighs_several_targets_of_a_position() -> None:
    row = datum(4, seed=3, targets=3)
    logprobs = torch.randn(4, 3)
    losses = _computed([row], [logprobs], "cross_entropy", {})
    torch.testing.assert_close(losses, -(torch.from_numpy(row.inputs["weights"]) * logprobs).flatten())


@pytest.mark.long
def test_bounds_may_be_given_for_each_token() -> None:
    """r = e: token 0 is clipped to 1.5, token 1 only at 9."""
    row = evolve(
        datum(2, seed=0, advantages=1.0, logprobs=-2.0, clip_low_threshold=0.5),
        inputs=dict(datum(2, seed=0, advantages=1.0, logprobs=-2.0, clip_low_threshold=0.5).inputs)
        | {"clip_high_threshold": np.array([1.5, 9.0], np.float32)},
    )
    losses = _computed([row], [torch.tensor([-1.0, -1.0])], "ppo", {})
    torch.testing.assert_close(losses, torch.tensor([-1.5, -torch.e]))


@pytest.mark.long
def test_a_sequence_ratio_leaves_out_unmarked_tokens() -> None:
    marked = datum(2, seed=0, advantages=1.0, logprobs=-2.0)
    inputs = {**marked.inputs, "sequence_ratio_mask": np.array([1, 0], np.float32)}
    settings = {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}
    losses = _computed([evolve(marked, inputs=inputs)], [torch.tensor([-1.0, -7.0])], "gspo", settings)
    torch.testing.assert_close(losses, torch.full((2,), -torch.e))


def _with(**arrays: Any) -> Datum:
    row = datum(4, seed=0)
    return evolve(row, inputs={**row.inputs, **arrays})


def _refused(row: Datum, loss: str, names: set[str], **settings: float) -> str:
    filtered = evolve(row, inputs={name: values for name, values in row.inputs.items() if name in names})
    with pytest.raises(RequestError) as error:
        refuse_unusable(
            evolve(request("m", [filtered], "ppo"), data=[filtered], loss=loss, loss_config=settings),
            vocabulary=256,
            longest=8,
        )
    return str(error.value)


RL = {"target_tokens", "logprobs", "advantages"}


@pytest.mark.parametrize(
    ("row", "loss", "names", "settings", "message"),
    [
        (datum(4, 0), "pppo", RL, {}, "'pppo' is unknown; there are cross_entropy, importance_sampling, ppo"),
        (datum(4, 0), "stable_reinforce", RL, {}, "'stable_reinforce' is not supported: it needs information"),
        (datum(4, 0), "ppo_critic", RL, {}, "'ppo_critic': needs a critic: create the model with user_metadata"),
        (datum(4, 0), "custom", RL, {}, "computed by the client"),
        (datum(4, 0), "ppo", RL, {"clip": 0.2}, "ppo has no setting 'clip'; it has clip_low_threshold"),
        (datum(4, 0), "cross_entropy", {"target_tokens", "weights"}, {"a": 1.0}, "it has no settings"),
        (datum(4, 0), "ppo", RL, {"clip_low_threshold": 2.0}, "clip_low_threshold = 2 is above"),
        (datum(4, 0), "ppo", RL, {"clip_high_threshold": float("nan")}, "clip_high_threshold = nan is not a number"),
        (datum(4, 0), "dro", RL, {}, "dro needs 'beta'"),
        (datum(4, 0), "ppo", RL - {"advantages"}, {}, "data[0].loss_fn_inputs: 'advantages' is missing"),
        (datum(4, 0), "ppo", RL | {"weights"}, {}, "'weights' is not an input of ppo"),
        (datum(4, 0, targets=2), "ppo", RL, {}, "target_tokens has shape (4, 2): ppo takes (T,)"),
        (_with(advantages=np.ones(3, np.float32)), "ppo", RL, {}, "advantages has shape (3,), target_tokens (4,)"),
        (_with(target_tokens=np.arange(3)), "ppo", RL, {}, "target_tokens has 3 positions, and model_input 4 tokens"),
        (_with(target_tokens=np.array([1, 2, 3, 256])), "ppo", RL, {}, "target_tokens contains 256: the model's"),
        (_with(target_tokens=np.ones(4, np.float32)), "ppo", RL, {}, "token ids are whole numbers"),
        (_with(logprobs=np.array([0, 0, np.nan, 0], np.float32)), "ppo", RL, {}, "logprobs contains NaN or infinity"),
        (datum(9, 0), "ppo", RL, {}, "model_input has 9 tokens, and the model sees 8 at most"),
        (evolve(datum(4, 0), tokens=np.array([], np.int64)), "ppo", RL, {}, "a sequence of at least one token"),
        (evolve(datum(4, 0), tokens=np.array([0, 1, -1, 2])), "ppo", RL, {}, "model_input contains -1"),
        (datum(4, 0, sequence_ratio_mask=0.0), "gspo", RL | {"sequence_ratio_mask"}, {}, "marks no token"),
    ],
)  # fmt: skip
def test_what_a_loss_cannot_use_is_refused_by_name(
    row: Datum, loss: str, names: set[str], settings: dict[str, float], message: str
) -> None:
    assert message in _refused(row, loss, names, **settings)


def test_an_optional_array_in_some_sequences_only_is_refused() -> None:
    data = [datum(4, 0), datum(4, 0, clip_low_threshold=0.5)]
    with pytest.raises(RequestError, match=r"data\[1\].*'clip_low_threshold' is in some sequences only"):
        refuse_unusable(request("m", data, "ppo"), vocabulary=256, longest=None)


def test_a_pass_without_data_is_refused() -> None:
    with pytest.raises(RequestError, match="data is empty"):
        refuse_unusable(request("m", [], "ppo"), vocabulary=256, longest=None)

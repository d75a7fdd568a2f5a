"""Routers of mixtures of experts that are watched and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from skyrl.errors import ModelError
from skyrl.learners.rank_metrics import RankMetrics, merge_metrics
from skyrl.models.routers import (
    ChoiceRecorder,
    RoutedTokens,
    Routers,
    joined_choices,
    known_routers,
    packed_choices,
    restored_choices,
)
from tests.inference.nano import nano_model

IDS = torch.arange(1, 25).view(2, 12) * 37 % 250
LENGTHS = torch.tensor([12, 7])


def tokens_of(lengths: Tensor, replayed: Tensor | None = None) -> RoutedTokens:
    """Padded rows of 12."""
    rows, columns = (torch.arange(12) < lengths[:, None]).nonzero(as_tuple=True)
    return RoutedTokens(lengths=lengths, rows=rows, positions=rows * 12 + columns, replayed=replayed)


def logits_and_routers(model: Any, lengths: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Routers]:
    routers = Routers(model, learned=True)
    routers.begin(tokens_of(lengths), measured=True)
    output = model(IDS[: len(lengths)], output_router_logits=True)
    return output.logits, output.router_logits, routers


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_balance_loss_of_a_row_is_that_of_transformers_and_ignores_padding(kind: str) -> None:
    model = nano_model(kind)
    _, router_logits, routers = logits_and_routers(model, LENGTHS)
    loads = routers.loads()
    experts = router_logits[0].shape[1]
    for row, length in enumerate(LENGTHS.tolist()):
        own = [logits.view(2, 12, experts)[row, :length] for logits in router_logits]
        layers = [load_balancing_loss_func((logits,), experts, 2) for logits in own]
        torch.testing.assert_close(loads.balance[row], sum(layers) / len(layers))
        z = sum(logits.logsumexp(-1).square().mean() for logits in own) / len(own)
        torch.testing.assert_close(loads.z[row], z)
        entropy = torch.stack(
            [torch.distributions.Categorical(logits=logits).entropy().mean() for logits in own]
        ).mean()
        torch.testing.assert_close(loads.entropy[row], entropy)
        assert loads.chosen[:, row].sum(1).tolist() == [2 * length] * len(own)
    (gradient,) = torch.autograd.grad(loads.balance.sum() + loads.z.sum(), model.model.layers[0].mlp.gate.weight)
    assert gradient.abs().sum() > 0


def test_even_loads_have_a_balance_loss_of_k() -> None:
    model = nano_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()
    _, _, routers = logits_and_routers(model, LENGTHS)
    torch.testing.assert_close(routers.loads().balance, torch.full((2,), 2.0))


def test_a_model_without_experts_has_no_routers_to_measure() -> None:
    assert not known_routers(nano_model("qwen3"))
    with pytest.raises(ModelError, match="no experts"):
        Routers(nano_model("qwen3"), learned=False)


def test_loads_of_ranks_add_up_before_their_spread_is_taken() -> None:
    parts = [
        RankMetrics(sums={}, moments={}, loads=(loads, (1.0, 1.0, 1.0, 1.0)))
        for loads in [(6.0, 0.0, 0.0, 0.0), (0.0, 2.0, 0.0, 0.0)]
    ]
    assert merge_metrics(parts).metrics() == {
        "router_max_violation": 2.0,  # 6 / 2 - 1
        "router_mean_violation": 1.0,  # the other layer is even
        "router_unused_experts": 0.25,  # 2 of 4, and none
    }


def replaying(model: Any, replayed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits of the two rows, and the gradient of a router."""
    routers = Routers(model, learned=False)
    routers.begin(tokens_of(LENGTHS, replayed), measured=False)
    logits = model(IDS).logits
    (gradient,) = torch.autograd.grad(logits.square().sum(), model.model.layers[1].mlp.gate.weight)
    return logits.detach(), gradient


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_replaying_own_choices_is_bitwise_equal_and_other_choices_are_used(kind: str) -> None:
    recorded = nano_model(kind)
    recorder = ChoiceRecorder(recorded)
    recorded(IDS)
    own = recorder.take()
    plain, replayed = replaying(nano_model(kind), None), replaying(nano_model(kind), own)
    assert plain[0].equal(replayed[0]) and plain[1].equal(replayed[1])
    assert replaying(nano_model(kind), torch.full_like(own, -1))[0].equal(plain[0])
    others = (own + 1) % 4
    logits, gradient = replaying(nano_model(kind), others)
    assert not logits.allclose(plain[0])
    assert gradient.abs().sum() > 0
    first_row_alone = others.clone()
    first_row_alone[12:] = -1
    logits, _ = replaying(nano_model(kind), first_row_alone)
    assert not logits[0].allclose(plain[0][0])
    assert logits[1].allclose(plain[0][1], atol=1e-5)


def test_experts_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="in 3 layers, and the learner's model has 2"):
        replaying(nano_model("mixtral"), torch.zeros(24, 3, 2, dtype=torch.int16))


@pytest.mark.parametrize(("experts", "width"), [(256, 1), (257, 2)])
def test_choices_travel_as_bytes_and_come_back(experts: int, width: int) -> None:
    chosen = torch.randint(0, experts, (5, 3, 2)).to(torch.int16)
    chosen[0, 0, 0] = experts - 1
    packed = packed_choices(chosen.numpy(), experts)
    assert (len(packed), packed.width, len(packed.data)) == (5, width, 5 * 3 * 2 * width)
    assert restored_choices(packed).equal(chosen)
    assert restored_choices(packed.first(2)).equal(chosen[:2])
    later = packed_choices(torch.zeros(7, 3, 2, dtype=torch.int16).numpy(), experts)
    assert restored_choices(packed.continued(later)).equal(torch.cat([chosen, torch.zeros(2, 3, 2, dtype=torch.int16)]))
    rows = joined_choices([None, packed], 6)
    assert rows is not None and rows.shape == (2, 6, 3, 2)
    assert (rows[0] == -1).all() and rows[1, :5].equal(chosen) and (rows[1, 5:] == -1).all()

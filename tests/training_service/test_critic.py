"""Critics: models with a value head beside policies on the same base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from skyrl.config import TrainerConfig
from skyrl.errors import RequestError
from skyrl.training_service.backend import AdamSettings, AdapterSpec
from skyrl.training_service.model_bank import ModelBank
from tests.training_service.banks import CRITIC, bank_of, critic_pass, datum, layout_of, request, result, weights
from tests.training_service.running import client_of
from tests.training_service.test_whole_service import LETTERS, chain, name_of, service

STEP = AdamSettings(lr=1e-2, eps=1e-4)


def _trained(trainer: TrainerConfig, steps: int) -> ModelBank:
    """A bank in which the critic `c` has taken some steps."""
    bank = bank_of(trainer)
    bank.create("c", CRITIC)
    for seed in range(steps):
        result(bank.passes([critic_pass("c", seed)])[0])
        bank.optimizer_step("c", STEP)
    return bank


def test_values_and_gradients_of_a_critic_are_those_of_plain_torch(
    trainer: TrainerConfig, untied: Path, tmp_path: Path
) -> None:
    bank = _trained(trainer, 2)
    bank.save("c", tmp_path / "c", optimizer=False)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(untied), str(tmp_path / "c"), is_trainable=True
    )
    vector, layout = weights(bank, "c")["factors"], layout_of(bank, "c")
    head = layout.value_head(vector)
    assert head is not None and head.any()
    head = head.detach().clone().requires_grad_()
    pass_request = critic_pass("c", 7)
    outcome = result(bank.passes([pass_request])[0])
    total = torch.zeros(())
    for row, outputs in zip(pass_request.data, outcome.outputs, strict=True):
        hidden = model(input_ids=torch.from_numpy(row.tokens)[None], output_hidden_states=True).hidden_states[-1][0]
        values = (hidden @ head.T)[:, 0]
        torch.testing.assert_close(torch.from_numpy(outputs["values"]), values.detach(), atol=1e-5, rtol=1e-5)
        old, returns, share = (torch.from_numpy(row.inputs[name]) for name in ("values", "returns", "weights"))
        clipped = torch.maximum(torch.minimum(values, old + 0.2), old - 0.2)
        total = total + (share * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2).sum()
    total.backward()
    assert outcome.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
    gradient = bank._awake("c").state.gradients["factors"]
    torch.testing.assert_close(layout.value_head(gradient), head.grad, atol=1e-5, rtol=1e-5)
    parameters = dict(model.named_parameters())
    for name, a, b in layout.factors(gradient):
        for part, own in (("A", a), ("B", b)):
            expected = parameters[f"base_model.model.{name}.lora_{part}.default.weight"].grad
            torch.testing.assert_close(own, expected, atol=2e-5, rtol=1e-5)


def test_critics_beside_policies_learn_what_each_learns_alone(trainer: TrainerConfig) -> None:
    specs = {"p": AdapterSpec(rank=8, seed=3), "c": CRITIC, "d": attrs.evolve(CRITIC, rank=8, seed=2)}
    together, separate = bank_of(trainer), bank_of(trainer)
    for bank in (together, separate):
        for name, spec in specs.items():
            bank.create(name, spec)
    for seed in range(3):
        requests = [request("p", [datum(9, seed)]), critic_pass("c", seed), critic_pass("d", seed + 10)]
        joint = [result(outcome) for outcome in together.passes(requests)]
        single = [result(separate.passes([pass_request])[0]) for pass_request in requests]
        assert [outcome.metrics["loss:sum"] for outcome in joint] == pytest.approx(
            [outcome.metrics["loss:sum"] for outcome in single], rel=1e-5
        )
        for bank in (together, separate):
            for name in specs:
                bank.optimizer_step(name, STEP)
    for name in specs:
        torch.testing.assert_close(weights(together, name), weights(separate, name), atol=1e-5, rtol=1e-5)


def test_a_stored_critic_continues_bit_for_bit_and_is_no_policy(trainer: TrainerConfig, tmp_path: Path) -> None:
    bank = _trained(trainer, 1)
    bank.create("p", attrs.evolve(CRITIC, value_head=False, train_unembed=False))
    for name in ("c", "p"):
        bank.save(name, tmp_path / name, optimizer=name == "c")
    bank.create("again", attrs.evolve(CRITIC, seed=9))
    bank.load("again", tmp_path / "c", optimizer=True)
    for name in ("c", "again"):
        result(bank.passes([critic_pass(name, 5)])[0])
        bank.optimizer_step(name, STEP)
    torch.testing.assert_close(weights(bank, "c"), weights(bank, "again"), atol=0, rtol=0)
    with pytest.raises(RequestError, match="the stored model has a value head, and this one has none"):
        bank.load("p", tmp_path / "c", optimizer=False)
    with pytest.raises(RequestError, match="this model has a value head, and the stored one has none"):
        bank.load("c", tmp_path / "p", optimizer=False)
    refused = bank.passes([critic_pass("p", 0), request("c", [datum(4, 0)])])
    assert [str(error).partition(":")[0] for error in refused] == [
        "loss_fn = 'ppo_critic'",
        "loss_fn = 'cross_entropy'",
    ]
    [values] = bank.passes([attrs.evolve(request("c", [datum(4, 0)], backward=False), loss="ppo_critic")])
    assert result(values).outputs[0]["values"].shape == (4,)
    assert result(values).metrics == {"loss:sum": 0.0}


def _values(critic: tinker.TrainingClient, row: types.Datum) -> types.TensorData:
    """The critic's values of a row."""
    loss: Any = "ppo_critic"  # which the client passes on, and does not know
    return critic.forward([row], loss).result().loss_fn_outputs[0]["values"]


@pytest.mark.long
def test_the_client_trains_a_critic(tmp_path: Path, nano: Path) -> None:
    """Values become the returns; what a critic cannot do is refused."""
    with service(tmp_path / "service", nano) as (url, _), client_of(url) as client:
        create = partial(client.create_lora_training_client, base_model=name_of(url), rank=8, seed=1)
        critic = create(user_metadata={"model_role": "critic"}).result()
        inputs = {"target_tokens": chain(len(LETTERS)).loss_fn_inputs["target_tokens"]}
        row = types.Datum(model_input=chain(len(LETTERS)).model_input, loss_fn_inputs=inputs)
        returns = np.linspace(0, 1, len(LETTERS), dtype=np.float32)
        loss: Any = "ppo_critic"
        for _ in range(30):
            values = _values(critic, row)
            loss_inputs = {**inputs, "values": values, "returns": types.TensorData.from_numpy(returns)}
            critic.forward_backward(
                [types.Datum(model_input=row.model_input, loss_fn_inputs=loss_inputs)], loss
            ).result()
            critic.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        print("values after 30 steps:", values.tolist(), "returns:", returns.tolist())
        assert np.abs(np.array(values.tolist()) - returns).max() < 0.1
        path = critic.save_state("critic").result().path
        copy = client.create_training_client_from_state_with_optimizer(path).result()
        assert _values(copy, row).tolist() == _values(critic, row).tolist()
        with pytest.raises(tinker.RequestFailedError, match="has no tokens to sample"):
            critic.save_weights_for_sampler("x").result()
        with pytest.raises(tinker.BadRequestError, match="has no tokens to sample"):
            client.create_sampling_client(model_path=path).result()
        with pytest.raises(tinker.RequestFailedError, match="'teacher' is unknown: policy or critic"):
            create(user_metadata={"model_role": "teacher"}).result()

"""Many adapters on one base: each learns what it would learn alone, what our own trainer learns, and what it stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl.algorithms.losses import ppo_clip
from skyrl.batch import TrainingBatch
from skyrl.config import SkyRLLoraConfig, TrainerConfig
from skyrl.errors import RequestError
from skyrl.learners.schedule import StepSettings
from skyrl.learners.whole_rows import whole_rows
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.roles import PolicyWorker
from skyrl.models.files.loading import load_causal_lm
from skyrl.models.lora import adapter_alone, with_adapter
from skyrl.training_service.adapter_layout import ALPHA
from skyrl.training_service.backend import AdamSettings, AdapterSpec, Datum
from skyrl.training_service.model_bank import ModelBank
from skyrl.tree import evolve_at
from tests.training_service.banks import (
    MIXED,
    STEP,
    bank_of,
    datum,
    layout_of,
    request,
    requests_of,
    result,
    shared_beginning,
    weights,
)


def _created(trainer: TrainerConfig, specs: Sequence[AdapterSpec], **options: Any) -> ModelBank:
    bank = bank_of(trainer, **options)
    for index, spec in enumerate(specs):
        bank.create(f"m{index}", spec)
    return bank


def _three_steps(bank: ModelBank, specs: Sequence[AdapterSpec], *, together: bool) -> list[list[Any]]:
    """Outputs and weights of each model after three rounds of two passes and a step."""
    outputs: list[list[Any]] = [[] for _ in specs]
    for round_ in range(3):
        for part in range(2):
            requests = requests_of(specs, 2 * round_ + part)
            outcomes = bank.passes(requests) if together else [bank.passes([request])[0] for request in requests]
            for index, outcome in enumerate(outcomes):
                outputs[index] += [
                    result(outcome).metrics["loss:sum"],
                    [o["logprobs"] for o in result(outcome).outputs],
                ]
        for index, _ in enumerate(specs):
            outputs[index].append(bank.optimizer_step(f"m{index}", STEP)["grad_norm:mean"])
    return [[*outputs[index], weights(bank, f"m{index}")] for index, _ in enumerate(specs)]


def test_a_beginning_that_rows_share_is_computed_once_and_changes_nothing(trainer: TrainerConfig) -> None:
    groups = [
        [shared_beginning(datum(24 + tail, 10 * group + tail), 20 + group, seed=group) for tail in range(4)]
        for group in range(2)
    ]
    rows = [*groups[0], datum(30, 99), *groups[1], groups[1][0]]
    spec = AdapterSpec(rank=4, seed=1)
    bank = _created(trainer, [spec, spec])
    layout = whole_rows([[torch.from_numpy(row.tokens) for row in rows], [torch.arange(3)]], bank._options)
    assert layout.starts == (0, sum(len(row.tokens) for row in rows) - 3 * 20 - 4 * 21, layout.starts[1] + 3)
    together = result(bank.passes([request("m0", rows)])[0])
    separate = [result(bank.passes([request("m1", [row])])[0]) for row in rows]
    one, other = [bank._awake(name).state.gradients["factors"] for name in ("m0", "m1")]
    assert (one - other).norm() < 1e-5 * other.norm()
    for output, expected in zip(together.outputs, separate, strict=True):
        pair: tuple[Any, Any] = (output["logprobs"], expected.outputs[0]["logprobs"])
        np.testing.assert_allclose(*pair, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens_per_pass", [4096, 60])
def test_eight_adapters_in_one_pass_learn_what_each_learns_alone(trainer: TrainerConfig, tokens_per_pass: int) -> None:
    together = _three_steps(_created(trainer, MIXED, tokens_per_pass=tokens_per_pass), MIXED, together=True)
    separate = _three_steps(_created(trainer, MIXED), MIXED, together=False)
    for one, other in zip(together, separate, strict=True):
        torch.testing.assert_close(_tensors(one), _tensors(other), atol=1e-5, rtol=1e-5)


def test_adapters_in_padded_rows_learn_the_same(trainer: TrainerConfig) -> None:
    padded = evolve_at(trainer, "use_sample_packing", False)
    one = _three_steps(_created(padded, MIXED[:4]), MIXED[:4], together=True)
    other = _three_steps(_created(trainer, MIXED[:4]), MIXED[:4], together=True)
    for value, same in zip(one, other, strict=True):
        torch.testing.assert_close(_tensors(value), _tensors(same), atol=1e-5, rtol=1e-5)


def _tensors(values: Any) -> list[Tensor]:
    match values:
        case dict():
            return _tensors(list(values.values()))
        case list():
            return [tensor for value in values for tensor in _tensors(value)]
        case _:
            return [torch.as_tensor(values)]


@pytest.mark.long
def test_the_same_composition_gives_the_same_bits(trainer: TrainerConfig) -> None:
    one, other = (_three_steps(_created(trainer, MIXED), MIXED, together=True) for _ in range(2))
    torch.testing.assert_close(_tensors(one), _tensors(other), atol=0, rtol=0)


@pytest.mark.long
def test_gradients_are_those_of_peft_by_autograd(trainer: TrainerConfig, untied: Path) -> None:
    """All layers with the head, A and B from PEFT's own layers, the loss in one line."""
    bank = _created(trainer, [AdapterSpec(rank=4, seed=9)])
    model = load_causal_lm(str(untied), dtype=torch.float32, attention="eager", device=torch.device("cpu"))
    names = tuple(layout_of(bank, "m0").layers)
    adapted = with_adapter(model, SkyRLLoraConfig(rank=4, alpha=ALPHA, target_modules=names), seed=9, field="lora")
    drawn = dict(adapter_alone(iter(adapted.state_dict().items())))
    factors = {name: (a, b) for name, a, b in layout_of(bank, "m0").factors(weights(bank, "m0")["factors"])}
    assert "lm_head" in factors
    for name, (a, b) in factors.items():
        assert torch.equal(a, drawn[f"base_model.model.{name}.lora_A.weight"]), "A is drawn as PEFT draws it"
        assert not b.any()
    bank.passes([request("m0", [datum(9, 1)])])
    bank.optimizer_step("m0", AdamSettings(lr=1e-2))
    vector = weights(bank, "m0")["factors"]
    parameters = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, a, b in layout_of(bank, "m0").factors(vector):
            parameters[f"{name}.lora_A.default.weight"].copy_(a)
            parameters[f"{name}.lora_B.default.weight"].copy_(b)

    data = [datum(9, 2), datum(5, 3)]
    loss = torch.zeros(())
    for row in data:
        logits = adapted(input_ids=torch.from_numpy(row.tokens)[None]).logits[0].log_softmax(-1)
        now = logits.gather(-1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0]
        loss = loss - (now * torch.from_numpy(row.inputs["weights"])).sum()
    loss.backward()
    [outcome] = bank.passes([request("m0", data)])

    assert result(outcome).metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-6)
    gradient = bank._awake("m0").state.gradients["factors"]
    for name, a, b in layout_of(bank, "m0").factors(gradient):
        for part, own in (("A", a), ("B", b)):
            torch.testing.assert_close(own, parameters[f"{name}.lora_{part}.default.weight"].grad, atol=2e-5, rtol=1e-5)


def test_several_targets_of_a_position_count_with_their_weights(trainer: TrainerConfig) -> None:
    bank = _created(trainer, [AdapterSpec(rank=4, seed=9), AdapterSpec(rank=4, seed=9)])
    row = datum(6, 4, targets=3)
    apart = [attrs.evolve(row, inputs={name: values[:, k] for name, values in row.inputs.items()}) for k in range(3)]
    wide, single = bank.passes([request("m0", [row]), request("m1", apart)])
    logprobs = result(wide).outputs[0]["logprobs"]
    assert logprobs.shape == (6, 3)
    apart_found = [torch.from_numpy(output["logprobs"]) for output in result(single).outputs]
    torch.testing.assert_close(torch.from_numpy(logprobs), torch.stack(apart_found, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        bank._awake("m0").state.gradients, bank._awake("m1").state.gradients, atol=1e-5, rtol=1e-4
    )


@attrs.frozen(kw_only=True)
class _Sum(Objective):
    """The sum of the losses of all tokens, as clients have it."""

    clip: float | None

    def __call__(
        self, logprobs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        assert batch.advantages is not None and batch.old_logprobs is not None
        if self.clip is None:
            loss = -(logprobs * batch.advantages)[batch.loss_mask].sum()
        else:
            losses = ppo_clip(logprobs, batch.old_logprobs, batch.advantages, clip_low=self.clip, clip_high=self.clip)
            loss = losses[batch.loss_mask].sum()
        return loss, {"loss": loss.detach()}, {}


def _batch(data: Sequence[Datum], advantages: str) -> TrainingBatch:
    """The rows of the data, each with its last target behind it."""
    width = max(len(row.tokens) for row in data) + 1

    def table(rows: list[np.ndarray[Any, Any]]) -> Tensor:
        return torch.stack([torch.from_numpy(np.pad(row, (0, width - len(row)))) for row in rows])

    lengths = torch.tensor([len(row.tokens) + 1 for row in data])
    columns = torch.arange(width)
    mask = (columns > 0) & (columns < lengths[:, None])
    return TrainingBatch(
        input_ids=table([np.append(row.tokens, row.inputs["target_tokens"][-1]) for row in data]),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        rewards=torch.zeros(mask.shape),
        groups=torch.arange(len(data)),
        old_logprobs=table([np.append(np.float32(0), row.inputs["logprobs"]) for row in data]),
        advantages=table([np.append(np.float32(0), row.inputs[advantages]) for row in data]),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("loss", "clip"), [("cross_entropy", None), ("ppo", 0.2)])
def test_three_steps_are_those_of_our_own_trainer(
    tied: TrainerConfig, nano: Path, loss: str, clip: float | None
) -> None:
    lora = SkyRLLoraConfig(rank=8, alpha=ALPHA)
    trainer = evolve_at(evolve_at(tied, "policy.model.lora", lora), "seed", 11)
    policy = PolicyWorker(trainer)
    bank = _created(tied, [AdapterSpec(rank=8, seed=11), AdapterSpec(rank=4, seed=2)])
    settings = AdamSettings(lr=5e-3, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
    own = StepSettings(lr=5e-3, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
    for round_ in range(3):
        data = [datum(5 + 3 * row, 10 * round_ + row) for row in range(4)]
        batch = _batch(data, "weights" if clip is None else "advantages")
        asyncio.run(policy.forward_backward(batch, _Sum(clip=clip)))
        norm = asyncio.run(policy.optimizer_step(own))["grad_norm"]
        for outcome in bank.passes([request("m0", data, loss), request("m1", [datum(7, round_)])]):
            result(outcome)
        assert bank.optimizer_step("m0", settings)["grad_norm:mean"] == pytest.approx(norm, rel=1e-5)
    expected = dict(adapter_alone(policy.strategy.gather()))
    adapter_weights = {
        f"base_model.model.{name}.lora_{part}.weight": factor
        for name, a, b in layout_of(bank, "m0").factors(weights(bank, "m0")["factors"])
        for part, factor in (("A", a), ("B", b))
    }
    torch.testing.assert_close(adapter_weights, expected, atol=1e-5, rtol=1e-5)
    policy.close()


def test_a_stored_model_continues_bit_for_bit_and_peft_loads_it(
    trainer: TrainerConfig, untied: Path, tmp_path: Path
) -> None:
    bank = _created(trainer, MIXED[:2])
    bank.passes(requests_of(MIXED[:2], 0))
    bank.optimizer_step("m0", STEP)
    bank.passes([requests_of(MIXED, 1)[0]])  # gradients that wait for a step
    bank.save("m0", tmp_path / "stored", optimizer=True)

    restored = _created(trainer, [AdapterSpec(rank=4, seed=77)])
    restored.load("m0", tmp_path / "stored", optimizer=True)
    for target in (bank, restored):
        target.optimizer_step("m0", STEP)
        target.passes([requests_of(MIXED, 2)[0]])
        target.optimizer_step("m0", STEP)
    torch.testing.assert_close(weights(restored, "m0"), weights(bank, "m0"), atol=0, rtol=0)

    restored.load("m0", tmp_path / "stored", optimizer=False)
    assert restored._awake("m0").state.steps == 0
    [outcome] = restored.passes([request("m0", [datum(8, 5)], backward=False)])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied), str(tmp_path / "stored"))
    row = datum(8, 5)
    logits = model(input_ids=torch.from_numpy(row.tokens)[None]).logits[0].log_softmax(-1)
    expected = logits.gather(-1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0]
    logprobs = torch.from_numpy(result(outcome).outputs[0]["logprobs"])
    torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("on_disk", [True, False])
def test_resting_adapters_keep_their_bits(trainer: TrainerConfig, tmp_path: Path, on_disk: bool) -> None:
    bounded = _created(trainer, MIXED[:3], resident=1, rest_in=tmp_path if on_disk else None)
    free = _created(trainer, MIXED[:3])
    one, other = (_three_steps(bank, MIXED[:3], together=False) for bank in (bounded, free))
    torch.testing.assert_close(_tensors(one), _tensors(other), atol=0, rtol=0)
    assert len(list(tmp_path.rglob("*.safetensors"))) == (2 if on_disk else 0)
    together = bounded.passes(requests_of(MIXED[:3], 7))
    assert [result(outcome).metrics for outcome in together] == [
        result(free.passes([pass_request])[0]).metrics for pass_request in requests_of(MIXED[:3], 7)
    ]
    bounded.close()
    assert not list(tmp_path.iterdir())


def test_a_model_that_has_diverged_does_not_reach_the_others(trainer: TrainerConfig) -> None:
    """Segments lie side by side in one padded batch, whose padding reads the first row: NaN must not spread from it."""
    bank, separate = _created(trainer, MIXED[:3]), _created(trainer, MIXED[:3])
    bank.passes([requests_of(MIXED, 0)[0]])
    bank.optimizer_step("m0", AdamSettings(lr=1e38))
    requests = requests_of(MIXED[:3], 1)
    broken, *others = bank.passes(requests)
    assert isinstance(broken, RequestError)
    assert "not finite" in str(broken)
    assert not bank._awake("m0").state.gradients
    for outcome, same in zip(others, requests[1:], strict=True):
        assert result(outcome).metrics == result(separate.passes([same])[0]).metrics


def test_a_forward_pass_changes_nothing(trainer: TrainerConfig) -> None:
    bank = _created(trainer, MIXED[:2])
    both = bank.passes([attrs.evolve(requests_of(MIXED, 0)[0], backward=False), requests_of(MIXED, 0)[1]])
    assert all(len(result(outcome).outputs) for outcome in both)
    assert not bank._awake("m0").state.gradients
    assert bank._awake("m1").state.gradients


@pytest.mark.long
def test_mistakes_are_refused_by_name_and_leave_the_model_as_it_was(trainer: TrainerConfig, tmp_path: Path) -> None:
    bank = _created(trainer, [AdapterSpec(rank=4, seed=1), AdapterSpec(rank=8, seed=1)])
    bank.passes([request("m0", [datum(6, 0)])])
    before = [weights(bank, "m0"), bank._awake("m0").state.gradients["factors"].clone()]
    bank.save("m1", tmp_path / "eight", optimizer=False)
    refused, served = bank.passes(
        [request("m0", [datum(6, 0)], "ppo", loss_config={"x": 1.0}), request("m1", [datum(6, 0)])]
    )
    assert isinstance(refused, RequestError)
    result(served)
    [gone] = bank.passes([request("m7", [datum(6, 0)])])
    assert isinstance(gone, RequestError) and gone.status == 404
    calls: dict[str, Callable[[], object]] = {
        "exists already": lambda: bank.create("m0", AdapterSpec(rank=4, seed=1)),
        "rank is 0": lambda: bank.create("m2", AdapterSpec(rank=0, seed=1)),
        "no layer to train": lambda: bank.create(
            "m2", AdapterSpec(rank=4, seed=1, train_attn=False, train_mlp=False, train_unembed=False)
        ),
        "trains adapters only": lambda: bank.create("m2", None),
        "lr = nan": lambda: bank.optimizer_step("m0", AdamSettings(lr=float("nan"))),
        "beta2 = 1": lambda: bank.optimizer_step("m0", AdamSettings(beta2=1.0)),
        "there is no model m9": lambda: bank.unload("m9"),
        "has rank 8 and alpha 32, this model rank 4": lambda: bank.load("m0", tmp_path / "eight", optimizer=False),
        "contains no adapter": lambda: bank.load("m0", tmp_path / "nothing", optimizer=False),
        "holds no optimizer state": lambda: bank.load("m1", tmp_path / "eight", optimizer=True),
    }
    for message, call in calls.items():
        with pytest.raises(RequestError, match=message):
            call()
    after = [weights(bank, "m0"), bank._awake("m0").state.gradients["factors"]]
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    bank.optimizer_step("m0", AdamSettings())
    with pytest.raises(RequestError, match="no gradients to step with"):
        bank.optimizer_step("m0", AdamSettings())
    bank.unload("m0")
    bank.create("m0", AdapterSpec(rank=4, seed=1))


@pytest.mark.long
def test_all_weights_of_a_model_learn_as_by_plain_torch(tied: TrainerConfig, nano: Path, tmp_path: Path) -> None:
    bank = bank_of(tied, full=True)
    bank.create("whole", None)
    model = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    settings = AdamSettings(lr=1e-3, eps=1e-3, weight_decay=0.1)

    def plain(data: Sequence[Datum]) -> None:
        for row in data:
            logits = model(input_ids=torch.from_numpy(row.tokens)[None]).logits[0].log_softmax(-1)
            now = logits.gather(-1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0]
            (-(now * torch.from_numpy(row.inputs["weights"])).sum()).backward()

    for round_ in range(3):
        for part in range(2):
            data = [datum(6 + row, 10 * round_ + 5 * part + row) for row in range(3)]
            plain(data)
            result(bank.passes([request("whole", data)])[0])
        optimizer.step()
        optimizer.zero_grad()
        bank.optimizer_step("whole", settings)
    torch.testing.assert_close(
        weights(bank, "whole"),
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        atol=1e-5,
        rtol=1e-4,
    )

    result(bank.passes([request("whole", [datum(6, 1)])])[0])
    bank.save("whole", tmp_path / "stored", optimizer=True)
    restored = bank_of(tied, full=True)
    restored.create("other", None)
    restored.load("other", tmp_path / "stored", optimizer=True)
    for target, name in ((bank, "whole"), (restored, "other")):
        target.optimizer_step(name, settings)
    torch.testing.assert_close(weights(restored, "other"), weights(bank, "whole"), atol=0, rtol=0)
    with pytest.raises(RequestError, match="in use by another client"):
        restored.create("second", None)
    restored.unload("other")
    restored.create("second", None)
    loaded = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    torch.testing.assert_close(
        weights(restored, "second"),
        {name: parameter.detach() for name, parameter in loaded.named_parameters()},
        atol=0,
        rtol=0,
    )

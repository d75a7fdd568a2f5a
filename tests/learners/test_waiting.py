"""What depends on the lengths of rows is found on the host, once: from there on it waits for no device.

Tensors on the meta device have no values, so that everything for which a host would wait raises there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from skyrl.algorithms import linear_logprobs
from skyrl.config import AlgorithmConfig, TrainerConfig
from skyrl.inference.torch.engine import TorchEngine
from skyrl.learners.forward import ForwardOptions, Outputs, compute_logprobs
from skyrl.learners.rank_metrics import Measurements, Moments, to_host
from skyrl.learners.routing import RouterCosts
from skyrl.learners.row_layouts import MicroBatch, packed
from skyrl.learners.strategy import nan_unless_finite
from skyrl.models.attention.segment_attention import SEGMENTS, register, takes_segments
from skyrl.models.files.meta_model import causal_lm_skeleton
from skyrl.models.routers import Routers
from skyrl.training.objective import policy_objective
from tests.inference.nano import nano_model, nano_tokenizer
from tests.learners.rows import batch
from tests.learners.updating import PolicyWorker

META = torch.device("meta")
PACKED = ForwardOptions(pack=True, segmented=True, lengths_given=False, share_prompts=True, plain_head=True)
PADDED = attrs.evolve(PACKED, pack=False, segmented=False, plain_head=False)
EVERY_TERM = AlgorithmConfig(
    temperature=0.7, use_kl_loss=True, kl_loss_coef=0.1, use_entropy_loss=True, entropy_loss_coef=0.1
)


@pytest.mark.parametrize(
    ("options", "plain_up_to"), [(PACKED, 2**26), (PACKED, 0), (PADDED, 2**26)], ids=["packed", "in chunks", "padded"]
)
def test_forward_loss_metrics_and_backward_look_at_no_number(
    nano: Path, options: ForwardOptions, plain_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprobs, "PLAIN_UP_TO", plain_up_to)
    register()
    objective, measured = policy_objective(EVERY_TERM), Measurements()
    rows = objective.weigh(batch().with_fields(ref_logprobs=torch.zeros(6, 12), old_logprobs=torch.zeros(6, 12)))
    model = causal_lm_skeleton(str(nano / "model"), attention=SEGMENTS)
    micro = options.prepare(rows).to(META)
    outputs = compute_logprobs(model, micro, options, temperature=0.7, entropy_gradient=True)
    loss, parts, numbers = objective(outputs.values, micro.rows, outputs.entropy)
    measured.add(parts, outputs.numbers | numbers)
    nan_unless_finite(loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(NotImplementedError):  # so it does look in the end
        measured.read()


def test_routers_are_measured_and_replayed_without_waiting_for_the_device() -> None:
    rows = attrs.evolve(batch(2), routed_experts=torch.zeros(2, 12, 2, 2, dtype=torch.int16))
    routed = packed(rows, segmented=False, share_prompts=False, routed=True).to(META).routed
    model = nano_model("mixtral").to(META)
    routers, measured = Routers(model, learned=True), Measurements()
    routers.begin(routed, measured=True)
    for layer in model.model.layers:
        layer.mlp.gate(torch.zeros(5 + 12, 32, device=META))
    loads = routers.loads()
    measured.add_loads(loads.chosen.sum(1))
    costs = RouterCosts(aux_coef=0.1, z_coef=0.1)
    costs.added(torch.zeros((), device=META), {}, loads, torch.ones(2, device=META)).backward()
    assert all(layer.mlp.gate.weight.grad is not None for layer in model.model.layers)
    with pytest.raises(NotImplementedError):
        measured.read()


def test_rows_that_were_prepared_pick_what_their_mask_selects() -> None:
    rows = batch()
    prepared = rows.with_selected()
    assert prepared.selected is not None and len(prepared.selected) == int(rows.loss_mask.sum())
    assert torch.equal(prepared.pick(rows.input_ids), rows.input_ids[rows.loss_mask])
    values = torch.arange(1.0, len(prepared.selected) + 1, requires_grad=True)
    assert torch.equal(prepared.pick(prepared.scatter(values)), values)
    assert torch.equal(prepared.scatter(values), rows.scatter(values))
    weights = torch.rand(rows.input_ids.shape)
    [gradient] = torch.autograd.grad((prepared.scatter(values) * weights).sum(), values)
    assert torch.equal(gradient, weights[rows.loss_mask])
    assert prepared.rows(2, 4).selected is None  # another shape, other places


def test_measurements_of_an_optimizer_step_are_those_of_its_micro_batches() -> None:
    measured = Measurements()
    measured.add({"loss": torch.tensor(0.5)}, {"ratio": torch.tensor([1.0, 3.0]), "nothing": torch.empty(0)})
    measured.add({"loss": torch.tensor(0.25)}, {"ratio": torch.tensor([True, False])})
    measured.add_loads(torch.tensor([[1.0, 2.0]]))
    measured.add_loads(torch.tensor([[3.0, 0.0]]))
    sums, moments, loads = measured.read()
    assert loads == ((4.0, 2.0),)
    assert sums == {"loss": 0.75}
    assert moments["ratio"] == Moments.from_tensor(torch.tensor([1.0, 3.0])) + Moments.from_tensor(torch.tensor([1, 0]))
    assert moments["nothing"] == Moments()


def test_flash_attention_is_told_the_lengths_by_the_names_that_transformers_reads() -> None:
    rows = batch(3)  # of 5, 12 and 8 tokens
    inputs = packed(rows, segmented=False, share_prompts=False, lengths_given=True).inputs
    lengths = {name: inputs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    assert set(lengths) <= set(inspect.signature(_flash_attention_forward).parameters)
    assert lengths["cu_seq_lens_q"].tolist() == lengths["cu_seq_lens_k"].tolist() == [0, 5, 17, 25]
    assert lengths["cu_seq_lens_q"].dtype == torch.int32  # as the kernels want it
    assert lengths["max_length_q"] == lengths["max_length_k"] == 12
    assert "cu_seq_lens_q" not in packed(rows, segmented=False, share_prompts=False).inputs


def test_tensors_on_the_host_stay_what_they_are() -> None:
    tensors = [torch.ones(2, 3), torch.zeros(1)]
    assert all(one is other for one, other in zip(to_host(tensors), tensors, strict=True))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Everything for which the host waits for the GPU raises."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the mode calls itself a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("packs", [True, False])
async def test_on_a_gpu_the_host_waits_once_an_update(small: TrainerConfig, packs: bool) -> None:
    trainer = attrs.evolve(small, device="cuda", use_sample_packing=packs)
    objective = policy_objective(trainer.algorithm)
    worker = PolicyWorker(trainer, objective)
    rows = batch().with_fields(ref_logprobs=torch.zeros(6, 12))
    await worker.update(rows)  # kernels are loaded
    micro = worker._options.prepare(objective.weigh(rows))
    measured = Measurements()

    def loss_of(outputs: Outputs, micro_batch: MicroBatch) -> torch.Tensor:
        loss, parts, numbers = objective(outputs.values, micro_batch.rows, outputs.entropy)
        measured.add(parts, numbers)
        return loss

    assert takes_segments(worker.model)
    with no_waiting():
        worker.strategy.accumulate([micro], worker._forward, loss_of)
    sums, _, loads = measured.read()
    assert loads == ()
    assert set(sums) == {"policy_loss", "policy_kl", "final_loss"}


@pytest.mark.gpu
def test_from_a_gpu_everything_comes_in_one_transfer() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.empty(0)]
    on_host = to_host([tensor.cuda() for tensor in tensors])
    assert all(torch.equal(one, other) for one, other in zip(on_host, tensors, strict=True))


@pytest.mark.gpu
def test_learners_and_engines_on_a_gpu_plan_no_attention(small: TrainerConfig) -> None:
    trainer = attrs.evolve(small, device="cuda")
    for start in (
        lambda: PolicyWorker(trainer, policy_objective(trainer.algorithm)),
        lambda: TorchEngine(nano_model().cuda(), nano_tokenizer(), max_num_seqs=8),
    ):
        torch.backends.cuda.enable_cudnn_sdp(True)
        start()
        assert not torch.backends.cuda.cudnn_sdp_enabled()

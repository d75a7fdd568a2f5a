"""What only CUDA runs, on a device without numbers (`cuda_disguise.py`): a renamed attribute, a wrong argument, a
tensor that was left on the host, or one more number for which the host waits, shows without a GPU.

What is computed is not seen here: tests marked gpu look at that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch

from skyrl.algorithms import linear_logprobs
from skyrl.batch import TEACHER_HIDDEN, RowTensors
from skyrl.config import (
    AlgorithmConfig,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    SkyRLLoraConfig,
    TrainerConfig,
)
from skyrl.config.settings.distillation import DivergenceConfig
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.inference.adapters import shared
from skyrl.inference.engine import GenerationRequest
from skyrl.inference.torch.causal_lm import CausalLM
from skyrl.inference.torch.decode_batch import DecodeBatch, Job
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.weights import received_weights, replace_weights
from skyrl.learners import offloading
from skyrl.learners.distillation import TeacherLoss
from skyrl.learners.forward import ForwardOptions, compute_logprobs
from skyrl.learners.row_support import RowSupport
from skyrl.learners.workers import model_worker, roles
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.models.attention.blocks import AttentionBlock, backward_of, forward_of
from skyrl.models.attention.segment_attention import (
    SEGMENTS,
    KeyBounds,
    Segments,
    Weighing,
    kernel_for,
    register,
    segment_attention,
)
from skyrl.models.attention.segments import Segment
from skyrl.models.low_rank import LowRank, Updates
from skyrl.models.parallel.expert_parallel import grouped_product
from skyrl.training.objective import policy_objective
from skyrl.weight_receiver.checksums import Digests
from skyrl.weight_receiver.incoming_weights import SharedWeights
from skyrl.weight_sync.senders import buckets
from tests.cuda_disguise import CUDA, HOST, MEMORY, Disguise, cuda_without_gpu
from tests.inference.nano import EOS, VOCABULARY, nano_model, nano_tokenizer, request
from tests.learners.rows import batch
from tests.learners.updating import CriticWorker, PolicyWorker

RECORDED = ["side waits for main", "main waits for side", "record on side"]
SENT, FETCHED = ["side waits for main", "to the host", "memory is kept for side"], ["main waits for side"]
OPTIONS = ForwardOptions(pack=True, segmented=True, lengths_given=False, share_prompts=True, plain_head=True)
PADDED = attrs.evolve(OPTIONS, pack=False, segmented=False)
ALGORITHM = AlgorithmConfig(temperature=0.7, use_kl_loss=True, kl_loss_coef=0.1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disguise]:
    with cuda_without_gpu(monkeypatch) as disguise:
        yield disguise


@pytest.fixture
def learner(nano: Path, cuda: Disguise, monkeypatch: pytest.MonkeyPatch) -> TrainerConfig:
    """A run on CUDA whose models are taken to be what a probe finds them to be: it compares numbers."""
    register()
    support = RowSupport(attention=SEGMENTS, pack=True, share_prompts=True)
    monkeypatch.setattr(roles, "rows_of_run", lambda *_: support)
    monkeypatch.setattr(model_worker, "probe_forward", lambda model, *, pack, **_: OPTIONS if pack else PADDED)
    cuda.reads = 1  # weights are finite, and so is the norm of the gradient
    model = ModelConfig(path=str(nano / "model"))
    return TrainerConfig(
        policy=PolicyConfig(model=model, optimizer_config=OptimizerConfig(lr=1e-3)),
        critic=CriticConfig(model=model, optimizer_config=OptimizerConfig(lr=1e-3)),
        algorithm=ALGORITHM,
        device="cuda",
        compute_dtype="bfloat16",
        attention="sdpa",
        recompute_activations=True,
        micro_train_batch_size_per_gpu=2,
        micro_forward_batch_size_per_gpu=3,
    )


ROWS = batch().with_fields(ref_logprobs=torch.zeros(6, 12), returns=torch.zeros(6, 12))


def policy(trainer: TrainerConfig, cuda: Disguise) -> PolicyWorker:
    worker = PolicyWorker(trainer, policy_objective(trainer.algorithm))
    cuda.calls.clear()
    return worker


@pytest.mark.parametrize(
    ("changes", "logits"),
    [
        ({}, 2**28),
        ({}, 2**10),
        ({"use_sample_packing": False}, 2**10),
        ({"recompute_activations": False}, 2**28),
        ({"fp32_lm_head": True}, 2**28),
        ({"algorithm": attrs.evolve(ALGORITHM, use_entropy_loss=True, entropy_loss_coef=0.1)}, 2**10),
    ],
    ids=["packed", "in chunks", "padded", "activations kept", "float32 head", "entropy"],
)
async def test_an_update_reads_metrics_the_norm_and_whether_weights_are_finite(
    learner: TrainerConfig, cuda: Disguise, changes: dict[str, Any], logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logits` are computed together, and a table of so many bytes is kept for backward."""
    monkeypatch.setattr(linear_logprobs, "LOGITS_AT_A_TIME", logits)
    monkeypatch.setattr(linear_logprobs, "SHARE_OF_A_GPU", MEMORY // logits // 4)
    monkeypatch.setattr(linear_logprobs, "KEPT_SHARE_OF_A_GPU", MEMORY // logits)
    worker = policy(attrs.evolve(learner, **changes), cuda)
    await worker.update(ROWS)
    assert cuda.calls == ["read"] * 3
    assert {weight.device for weight in worker.model.parameters()} == {CUDA}
    cuda.calls.clear()
    assert (await worker.score(ROWS)).device == HOST
    assert cuda.calls == ["read"]  # all scores


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_an_adapter_learns_beside_frozen_weights(
    learner: TrainerConfig, cuda: Disguise, optimizer: Literal["adamw", "muon"]
) -> None:
    table = learner.policy
    changed = attrs.evolve(
        table,
        model=attrs.evolve(table.model, lora=SkyRLLoraConfig(rank=4, alpha=8)),
        optimizer_config=attrs.evolve(table.optimizer_config, optimizer=optimizer),
    )
    worker = policy(attrs.evolve(learner, policy=changed), cuda)
    await worker.update(ROWS)
    assert cuda.calls == ["read"] * 3
    weights = dict(worker.weights("bfloat16"))
    assert {weight.device for weight in weights.values()} == {CUDA}


async def test_experts_are_measured_without_more_reads(learner: TrainerConfig, cuda: Disguise, nano: Path) -> None:
    mixture = ModelConfig(path=str(nano / "mixture"))
    table = attrs.evolve(learner.policy, model=mixture, router_aux_loss_coef=0.1, router_z_loss_coef=0.1)
    await policy(attrs.evolve(learner, policy=table), cuda).update(ROWS)
    assert cuda.calls == ["read"] * 3


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_a_loss_and_its_metrics_stay_on_the_device(cuda: Disguise, loss: str) -> None:
    objective = policy_objective(attrs.evolve(ALGORITHM, policy_loss_type=loss))
    rows = objective.weigh(ROWS.with_fields(old_logprobs=torch.zeros(6, 12))).with_selected().to(CUDA)
    logprobs = torch.zeros(6, 12, device=CUDA, requires_grad=True)
    value, parts, numbers = objective(logprobs, rows, torch.zeros(6, 12, device=CUDA))
    value.backward()
    assert {tensor.device for tensor in (logprobs.grad, *parts.values(), *numbers.values()) if tensor is not None} == {
        CUDA
    }
    assert cuda.calls == ["read"] * {"clip_cov": 2, "kl_cov": 1}.get(loss, 0)  # numbers of tokens that are chosen


def test_tokens_of_several_teachers_are_found_without_a_read(cuda: Disguise) -> None:
    register()
    model = nano_model("qwen3", head_dim=16, attn_implementation=SEGMENTS).to(CUDA, torch.bfloat16)
    tokens = ROWS.loss_mask.sum(1)
    names = [f"{TEACHER_HIDDEN}/{name}" for name in "ab"]
    of_each = [tokens * (torch.arange(6) % 2 == number) for number in range(2)]
    carried = {
        name: RowTensors(values=torch.zeros(int(counts.sum()), 16), counts=counts)
        for name, counts in zip(names, of_each, strict=True)
    }
    teachers = TeacherLoss(DivergenceConfig(), {name: torch.zeros(VOCABULARY, 16) for name in names})
    micro = OPTIONS.prepare(ROWS.carrying(**carried)).to(CUDA)
    outputs = compute_logprobs(model, micro, OPTIONS, temperature=0.7, teachers=teachers)
    assert outputs.token_costs is not None
    outputs.token_costs.sum().backward()
    assert cuda.calls == []


async def test_a_critic_learns_with_as_few_reads(learner: TrainerConfig, cuda: Disguise) -> None:
    worker = CriticWorker(learner, ReturnRegression(value_clip=0.2))
    cuda.calls.clear()
    await worker.update(ROWS.with_fields(values=torch.zeros(6, 12)))
    assert cuda.calls == ["read"] * 3


async def test_activations_go_to_the_host_on_a_stream_of_their_own(
    learner: TrainerConfig, cuda: Disguise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "SMALLEST", 1)
    trainer = attrs.evolve(learner, offload_activations=True, micro_train_batch_size_per_gpu=6)
    await policy(trainer, cuda).update(ROWS)
    assert cuda.calls == SENT * 2 + FETCHED * 2 + ["read"] * 3  # of two layers


async def test_what_has_left_the_device_gives_its_memory_back(learner: TrainerConfig, cuda: Disguise) -> None:
    worker = policy(learner, cuda)
    await worker.update(ROWS)
    cuda.calls.clear()
    assert await worker.offload() > 0
    assert cuda.calls[-2:] == ["the host waits for main", "empty cache"]
    assert set(cuda.calls[:-2]) == {"to the host"}
    assert {weight.device for weight in worker.model.parameters()} == {HOST}
    assert await worker.onload() > 0
    assert {weight.device for weight in worker.model.parameters()} == {CUDA}


def small_engine(**options: Any) -> CausalLM:
    model = nano_model("qwen3", head_dim=16).to(CUDA, torch.bfloat16)
    return CausalLM(model, kept_bytes=2**20, paged=(8, 256), **options)


def job(question: GenerationRequest, adapter: Updates | None = None) -> Job:
    return Job(request=question, keys=question.keys, limit=10, adapter=adapter)


@torch.inference_mode()
def steps(engine: CausalLM, cuda: Disguise, *jobs: Job, count: int = 3) -> list[str]:
    """Calls of `count` decoding steps of these jobs, after they were admitted; the last one is not looked at."""
    decoding = DecodeBatch(engine, nano_tokenizer(), eos_ids=[EOS], weight_version=0)
    left = iter(range(count))
    decoding.advance([], jobs, lambda: next(left, None) is None)
    calls = cuda.calls.copy()
    cuda.calls.clear()
    return calls


@pytest.mark.parametrize("float32_head", [False, True])
def test_a_step_is_recorded_once_replayed_and_read_once(cuda: Disguise, float32_head: bool) -> None:
    engine = small_engine(float32_head=float32_head)
    jobs = job(request((1, 2, 3), count=3)), job(request(tuple(range(1, 80)), count=2))
    cuda.calls.clear()
    assert steps(engine, cuda, *jobs) == ["read", *RECORDED, *["replay", "read"] * 3]
    engine.invalidate()  # weights were replaced in place
    assert steps(engine, cuda, *jobs) == ["read", *["replay", "read"] * 3]
    engine.release()
    assert cuda.calls == ["the host waits"]
    cuda.calls.clear()
    assert steps(engine, cuda, *jobs) == ["read", *RECORDED, *["replay", "read"] * 3]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_step_without_pages_is_read_once(cuda: Disguise, kind: str) -> None:
    engine = CausalLM(nano_model(kind).to(CUDA, torch.bfloat16), records_experts=kind == "mixtral")
    cuda.calls.clear()
    question = request((1, 2, 3), count=2, top_k=3, repetition_penalty=1.1, min_new_tokens=2)
    assert steps(engine, cuda, job(question), job(request((4, 5), temperature=0.0))) == ["read"] * 4


def test_rows_with_adapters_and_scored_prompts_are_not_recorded(cuda: Disguise) -> None:
    engine = small_engine(takes_adapters=True)
    layer = engine.hf_model.model.layers[0].self_attn.q_proj
    factors = torch.zeros(4, layer.in_features, device=CUDA), torch.zeros(layer.out_features, 4, device=CUDA)
    adapters = [
        Updates(number=number, layers={layer: LowRank(*(factor.bfloat16() for factor in factors))}) for number in (2, 3)
    ]
    question = request((1, 2, 3), count=2)
    scored = attrs.evolve(question, scores_prompt=True, prompt_top_logprobs=2)
    cuda.calls.clear()
    assert steps(engine, cuda, job(question), *(job(question, adapter) for adapter in adapters)) == ["read"] * 4
    assert "replay" not in steps(engine, cuda, job(scored, adapters[0]))


async def test_an_adapter_that_comes_while_the_engine_sleeps_is_where_the_engine_will_compute(
    cuda: Disguise, tmp_path: Path
) -> None:
    model = nano_model("qwen3", head_dim=16).to(CUDA, torch.bfloat16)
    engine = TorchEngine(model, nano_tokenizer(), max_num_seqs=4, max_adapters=1)
    layer, name = model.model.layers[0].self_attn.q_proj, "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = torch.zeros(4, layer.in_features), torch.zeros(layer.out_features, 4)
    adapter = shared(
        [(f"{name}{part}.weight", factor) for part, factor in zip("AB", factors, strict=True)], rank=4, alpha=8
    )
    await engine.add_adapter("late", adapter)
    await engine.sleep()
    assert model.device == HOST and cuda.calls[-1] == "empty cache"
    async with engine._adapters.using("late") as updates:
        placed = {(part.device, part.dtype) for item in updates.layers.values() for part in (item.a, item.b)}
    assert placed == {(CUDA, torch.bfloat16)}
    await engine.wake()
    assert model.device == CUDA
    await engine.close()


def test_new_weights_are_read_back_at_once(cuda: Disguise) -> None:
    model = nano_model("qwen3", head_dim=16).to(CUDA, torch.bfloat16)
    weights = tuple((name, torch.zeros(tensor.shape)) for name, tensor in model.state_dict().items())
    cuda.calls.clear()
    replace_weights(model, received_weights(model, SharedWeights(weights)))
    assert cuda.calls == ["read"]


SHARED = (Segment(0, 5, (3, 1)), Segment(9, 8))
LONG = (Segment(0, 20_000), Segment(20_000, 9_000, (8_500,)))


@pytest.mark.parametrize(
    ("dtype", "segments", "bounds", "kernel"),
    [
        (torch.bfloat16, SHARED, KeyBounds(), "_varlen"),
        (torch.bfloat16, SHARED, KeyBounds(window=4), "_varlen"),
        (torch.bfloat16, SHARED, KeyBounds(chunk=4), "_varlen"),
        (torch.bfloat16, LONG, KeyBounds(), "_long"),
        (torch.float32, SHARED, KeyBounds(), "_efficient"),
        (torch.float32, SHARED, KeyBounds(chunk=4), "_efficient"),
        (torch.float32, SHARED, KeyBounds(window=4), "_side_by_side"),
    ],
)
def test_each_kernel_of_attention_takes_its_arguments(
    cuda: Disguise, dtype: torch.dtype, segments: tuple[Segment, ...], bounds: KeyBounds, kernel: str
) -> None:
    tokens = sum(segment.tokens for segment in segments)
    query, key, value = (torch.zeros(1, heads, tokens, 16, device=CUDA, dtype=dtype) for heads in (4, 2, 2))
    row = Segments(segments, CUDA)
    weighing = Weighing(None, bounds=bounds)
    chosen = kernel_for(row, query, weighing)
    assert chosen.__name__ == kernel
    mixed = chosen(row, query, key, value, weighing)
    assert (mixed.shape, mixed.device, mixed.dtype) == ((1, tokens, 4, 16), CUDA, dtype)
    assert cuda.calls == []
    plain, _ = segment_attention(torch.nn.Module(), query, key, value, None, segments=row)
    assert plain.shape == mixed.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_attention_go_forward_and_backward(cuda: Disguise, dtype: torch.dtype) -> None:
    query, key, value = (torch.zeros(1, heads, 32, 16, device=CUDA, dtype=dtype) for heads in (4, 2, 2))
    blocks = [
        AttentionBlock(queries=slice(0, 16), keys=slice(0, 16), causal=True),
        AttentionBlock(queries=slice(0, 16), keys=slice(16, 32), causal=False),
        AttentionBlock(queries=slice(16, 32), keys=slice(16, 32), causal=True),
    ]
    mixed, norms = forward_of(blocks, query, key, value, 0.25)
    gradients = backward_of(blocks, torch.zeros_like(mixed), query, key, value, mixed, norms, 0.25)
    assert [item.shape for item in gradients] == [query.shape, key.shape, value.shape]
    assert {item.device for item in gradients} == {CUDA} and cuda.calls == []


def test_experts_are_one_product_and_nothing_is_read(cuda: Disguise) -> None:
    rows, matrices = (torch.zeros(shape, device=CUDA, dtype=torch.bfloat16) for shape in ((24, 16), (4, 32, 16)))
    assert grouped_product(rows, matrices, torch.full((4,), 6, device=CUDA)).shape == (24, 32)
    assert cuda.calls == []


def test_weights_are_hashed_without_waiting_until_digests_are_read(cuda: Disguise) -> None:
    digests = Digests()
    weights = iter([("large", torch.zeros(2**23)), *((str(number), torch.zeros(7)) for number in range(5))])
    for bucket in buckets(weights, "bfloat16", 2**10, device="cuda"):
        for name, tensor in bucket.items():
            digests.add(name, tensor)
    with torch.cuda.stream(torch.cuda.Stream()):
        digests.add("of another stream", torch.zeros(7, device=CUDA))
    digests.flush()
    assert cuda.calls == []
    assert len(digests.in_hex()) == 7
    assert cuda.calls == ["the host waits", "read"]

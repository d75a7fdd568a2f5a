"""The policy worker on a nano model: what an update may and may not depend on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from attrs import evolve
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel

from skyrl.algorithms import linear_logprobs
from skyrl.batch import TrainingBatch
from skyrl.checkpoint.shards import StoredTensors
from skyrl.config import TrainerConfig
from skyrl.errors import ConfigError, ModelError
from skyrl.learners import schedule
from skyrl.learners.budget import TokenBudget
from skyrl.learners.workers import roles as workers
from skyrl.learners.workers.group import deal
from skyrl.learners.workers.roles import RefWorker
from skyrl.models.attention import segment_attention
from skyrl.models.output_head import has_plain_head
from skyrl.storage.disk import Disk
from skyrl.training import objective
from skyrl.training.objective import PolicyObjective, policy_objective
from skyrl.tree import evolve_at
from tests.learners.updating import PolicyWorker
from tests.nano_run import config


@pytest.fixture
def trainer(nano: Path, tmp_path: Path) -> TrainerConfig:
    return config(nano, tmp_path).trainer


def worker(trainer: TrainerConfig, **changes: Any) -> PolicyWorker:
    for path, value in changes.items():
        trainer = evolve_at(trainer, path.replace("__", "."), value)
    policy = PolicyWorker(trainer, policy_objective(trainer.algorithm))
    policy.optimizer.register_step_pre_hook(lambda *_: USED.update({policy: _gradients(policy)}))
    return policy


def batch(rows: int = 6) -> TrainingBatch:
    """Rows of different lengths, each with a few selected tokens in its second half."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([5, 12, 8, 12, 6, 9, 7, 10][:rows])
    columns = torch.arange(int(lengths.max()))
    mask = (columns >= lengths.unsqueeze(1) // 2) & (columns < lengths.unsqueeze(1))
    shape = mask.shape
    return TrainingBatch(
        input_ids=torch.randint(0, 250, shape, generator=generator),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape),
        groups=torch.arange(rows) // 2,
        advantages=torch.randn(rows, 1, generator=generator) * mask,
    )


USED: WeakKeyDictionary[PolicyWorker, Tensor] = WeakKeyDictionary()
"""The gradient that a worker's optimizer used last."""


def gradients(policy: PolicyWorker) -> Tensor:
    return USED[policy]


def _gradients(policy: PolicyWorker) -> Tensor:
    return torch.cat(
        [parameter.grad.flatten() for parameter in policy.model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize(
    "changes", [{"micro_train_batch_size_per_gpu": n} for n in (2, 3)] + [{"use_sample_packing": False}]
)
async def test_micro_batches_and_packing_change_neither_loss_nor_gradient(trainer: TrainerConfig, changes: Any) -> None:
    unsplit, other = worker(trainer, micro_train_batch_size_per_gpu=6), worker(trainer, **changes)
    one, two = await unsplit.update(batch()), await other.update(batch())
    assert two["final_loss"] == pytest.approx(one["final_loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-5, rel=1e-5)
    assert two["policy_entropy"] == pytest.approx(one["policy_entropy"], abs=1e-5)
    torch.testing.assert_close(gradients(other), gradients(unsplit), atol=1e-5, rtol=1e-4)


async def test_scores_are_the_log_probabilities_of_each_row_alone(trainer: TrainerConfig) -> None:
    policy, rows = worker(trainer), batch()
    scores = await policy.score(rows)
    for index, length in enumerate(rows.lengths.tolist()):
        ids = rows.input_ids[index : index + 1, :length]
        with torch.no_grad():
            logprobs = policy.model(input_ids=ids).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)
        selected = rows.loss_mask[index, 1:length]
        torch.testing.assert_close(scores[index, 1:length][selected], expected[selected], atol=1e-5, rtol=1e-5)
    assert (scores[~rows.loss_mask] == 0).all()


async def test_what_stands_in_the_padding_changes_nothing(trainer: TrainerConfig) -> None:
    rows = batch()
    padding = torch.arange(rows.input_ids.shape[1]) >= rows.lengths.unsqueeze(1)
    other = evolve(rows, input_ids=torch.where(padding, 77, rows.input_ids))
    for packed in (True, False):
        policy = worker(trainer, use_sample_packing=packed)
        assert torch.equal(await policy.score(rows), await policy.score(other))


async def test_temperature_divides_the_logits(trainer: TrainerConfig) -> None:
    hot = worker(trainer, algorithm__temperature=2.0)
    rows = batch(1)
    ids = rows.input_ids[:, : int(rows.lengths)]
    with torch.no_grad():
        logprobs = (hot.model(input_ids=ids).logits[0] / 2.0).log_softmax(-1)
    expected = logprobs[:-1].gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)[rows.loss_mask[0, 1:]]
    torch.testing.assert_close((await hot.score(rows))[rows.loss_mask], expected, atol=1e-5, rtol=1e-5)


LOSSES: list[dict[str, Any]] = [
    *({"policy_loss_type": name} for name in ("regular", "dual_clip", "gspo", "gmpo", "cispo", "sapo", "decoupled")),
    *({"policy_loss_type": name} for name in ("rollout_is", "dppo", "importance_sampling")),
    {"off_policy_correction": {"tis_ratio_type": "token", "token_mask_is_threshold_high": 1.5}},
    {"off_policy_correction": {"sequence_mask_metric": "product", "product_mask_high": 1.2, "product_mask_low": 0.8}},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", LOSSES, ids=lambda settings: "".join(map(str, settings.values()))[:40])
async def test_metrics_cover_the_rows_that_are_not_learned(
    algorithm: dict[str, Any], nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without an advantage take no part in the update. Measured in full, they count as if they did."""
    monkeypatch.setattr(objective, "LEARNED_PER_MEASURED_ROW", 1)
    trainer = config(
        nano, tmp_path, **{f"trainer__algorithm__{name}": value for name, value in algorithm.items()}
    ).trainer
    rows = batch()
    assert rows.advantages is not None
    numbers = torch.Generator().manual_seed(1)
    rows = rows.with_fields(
        old_logprobs=-5 + torch.randn(rows.input_ids.shape, generator=numbers),
        rollout_logprobs=-5 + torch.randn(rows.input_ids.shape, generator=numbers),
        advantages=rows.advantages * (torch.arange(6) % 2).unsqueeze(1),
    )
    skipping, full = worker(trainer), worker(trainer)
    assert isinstance(full.objective, PolicyObjective) and full.objective.zero_at_zero_advantage
    full.objective = evolve(full.objective, zero_at_zero_advantage=False)
    assert len(skipping.objective.weigh(rows)) == 3
    one, two = await skipping.update(rows), await full.update(rows)
    assert one == pytest.approx(two, abs=1e-5, rel=1e-5)
    torch.testing.assert_close(gradients(skipping), gradients(full), atol=1e-6, rtol=1e-5)


async def test_a_difference_in_rows_that_are_not_learned_shows_in_the_mean(trainer: TrainerConfig) -> None:
    """The case of a run whose prompts are nearly all solved: the alarm on the difference looks at its mean."""
    policy = worker(trainer)
    rows = batch(8)
    assert rows.advantages is not None
    own = await policy.score(rows)
    is_learned = torch.tensor([1, 0, 0, 0, 0, 1, 0, 0]).unsqueeze(1).bool()
    rows = rows.with_fields(
        rollout_logprobs=torch.where(is_learned, own, own - 5.0), advantages=rows.advantages * is_learned
    )
    metrics = await policy.update(rows)
    of_others = (rows.loss_mask & ~is_learned).sum() / rows.loss_mask.sum()
    assert metrics["rollout_train_logprobs_abs_diff_mean"] == pytest.approx(5.0 * of_others.item(), abs=1e-4)
    assert metrics["rollout_train_logprobs_abs_diff_max"] == pytest.approx(5.0, abs=1e-4)


async def test_an_update_without_old_scores_is_the_one_with_the_current_ones(trainer: TrainerConfig) -> None:
    skipped, scored = worker(trainer), worker(trainer)
    rows = batch()
    await skipped.update(rows)
    await scored.update(rows.with_fields(old_logprobs=await scored.score(rows)))
    torch.testing.assert_close(gradients(skipped), gradients(scored), atol=1e-5, rtol=1e-4)


async def test_the_gradient_is_clipped_to_its_largest_norm(trainer: TrainerConfig) -> None:
    policy = worker(trainer, policy__optimizer_config__max_grad_norm=0.01)
    reported = (await policy.update(batch()))["grad_norm"]
    assert reported > 0.01
    assert gradients(policy).norm().item() == pytest.approx(0.01, rel=1e-3)


async def test_a_largest_norm_of_zero_turns_clipping_off(trainer: TrainerConfig) -> None:
    free, loose = (worker(trainer, policy__optimizer_config__max_grad_norm=norm) for norm in (0.0, 1e9))
    await free.update(batch())
    await loose.update(batch())
    assert gradients(free).norm() > 0
    assert torch.equal(gradients(free), gradients(loose))


async def test_the_learning_rate_warms_up_step_by_step(trainer: TrainerConfig) -> None:
    policy = worker(trainer, policy__optimizer_config__num_warmup_steps=4)
    rates = [(await policy.update(batch()))["policy_lr"] for _ in range(6)]
    assert rates == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01])


async def test_a_restored_worker_goes_on_bit_for_bit(trainer: TrainerConfig, tmp_path: Path) -> None:
    original, restored = worker(trainer), worker(trainer)
    await original.update(batch())
    numbers, _ = original.stage()
    file = await original.write_staged(Disk(tmp_path), "step")
    restored.load_state(StoredTensors(Disk(tmp_path), "step", (file.name,)), numbers)
    await original.update(batch())
    await restored.update(batch())
    for one, two in zip(original.model.parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(one, two)


async def test_recomputing_activations_changes_no_gradient(trainer: TrainerConfig) -> None:
    plain, saving = worker(trainer), worker(trainer, recompute_activations=True)
    await plain.update(batch())
    await saving.update(batch())
    torch.testing.assert_close(gradients(saving), gradients(plain), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "compiles"),
    [
        ({}, True),
        ({"use_torch_compile": False}, False),
        ({"tensor_parallel_size": 2}, False),
        ({"device": "cpu"}, False),
        ({"strategy": "deepspeed"}, False),
    ],
)
def test_layers_are_compiled_for_a_whole_policy_on_cuda(
    changes: dict[str, Any], compiles: bool, trainer: TrainerConfig
) -> None:
    fields: dict[str, Any] = {"use_torch_compile": True, "tensor_parallel_size": 1} | changes
    policy = {name: fields.pop(name) for name in ("use_torch_compile", "tensor_parallel_size")}
    changed = evolve(trainer, **{"device": "cuda"} | fields, policy=evolve(trainer.policy, **policy))
    assert workers.compiles_layers(changed, changed.policy) is compiles
    assert not workers.compiles_layers(changed, changed.ref)
    on_a_cpu = changed.device == "cpu"
    assert workers._compiles_logits(changed, changed.policy) is on_a_cpu


executions: list[int] = []


@torch.library.custom_op("skyrl_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    """The same numbers, of any shape; notes that they were computed."""
    executions.append(1)
    return x.clone()


counted.register_autograd(lambda ctx, gradient: gradient)


async def test_attention_over_long_rows_is_not_computed_again(
    trainer: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = segment_attention._attend_per_segment
    monkeypatch.setattr(segment_attention, "kernel_for", lambda *_: lambda *inputs: counted(attend(*inputs)))
    monkeypatch.setattr(schedule, "attention_operators", lambda: [torch.ops.skyrl_tests.counted.default])
    plain = worker(trainer)
    await plain.update(batch())
    counts = []
    for long in (1, 10**6):
        monkeypatch.setattr(schedule, "KEPT_FROM", long)
        saving = worker(trainer, recompute_activations=True)
        executions.clear()
        await saving.update(batch())
        counts.append(len(executions))
        torch.testing.assert_close(gradients(saving), gradients(plain), atol=1e-6, rtol=1e-5)
    assert 2 * counts[0] == counts[1] > 0


async def test_recomputing_activations_leaves_dropout_off(nano: Path, trainer: TrainerConfig, tmp_path: Path) -> None:
    folder = tmp_path / "dropout"
    shutil.copytree(nano / "model", folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"attention_dropout": 0.5}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    policy = worker(trainer, recompute_activations=True, policy__model__path=str(folder))
    assert torch.equal(await policy.score(batch()), await policy.score(batch()))


def test_a_model_that_looks_ahead_is_refused(trainer: TrainerConfig, tmp_path: Path) -> None:
    BertLMHeadModel(bert(is_decoder=False)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="not a causal language model"):
        worker(trainer, policy__model__path=str(tmp_path / "bert"))


async def test_a_model_whose_packed_rows_see_each_other_runs_unpacked_and_says_so(
    trainer: TrainerConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    BertLMHeadModel(bert(is_decoder=True)).save_pretrained(tmp_path / "bert")
    eager = {"policy__model__path": str(tmp_path / "bert"), "attention": "eager"}
    rows = evolve(batch(), input_ids=batch().input_ids % 64)
    scores = await worker(trainer, **eager).score(rows)
    assert "policy: bert: rows run unpacked, with attention eager: packed rows differ from each row" in caplog.text
    assert torch.equal(scores, await worker(trainer, **eager, use_sample_packing=False).score(rows))


def bert(*, is_decoder: bool) -> BertConfig:
    return BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        is_decoder=is_decoder,
    )


async def test_the_reference_scores_as_the_policy_it_began_as(trainer: TrainerConfig) -> None:
    assert torch.equal(await RefWorker(trainer).score(batch()), await worker(trainer).score(batch()))


def test_a_configuration_that_was_not_resolved_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"call resolve\(config\) first"):
        RefWorker(TrainerConfig())


@pytest.mark.long
def test_a_policy_worker_needs_no_rollout_and_no_engine(nano: Path, tmp_path: Path) -> None:
    script = f"""
import asyncio, sys, torch
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, ModelConfig, PolicyConfig, TrainerConfig
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.roles import PolicyWorker
from skyrl.training.objective import policy_objective

trainer = TrainerConfig(
    policy=PolicyConfig(model=ModelConfig(path={str(nano / "model")!r})),
    algorithm=AlgorithmConfig(temperature=1.0, use_kl_loss=False),
    device="cpu", compute_dtype="float32", attention="sdpa",
)
worker = PolicyWorker(trainer)
mask = torch.tensor([[False, True, True]])
batch = TrainingBatch(
    input_ids=torch.tensor([[1, 2, 3]]), lengths=torch.tensor([3]), loss_mask=mask, rollout_logprobs=torch.zeros(1, 3),
    rewards=torch.zeros(1, 3), groups=torch.zeros(1, dtype=torch.long), advantages=mask.float(),
)
before = [weight.clone() for _, weight in worker.weights()]
asyncio.run(worker.forward_backward(batch, policy_objective(trainer.algorithm)))
print(asyncio.run(worker.optimizer_step(StepSettings()))["grad_norm"] > 0)
print(any(not torch.equal(old, new) for old, (_, new) in zip(before, worker.weights())))
print([name for name in sys.modules if name.startswith(("skyrl.rollout", "skyrl.inference"))])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout.split("\n")[:3] == ["True", "True", "[]"]


@pytest.mark.parametrize("packed", [True, False])
async def test_learning_without_the_logits_is_learning_with_them(
    trainer: TrainerConfig, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"use_sample_packing": packed, "algorithm__use_entropy_loss": True, "algorithm__entropy_loss_coef": 0.1}
    plain, lean = worker(trainer, **settings), worker(trainer, **settings)
    one = await plain.update(batch())
    monkeypatch.setattr(linear_logprobs, "PLAIN_UP_TO", 0)
    monkeypatch.setattr(linear_logprobs, "LOGITS_AT_A_TIME", 1000)
    two = await lean.update(batch())
    assert two["policy_entropy"] == pytest.approx(one["policy_entropy"], abs=1e-5)
    torch.testing.assert_close(gradients(lean), gradients(plain), atol=1e-5, rtol=1e-4)


async def test_a_model_that_caps_its_logits_is_read_through_them(trainer: TrainerConfig) -> None:
    policy = worker(trainer)
    head = policy.model.get_submodule("lm_head")
    head.register_forward_hook(lambda head, inputs, logits: logits.clamp(-1, 1))
    assert has_plain_head(worker(trainer).model, torch.device("cpu"))
    assert not has_plain_head(policy.model, torch.device("cpu"))


def grouped() -> TrainingBatch:
    """Two groups of three answers of different lengths to one prompt each, of 4 and 6 tokens."""
    rows, prompts, answers = batch(6), (4, 4, 4, 6, 6, 6), (3, 8, 1, 2, 6, 5)
    lengths = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    columns = torch.arange(rows.input_ids.shape[1])
    ids = rows.input_ids.clone()
    for row in range(6):
        ids[row, : prompts[row]] = ids[row // 3 * 3, : prompts[row]]
    mask = (columns >= torch.tensor(prompts).unsqueeze(1)) & (columns < lengths.unsqueeze(1))
    return evolve(
        rows,
        input_ids=ids,
        lengths=lengths,
        loss_mask=mask,
        groups=torch.arange(6) // 3,
        answer_lengths=torch.tensor(answers),
        advantages=torch.randn(6, 1, generator=torch.Generator().manual_seed(1)) * mask,
    )


async def test_one_copy_of_each_prompt_changes_neither_scores_nor_gradients(trainer: TrainerConfig) -> None:
    sizes = {"micro_train_batch_size_per_gpu": 6, "micro_forward_batch_size_per_gpu": 6}
    shared = worker(trainer, **sizes)
    others = [worker(trainer, **sizes, share_group_prompts=False), worker(trainer, **sizes, use_sample_packing=False)]
    tokens: list[int] = []
    shared.model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scores = await shared.score(grouped())
    assert tokens == [4 + 12 + 6 + 13]
    await shared.update(grouped())
    for other in others:
        torch.testing.assert_close(await other.score(grouped()), scores, atol=1e-5, rtol=1e-5)
        await other.update(grouped())
        torch.testing.assert_close(gradients(other), gradients(shared), atol=1e-5, rtol=1e-4)


async def test_rows_of_one_group_with_different_prompts_share_nothing(trainer: TrainerConfig) -> None:
    rows = grouped()
    ids = rows.input_ids.clone()
    ids[1, 2] += 1
    rows = evolve(rows, input_ids=ids)
    scores = await worker(trainer).score(rows)
    torch.testing.assert_close(await worker(trainer, share_group_prompts=False).score(rows), scores)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 14, 20, 1000])
async def test_a_budget_of_tokens_changes_neither_scores_nor_gradients(trainer: TrainerConfig, tokens: int) -> None:
    by_rows, by_tokens = worker(trainer), worker(trainer, max_tokens_per_microbatch=tokens)
    passes: list[int] = []
    by_tokens.model.register_forward_pre_hook(lambda *_: passes.append(1))
    one, two = await by_rows.update(grouped()), await by_tokens.update(grouped())
    assert two["final_loss"] == pytest.approx(one["final_loss"], abs=1e-5)
    torch.testing.assert_close(gradients(by_tokens), gradients(by_rows), atol=1e-5, rtol=1e-4)
    # groups of 16 and 19 tokens, each whole: one is above 14, both are above 1, and 20 holds one of them
    assert len(passes) == (1 if tokens == 1000 else 2)
    fresh = worker(trainer, max_tokens_per_microbatch=tokens)
    torch.testing.assert_close(await fresh.score(grouped()), await worker(trainer).score(grouped()), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("least", "passes"), [(1, 1), (2, 2), (4, 4), (9, 6)])
async def test_a_least_number_of_micro_batches_splits_groups_where_it_must_and_changes_no_gradient(
    trainer: TrainerConfig, least: int, passes: int
) -> None:
    """Two groups of three rows: two passes have a group each, four have rows, and there are six of them."""
    unsplit = worker(trainer, max_tokens_per_microbatch=1000)
    split = worker(trainer, max_tokens_per_microbatch=1000, min_microbatches=least)
    seen: list[int] = []
    split.model.register_forward_pre_hook(lambda *_: seen.append(1))
    one, two = await unsplit.update(grouped()), await split.update(grouped())
    assert two["final_loss"] == pytest.approx(one["final_loss"], abs=1e-5)
    torch.testing.assert_close(gradients(split), gradients(unsplit), atol=1e-5, rtol=1e-4)
    assert len(seen) == passes


def test_ranks_with_a_budget_make_as_many_passes() -> None:
    shares = TokenBudget(tokens=12, keep_groups=False).plan(deal(grouped(), 2))  # 7, 12, 5 and 8, 12, 11 tokens
    assert [int(share.micro_batches.max()) + 1 for share in shares if share.micro_batches is not None] == [3, 3]

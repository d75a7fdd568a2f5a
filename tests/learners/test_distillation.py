"""A policy beside a teacher: what the teacher's ranks return, and what the divergence from it adds to an update."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.batch import TEACHER_HIDDEN, TEACHER_IDS, RowTensors, TrainingBatch
from skyrl.config import DistillationConfig, ModelConfig, TeacherConfig, TrainerConfig
from skyrl.errors import ModelError
from skyrl.learners.distillation import _states_by_teacher
from skyrl.learners.rank_metrics import Metrics
from skyrl.learners.row_layouts import RowLayout, Stretch
from skyrl.learners.workers import roles
from skyrl.learners.workers.group import ScorerGroup, deal
from skyrl.learners.workers.roles import TeachersWorker, TeacherWorker, hidden_of_teachers, ranks_of_teacher
from skyrl.planning.replicas import replicas
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.training.objective import policy_objective
from skyrl.training.teacher import LocalTeacher, TeacherOfLikelyTokens, TeachersBySource
from tests.learners.rows import batch
from tests.learners.spreading import (
    CUTTING,
    SHARING,
    Spread,
    assert_same_numbers,
    assert_same_weights,
    changed,
    weights_of,
)
from tests.learners.updating import LearnerGroup, PolicyWorker

ROWS = 7  # of which two ranks have four each, one of them idle


@pytest.fixture(scope="module")
def taught(small: TrainerConfig, nano: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    """With a teacher of another width, whose head is not tied and has five rows more."""
    folder, config = tmp_path_factory.mktemp("teacher"), AutoConfig.from_pretrained(nano / "model")
    config.update({"hidden_size": 48, "vocab_size": config.vocab_size + 5, "tie_word_embeddings": False})
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = DistillationConfig(type="loss", beta=0.3, coef=0.5, temperature=2.0)
    return attrs.evolve(
        small,
        teacher=TeacherConfig(model=ModelConfig(path=str(folder))),
        algorithm=attrs.evolve(small.algorithm, use_kl_loss=False, distillation=settings),
    )


def logits_of(path: str | None, rows: TrainingBatch) -> Tensor:
    """(N, V): logits of a stored model at the selected tokens, each row alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    logits = []
    with torch.no_grad():
        for ids, length, mask in zip(rows.input_ids, rows.lengths.tolist(), rows.loss_mask, strict=True):
            logits.append(model(ids[None, :length]).logits[0][mask.nonzero().squeeze(1) - 1])
    return torch.cat(logits)


async def with_states(trainer: TrainerConfig) -> TrainingBatch:
    rows = batch(ROWS)
    return rows.carrying(**{TEACHER_HIDDEN: await TeacherWorker(trainer).hidden(rows)})


async def test_hidden_states_and_the_output_matrix_give_the_teachers_distributions(taught: TrainerConfig) -> None:
    rows, path = batch(ROWS), taught.teacher.model.path
    states = await TeacherWorker(taught).hidden(rows)
    assert states.counts.tolist() == rows.loss_mask.sum(1).tolist()
    matrix = roles._output_matrix(taught, taught.teacher)
    expected = logits_of(path, rows)
    assert expected.shape[1] == len(matrix)
    torch.testing.assert_close(states.values @ matrix.T, expected, atol=1e-5, rtol=1e-5)
    logs = torch.log_softmax(expected, -1).gather(1, rows.pick(rows.input_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(rows.pick(await TeacherWorker(taught).score(rows)), logs, atol=1e-5, rtol=1e-5)


async def test_a_tied_output_matrix_is_read_under_the_name_of_the_embeddings(taught: TrainerConfig) -> None:
    tied = changed(taught, {"teacher.model.path": taught.policy.model.path})
    matrix = roles._output_matrix(tied, tied.teacher)
    states = await TeacherWorker(tied).hidden(batch(ROWS))
    logits = logits_of(taught.policy.model.path, batch(ROWS))
    torch.testing.assert_close(states.values @ matrix.T, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2])
async def test_hidden_states_are_alike_on_any_number_of_ranks(
    ranks: int, taught: TrainerConfig, spread: Spread
) -> None:
    group = spread.start(partial(TeacherWorker, taught), ranks, taught.strategy, replicas(ranks))
    many = await ScorerGroup[TeacherWorker](group).hidden(batch(ROWS))
    one = await TeacherWorker(taught).hidden(batch(ROWS))
    assert many.counts.tolist() == one.counts.tolist()
    torch.testing.assert_close(many.values, one.values, atol=1e-5, rtol=1e-5)


def dense(student: Tensor, teacher: Tensor, settings: DistillationConfig) -> Tensor:
    """(N,): the generalised Jensen-Shannon divergence over the tokens that both have."""
    p, q = (
        torch.softmax(logits[:, : student.shape[1]].double() / settings.temperature, -1)
        for logits in (student, teacher)
    )
    m = (1 - settings.beta) * p + settings.beta * q
    to_teacher, to_student = ((probs * (probs / m).log()).sum(-1) for probs in (q, p))
    return settings.beta * to_teacher + (1 - settings.beta) * to_student


async def test_the_loss_of_a_batch_has_the_divergence_of_its_distributions(taught: TrainerConfig) -> None:
    rows, settings = batch(ROWS), taught.algorithm.distillation
    student, teacher = (logits_of(model.path, rows) for model in (taught.policy.model, taught.teacher.model))
    expected = dense(student, teacher, settings).float()
    bound = float(expected.mean())
    bounded = changed(taught, {"algorithm.distillation.max_divergence": bound})
    for trainer, costs in ((taught, expected), (bounded, expected.clamp(max=bound))):
        learner = PolicyWorker(trainer, policy_objective(trainer.algorithm, has_teacher=True))
        metrics = await learner.update(await with_states(trainer))
        assert metrics["teacher_divergence"] == pytest.approx(expected.mean().item(), abs=1e-5)
        assert metrics["distillation_loss"] == pytest.approx(0.5 * costs.mean().item(), abs=1e-5)
        assert metrics["final_loss"] == pytest.approx(metrics["policy_loss"] + metrics["distillation_loss"], abs=1e-5)
    assert metrics["teacher_divergence_clamped"] == pytest.approx((expected > bound).float().mean().item())


async def test_a_teacher_that_is_the_policy_changes_nothing(taught: TrainerConfig) -> None:
    own = changed(taught, {"teacher.model.path": taught.policy.model.path, "algorithm.distillation.beta": 1.0})
    rows = attrs.evolve(await with_states(own), advantages=torch.zeros(batch(ROWS).loss_mask.shape))
    metrics = await PolicyWorker(own, policy_objective(own.algorithm, has_teacher=True)).update(rows)
    assert abs(metrics["teacher_divergence"]) < 1e-6 and metrics["grad_norm"] < 1e-5


class ClosedTeachers(TeachersWorker):
    """Teachers that leave the process group before other models join it."""

    def close(self) -> None:
        for teacher in self._teachers.values():
            teacher.close()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_each_row_is_compared_with_its_own_teacher(ranks: int, taught: TrainerConfig, spread: Spread) -> None:
    """One teacher is another model, the other the policy itself, which is no distance away. Ranks hold both."""
    policy, other = str(taught.policy.model.path), str(taught.teacher.model.path)
    trainer = changed(taught, {"teacher.model.path": policy, "teacher.sources": {"far": other}})

    async def ready() -> None:
        """Models are where they compute."""

    teachers = spread.start(partial(ClosedTeachers, trainer), ranks, trainer.strategy, replicas(ranks))
    near, far = (
        LocalTeacher(model=ScorerGroup(ranks_of_teacher(teachers, path)), ready=ready, hidden_name=name)
        for path, name in hidden_of_teachers(trainer.teacher).items()
    )
    rows, sources = batch(ROWS), ["far" if row % 3 == 0 else "near" for row in range(ROWS)]
    extras = await TeachersBySource(default=near, named={"far": far}).hidden(rows, sources)
    assert extras.keys() == {f"{TEACHER_HIDDEN}/{policy}", f"{TEACHER_HIDDEN}/{other}"}
    student, teacher = (logits_of(path, rows) for path in (policy, other))
    counts = rows.loss_mask.sum(1)
    is_far = torch.tensor([source == "far" for source in sources]).repeat_interleave(counts)
    expected = dense(student, teacher, trainer.algorithm.distillation).float() * is_far
    objective = policy_objective(trainer.algorithm, has_teacher=True)
    group = spread.start(partial(PolicyWorker, trainer, objective), ranks, trainer.strategy, replicas(ranks))
    metrics = await LearnerGroup(group, objective, replicas=replicas(ranks)).update(rows.carrying(**extras))
    assert metrics["teacher_divergence"] == pytest.approx(expected.mean().item(), abs=1e-5)


async def trained(learner: Any, rows: TrainingBatch) -> tuple[list[Metrics], dict[str, Tensor]]:
    """Metrics of three updates, and the weights after them."""
    metrics = [await learner.update(rows) for _ in range(3)]
    return metrics, await weights_of(learner)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"use_sample_packing": False}, 1),
        ({"micro_train_batch_size_per_gpu": 1}, 1),
        ({}, 2),
        pytest.param({SHARING: 2}, 2, marks=pytest.mark.long),
        ({CUTTING: 2}, 2),
    ],
)
async def test_updates_are_alike_packed_or_padded_and_on_any_number_of_ranks(
    changes: dict[str, Any], ranks: int, taught: TrainerConfig, spread: Spread
) -> None:
    rows, objective = await with_states(taught), policy_objective(taught.algorithm, has_teacher=True)
    expected, weights = await trained(PolicyWorker(taught, objective), rows)
    trainer = changed(taught, changes)
    together = replicas(ranks, inner=trainer.policy.sequence_parallel_size * trainer.policy.tensor_parallel_size)
    group = spread.start(partial(PolicyWorker, trainer, objective), ranks, trainer.strategy, together)
    metrics, others = await trained(LearnerGroup(group, objective, replicas=together), rows)
    for one, other in zip(expected, metrics, strict=True):
        assert_same_numbers(one, other)
    assert_same_weights(weights, others)
    assert metrics[-1]["teacher_divergence"] < metrics[0]["teacher_divergence"]


LIKELY: dict[str, Any] = {"algorithm.distillation.top_k": 5, "algorithm.distillation.min_logprob": -6.0}


async def of_likely_tokens(trainer: TrainerConfig, teacher: Any, policy: Any) -> TrainingBatch:
    """The rows with what a teacher says of likely tokens."""
    asks = TeacherOfLikelyTokens(
        settings=trainer.algorithm.distillation,
        teacher=TeachersBySource(default=teacher, named={}).token_logprobs,
        policy=policy.token_logprobs,
    )
    return await asks(batch(ROWS), ["letters"] * ROWS)


def alone(worker: Any) -> ScorerGroup[Any]:
    return ScorerGroup(Group([LocalHandle("one", worker)]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", ["teacher", "student", "intersection", "union"])
async def test_the_loss_of_a_batch_has_the_divergence_over_the_chosen_tokens(
    source: str, taught: TrainerConfig
) -> None:
    trainer = changed(taught, {**LIKELY, "algorithm.distillation.top_k_of": source})
    objective = policy_objective(trainer.algorithm, has_teacher=True)
    learner = PolicyWorker(trainer, objective)
    rows = await of_likely_tokens(trainer, alone(TeacherWorker(trainer)), alone(learner))
    student, teacher = (
        (logits_of(model.path, rows).double() / 2).log_softmax(-1)
        for model in (trainer.policy.model, trainer.teacher.model)
    )
    width = student.shape[1]  # the teacher's matrix has more rows, whose tokens do not count
    sets = [(logprobs.topk(5).indices, torch.zeros_like(logprobs, dtype=torch.bool)) for logprobs in (teacher, student)]
    of_teacher, of_student = (mask.scatter(1, ids, True)[:, :width] for ids, mask in sets)
    teacher = teacher[:, :width]
    chosen = {
        "teacher": of_teacher,
        "student": of_student,
        "intersection": of_teacher & of_student,
        "union": of_teacher | of_student,
    }[source]
    ids = rows.extras[TEACHER_IDS]
    assert ids.counts.tolist() == rows.loss_mask.sum(1).tolist()
    for mask, listed in zip(chosen, ids.values, strict=True):
        assert set(mask.nonzero().squeeze(1).tolist()) == {token for token in listed.tolist() if 0 <= token < width}
    metrics = await learner.update(rows)
    p, q = (torch.where(chosen, logprobs.exp(), 0.0) for logprobs in (student, teacher))
    p, q = (torch.cat([probs, 1 - probs.sum(1, keepdim=True)], 1).clamp(min=math.exp(-6.0)) for probs in (p, q))
    kept = torch.nn.functional.pad(chosen, (0, 1), value=True)
    m = 0.7 * p + 0.3 * q
    expected = (torch.where(kept, 0.3 * q * (q / m).log() + 0.7 * p * (p / m).log(), 0.0)).sum(1)
    assert metrics["teacher_divergence"] == pytest.approx(expected.mean().item(), abs=1e-5)
    low = ((student < -6.0) & chosen).sum(1) / chosen.sum(1).clamp(min=1)
    assert metrics["teacher_logprobs_clamped"] == pytest.approx(low.mean().item(), abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"use_sample_packing": False}, 1),
        ({"micro_train_batch_size_per_gpu": 1}, 1),
        ({}, 2),
        ({SHARING: 2}, 2),
        ({CUTTING: 2}, 2),
    ],
)
async def test_likely_tokens_teach_alike_packed_or_padded_and_on_any_number_of_ranks(
    changes: dict[str, Any], ranks: int, taught: TrainerConfig, spread: Spread
) -> None:
    # Adam's first step is as long for a gradient of rounding errors as for any other, with either sign.
    plain = {"policy.optimizer_config.optimizer": "sgd", "policy.optimizer_config.lr": 0.3}
    taught = changed(taught, {**LIKELY, **plain, "algorithm.distillation.top_k_of": "union"})
    objective = policy_objective(taught.algorithm, has_teacher=True)
    teacher, policy = alone(TeacherWorker(taught)), PolicyWorker(taught, objective)
    rows = await of_likely_tokens(taught, teacher, alone(policy))
    expected, weights = await trained(policy, rows)
    trainer = changed(taught, changes)
    together = replicas(ranks, inner=trainer.policy.sequence_parallel_size * trainer.policy.tensor_parallel_size)
    group = spread.start(partial(PolicyWorker, trainer, objective), ranks, trainer.strategy, together)
    learner = LearnerGroup(group, objective, replicas=together)
    others = await of_likely_tokens(trainer, teacher, learner)
    assert torch.equal(others.extras[TEACHER_IDS].values, rows.extras[TEACHER_IDS].values)
    metrics, weights_there = await trained(learner, others)
    for one, other in zip(expected, metrics, strict=True):
        assert_same_numbers(one, other)
    assert_same_weights(weights, weights_there)
    assert metrics[-1]["teacher_divergence"] < metrics[0]["teacher_divergence"]


async def test_models_that_cap_their_logits_are_refused(taught: TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.learners.forward.has_plain_head", lambda model, device: False)
    with pytest.raises(ModelError, match=r"of the teacher are not the product .*: set distillation.top_k = 128"):
        TeacherWorker(taught)
    with pytest.raises(ModelError, match="the logits of the policy are not the product"):
        PolicyWorker(taught, policy_objective(taught.algorithm))
    await TeacherWorker(changed(taught, {"algorithm.distillation.type": "advantage"})).score(batch(2))


def test_idle_rows_carry_no_states_of_a_teacher() -> None:
    rows = batch(3)
    states = RowTensors.of([torch.ones(count, 2) for count in rows.loss_mask.sum(1).tolist()])
    shares = deal(rows.carrying(**{TEACHER_HIDDEN: states}), 2)
    for share in shares:
        assert share.extras[TEACHER_HIDDEN].counts.tolist() == share.loss_mask.sum(1).tolist()
    assert shares[1].loss_mask[1].sum() == 0


def test_a_rank_with_a_part_of_a_row_gets_the_states_of_the_tokens_that_it_reads() -> None:
    one = RowTensors.of([torch.tensor([[1.0], [2.0]]), torch.zeros(0, 1)])
    other = RowTensors.of([torch.zeros(0, 1), torch.tensor([[3.0], [4.0], [5.0]])])
    group: Any = None  # nothing is sent
    stretch = Stretch(group=group, own=torch.tensor([1, 3, 4]), most=3, positions=torch.arange(5))
    layout = RowLayout(inputs={}, chosen=torch.arange(3), stretch=stretch)
    states = _states_by_teacher({"one": one, "other": other}, layout)
    tokens = {name: (positions.tolist(), values.flatten().tolist()) for name, (positions, values) in states.items()}
    assert tokens == {"one": ([0], [2.0]), "other": ([1, 2], [4.0, 5.0])}

"""Runs with a teacher: what the policy learns from it, and how they go on after an interruption."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from skyrl.batch import TrainingBatch
from skyrl.config.derive.sizes import sizes_of
from skyrl.errors import ModelError, ResumeError
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.models.files.loading import load_tokenizer
from skyrl.runs.inputs import refuse_other_tokens
from skyrl.training.describe import Metrics
from tests.experiments.forked import run
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same, assert_same_files
from tests.long_cases import long_except
from tests.nano_run import config, metrics, train

TYPE = "trainer__algorithm__distillation__type"
TEACHER_ALONE: dict[str, Any] = {
    "trainer__algorithm__distillation__task_coef": 0,
    "trainer__eval_before_train": False,
    "trainer__eval_interval": -1,
    "trainer__deterministic": True,
}
ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
    "trainer__placement__teacher_num_gpus_per_node": 2,
}


@pytest.fixture(scope="module")
def teacher(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model than the policy, with other weights and its tokens."""
    folder, wider = tmp_path_factory.mktemp("teacher"), AutoConfig.from_pretrained(nano / "model")
    wider.update({"hidden_size": 48, "tie_word_embeddings": False})
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(wider).save_pretrained(folder)
    AutoTokenizer.from_pretrained(nano / "model").save_pretrained(folder)
    return folder


def taught(teacher: Path, form: str, **changes: Any) -> dict[str, Any]:
    return {**TEACHER_ALONE, "trainer__teacher__model__path": str(teacher), TYPE: form, **changes}


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "metric", "share", "rate"),
    [("advantage", "loss/teacher_kl", 0.9, 3e-3), ("loss", "policy/teacher_divergence", 0.7, 1e-2)],
)
def test_a_student_comes_near_its_teacher(
    form: str, metric: str, share: float, rate: float, nano: Path, teacher: Path, tmp_path: Path
) -> None:
    length = {"trainer__epochs": 5, "trainer__policy__optimizer_config__lr": rate}
    train(nano, tmp_path, **taught(teacher, form, trainer__ckpt_interval=-1, **length))
    distances = [row[metric] for row in metrics(tmp_path)[1:]]
    assert len(distances) == 30
    assert sum(distances[-3:]) < share * sum(distances[:3])


def test_old_samples_of_an_asynchronous_run_are_compared_with_the_weights_that_drew_them(
    nano: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[tuple[TrainingBatch, torch.Tensor]] = []
    forward_backward = LearnerGroup.forward_backward

    async def noted(learner: LearnerGroup[LearningWorker], batch: TrainingBatch, objective: Objective) -> Metrics:
        learned.append((batch, await learner.score(batch)))
        return await forward_backward(learner, batch, objective)

    monkeypatch.setattr(LearnerGroup, "forward_backward", noted)
    stale = {"enabled": True, "max_staleness_steps": 2}
    own = {"trainer__algorithm__policy_loss_type": "decoupled", "trainer__policy__optimizer_config__lr": 1e-2}
    train(nano, tmp_path, **taught(teacher, "advantage", **own), trainer__fully_async=stale)
    assert max(row["async/staleness_max"] for row in metrics(tmp_path)[1:]) == 2
    moved = 0.0
    for batch, scores in learned:
        tensors = (batch.rollout_logprobs, batch.teacher_logprobs, batch.advantages)
        sampled, nu, gains = (batch.pick(tensor) for tensor in tensors if tensor is not None)
        torch.testing.assert_close(gains, nu - sampled, atol=1e-4, rtol=1e-4)
        moved = max(moved, float((sampled - batch.pick(scores)).abs().max()))
    assert moved > 0.1  # those of the update are others
    batch, _ = learned[-1]
    teachers = batch.teacher_logprobs
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    assert teachers is not None
    for ids, length, mask, nu in zip(batch.input_ids, batch.lengths, batch.loss_mask, teachers, strict=True):
        with torch.no_grad():
            logs = model(ids[None, : int(length)]).logits[0, :-1].log_softmax(-1)
        expected = logs.gather(-1, ids[1 : int(length), None])[:, 0]
        kept = mask[1 : int(length)]
        torch.testing.assert_close(nu[1 : int(length)][kept], expected[kept], atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("form", long_except(["advantage", "loss"], "loss"))
def test_a_resumed_run_with_a_teacher_goes_on_exactly(form: str, nano: Path, teacher: Path, tmp_path: Path) -> None:
    copied, uninterrupted, parts = tmp_path / "teacher", tmp_path / "whole", tmp_path / "parts"
    shutil.copytree(teacher, copied)
    own = taught(copied, form, trainer__algorithm__distillation__task_coef=1.0)
    train(nano, uninterrupted, trainer__max_training_steps=4, **own)
    for steps in (2, 4):
        train(nano, parts, trainer__max_training_steps=steps, **own)
    assert metrics(parts) == metrics(uninterrupted)
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(ResumeError, match=r"trainer.teacher.model.path: model.safetensors has changed"):
        train(nano, parts, trainer__max_training_steps=5, **own)


@pytest.mark.long
@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_a_run_with_a_teacher_that_is_killed_ends_like_one_that_was_not(
    form: str, nano: Path, teacher: Path, tmp_path: Path
) -> None:
    changes = taught(teacher, form)
    status, output = run(nano, tmp_path / "whole", **changes)
    assert status == 0, output
    for phase in ("forward", "optimizer", "sync", "writing"):
        status, output = run(nano, tmp_path / "killed", Fault(phase=phase, nth=3), **changes)
        assert status == -signal.SIGKILL, output
    status, output = run(nano, tmp_path / "killed", **changes)
    assert status == 0, output
    assert_same(tmp_path / "killed", tmp_path / "whole")
    assert_same_files(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_two_ranks_of_policy_and_teacher_learn_what_one_does(
    form: str, nano: Path, teacher: Path, tmp_path: Path
) -> None:
    short = {"trainer__max_training_steps": 2, "trainer__micro_train_batch_size_per_gpu": 3}
    for name, where in (("one", {}), ("two", ON_RAY)):
        status, output = run(nano, tmp_path / name, **taught(teacher, form, **short, **where))
        assert status == 0, output
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for metric in ("policy/final_loss", "policy/teacher_divergence", "loss/teacher_kl"):
            assert one.get(metric) == pytest.approx(two.get(metric), abs=1e-4)


def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_token_that_differs(
    nano: Path, teacher: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["surely"])
    tokenizer.save_pretrained(other)
    own, number = load_tokenizer(str(nano / "model")), len(tokenizer) - 1
    refuse_other_tokens(own, load_tokenizer(str(teacher)), policy="mine", teacher="big")
    with pytest.raises(ModelError, match=rf"1 tokens differ, such as 'surely', which is number {number} of big alone"):
        refuse_other_tokens(own, load_tokenizer(str(other)), policy="mine", teacher="big")
    with pytest.raises(ModelError, match="has another tokenizer than the policy"):
        train(nano, tmp_path, **taught(other, "loss"))


def test_the_teacher_takes_part_in_the_layout(nano: Path, teacher: Path, tmp_path: Path) -> None:
    run_config = config(
        nano, tmp_path, **taught(teacher, "advantage", **ON_RAY, trainer__micro_train_batch_size_per_gpu=3)
    )
    assert sizes_of(run_config).models["teacher"].ranks == 2
    assert run_config.generator.sampling_params.logprobs == 1

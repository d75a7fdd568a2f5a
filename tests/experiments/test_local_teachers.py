"""Several teachers in a run, each of a data source: what they say, and what the policy learns from them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl.batch import TrainingBatch
from skyrl.config import compose
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.estimates.memory import phases_of
from skyrl.errors import ConfigError, ModelError, ResumeError, UserError
from skyrl.training.teacher import TeachersBySource
from tests import supervised_run
from tests.experiments.forked import run
from tests.experiments.test_doctor import problems
from tests.experiments.test_served_teachers import FORMS, TEACHER_ALONE, made, two_sources
from tests.long_cases import long_except
from tests.nano_run import config, metrics, train

SOURCES = "trainer__teacher__sources"
WHOLE: dict[str, Any] = {"trainer__algorithm__distillation__type": "loss"}
OF_EACH: dict[str, dict[str, Any]] = {**FORMS, "whole": WHOLE}
ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
    "trainer__placement__teacher_num_gpus_per_node": 2,
    "trainer__micro_train_batch_size_per_gpu": 3,
}


@pytest.fixture(scope="module")
def teachers(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The teacher of each source, of two sizes."""
    folder = tmp_path_factory.mktemp("teachers")
    first, second = made(folder / "one", nano, 7, hidden_size=48), made(folder / "two", nano, 8, hidden_size=16)
    return {"first": first, "second": second}


def taught(teachers: dict[str, Path], nano: Path, out: Path, **changes: Any) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    sources = {source: str(path) for source, path in teachers.items()}
    return {**TEACHER_ALONE, SOURCES: sources, "data__train_data": [str(two_sources(nano, out))], **changes}


def scores(model: Path, batch: TrainingBatch) -> list[Tensor]:
    """Log-probabilities of the selected tokens of each row under a stored model."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logprobs = []
    for ids, length, mask in zip(batch.input_ids, batch.lengths.tolist(), batch.loss_mask, strict=True):
        with torch.no_grad():
            logs = loaded(ids[None, :length]).logits[0, :-1].log_softmax(-1)
        logprobs.append(logs.gather(-1, ids[1:length, None])[:, 0][mask[1:length]])
    return logprobs


def test_each_row_is_scored_by_the_teacher_of_its_source(
    nano: Path, teachers: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[TrainingBatch, Sequence[str], Tensor]] = []
    score = TeachersBySource.score

    async def noted(scorer: TeachersBySource, batch: TrainingBatch, sources: Sequence[str]) -> Tensor:
        logprobs = await score(scorer, batch, sources)
        seen.append((batch, sources, logprobs))
        return logprobs

    monkeypatch.setattr(TeachersBySource, "score", noted)
    train(nano, tmp_path, **taught(teachers, nano, tmp_path, trainer__max_training_steps=1))
    [(batch, sources, teacher_logprobs)] = seen
    assert set(sources) == {"first", "second"}
    expected = {source: scores(path, batch) for source, path in teachers.items()}
    for row, source in enumerate(sources):
        kept = teacher_logprobs[row][batch.loss_mask[row]]
        torch.testing.assert_close(kept, expected[source][row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", long_except(list(OF_EACH), "whole"))
def test_a_resumed_run_with_two_local_teachers_goes_on_exactly(
    form: str, nano: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    copied = {source: tmp_path / "teachers" / source for source in teachers}
    for source, path in teachers.items():
        shutil.copytree(path, copied[source])
    own = taught(copied, nano, tmp_path, **OF_EACH[form])
    train(nano, tmp_path / "whole", trainer__max_training_steps=4, **own)
    for steps in (2, 4):
        train(nano, tmp_path / "parts", trainer__max_training_steps=steps, **own)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    weights = copied["second"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(ResumeError, match=r"trainer.teacher.sources.second: model.safetensors has changed"):
        train(nano, tmp_path / "parts", trainer__max_training_steps=5, **own)


@pytest.mark.long
@pytest.mark.parametrize("form", list(OF_EACH))
def test_two_ranks_hold_two_teachers_and_learn_what_one_does(
    form: str, nano: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    for name, where in (("one", {}), ("two", ON_RAY)):
        own = taught(teachers, nano, tmp_path / name, trainer__max_training_steps=2, **OF_EACH[form], **where)
        status, output = run(nano, tmp_path / name, **own)
        assert status == 0, output
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for metric in ("policy/final_loss", "policy/teacher_divergence", "loss/teacher_kl"):
            assert one.get(metric) == pytest.approx(two.get(metric), abs=1e-4)


def test_a_source_without_a_teacher_and_other_tokens_are_named_at_the_start(
    nano: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    one_teacher = {"first": teachers["first"]}
    with pytest.raises(UserError, match="no teacher teaches the data source 'second': add it to trainer.teacher.sou"):
        train(nano, tmp_path / "one", **taught(one_teacher, nano, tmp_path))
    misspelt = {**teachers, "secnd": teachers["second"]}
    with pytest.raises(UserError, match="no row of the training data is of the data source 'secnd'.*'first', 'second'"):
        train(nano, tmp_path / "misspelt", **taught(misspelt, nano, tmp_path))
    other = tmp_path / "other"
    shutil.copytree(teachers["second"], other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["surely"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match="other has another tokenizer than the policy: 1 tokens differ, such as 'sure"):
        train(nano, tmp_path / "two", **taught({**teachers, "second": other}, nano, tmp_path))


@pytest.mark.parametrize("path", ["", "nowhere"])
def test_a_teacher_that_is_not_there_is_named_before_the_start(nano: Path, tmp_path: Path, path: str) -> None:
    changes = {"trainer.teacher.sources": {"arithmetic": path}, "trainer.algorithm.distillation.type": "loss"}
    errors = [problem for problem in problems(nano, tmp_path, changes, run=True) if problem.severity == "error"]
    assert [problem.path for problem in errors] == ["trainer.teacher.sources"]


def test_the_memory_estimate_counts_all_teachers(nano: Path, teachers: dict[str, Path], tmp_path: Path) -> None:
    def scoring(sources: dict[str, Path], role: str) -> int:
        phases = phases_of(config(nano, tmp_path, **taught(sources, nano, tmp_path, **WHOLE)))
        assert phases is not None
        return next(phase.parts["parameters"] for phase in phases if (phase.name, phase.role) == ("scoring", role))

    def size(model: Path, *, head: bool = False) -> int:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return 4 * (loaded.get_output_embeddings().weight.numel() if head else loaded.num_parameters())

    one_teacher, both = {"first": teachers["first"]}, teachers
    assert scoring(both, "teacher") - scoring(one_teacher, "teacher") == size(teachers["second"])
    gained = scoring(both, "policy") - scoring(one_teacher, "policy")
    assert gained == size(teachers["second"]) + size(teachers["second"], head=True)


@pytest.mark.parametrize(("path", "message"), [("", "is empty"), ("nowhere", "there is no model folder nowhere")])
def test_a_teacher_of_a_supervised_run_that_is_not_there_is_named(
    nano: Path, tmp_path: Path, path: str, message: str
) -> None:
    rows = supervised_run.write(tmp_path / "rows.jsonl", supervised_run.chats(8))
    changes = supervised_run.settings(nano, tmp_path, "sft", train_datasets=(rows,))
    with pytest.raises(ConfigError, match=message) as caught:
        compose([], {**changes, "distillation.teacher_path": path}, also=RunKind.preflight_checks)
    assert [problem.path for problem in caught.value.problems] == ["distillation.teacher_path"]

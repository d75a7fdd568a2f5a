"""Supervised runs with a teacher: distributions that rows store, and a model or a server beside the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from skyrl.cli.main import cli
from skyrl.config import SFTConfig, compose
from skyrl.data.stored_distributions import DistributionsFile
from skyrl.errors import ConfigError, DataError, UserError
from skyrl.experiments.sft import SFTExp
from skyrl.learners.schedule import make_optimizer
from tests.experiments.test_served_teachers import made, serving
from tests.nano_run import as_words, overrides
from tests.supervised_run import farthest, settings, train, weights

K = 6


@pytest.fixture(scope="module")
def teacher(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model than the student, with weights of its own."""
    return made(tmp_path_factory.mktemp("off-policy") / "teacher", nano, 7, sharpness=2, hidden_size=48)


@pytest.fixture(scope="module")
def rows(nano: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with the teacher's likeliest tokens, as `skyrl generate --top-logprobs` writes them."""
    folder = tmp_path_factory.mktemp("rows")
    experiment = SFTExp(compose([], settings(nano, folder, "sft"), SFTConfig).config)
    model: Any = AutoModelForCausalLM.from_pretrained(teacher)
    written: list[dict[str, object]] = []
    for number, row in enumerate(experiment.train_dataset.rows):
        logs = model(input_ids=torch.tensor([row.token_ids.tolist()])).logits[0, :-1].log_softmax(-1)
        top = logs[torch.from_numpy(row.loss_mask[1:])].topk(K)
        mask = row.loss_mask.astype(int).tolist()
        top_tokens = {"teacher_ids": top.indices.tolist(), "teacher_logprobs": top.values.tolist()}
        about = {"prompt_id": str(number), "sample": 0, "input_ids": row.token_ids.tolist(), "loss_mask": mask}
        written.append({**about, **top_tokens})
    with DistributionsFile(folder / "rows.parquet") as file:
        file.write(written[:20])
        file.write(written[20:])
    return folder / "rows.parquet"


def stored(rows: Path, **changes: Any) -> dict[str, Any]:
    return {
        "train_datasets": (str(rows),),
        "sampler": "sequential",
        "distillation__stored": True,
        "distillation__task_coef": 0.0,
        **changes,
    }


def with_tail(logs: torch.Tensor) -> torch.Tensor:
    return torch.cat([logs, (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=2**-23).log()], -1)


def test_a_run_on_stored_distributions_is_the_plain_loop_of_the_dense_formula(
    nano: Path, teacher: Path, rows: Path, tmp_path: Path
) -> None:
    records = train(nano, tmp_path, **stored(rows, num_epochs=1, distillation__beta=0.0, distillation__task_coef=0.5))
    model: Any = AutoModelForCausalLM.from_pretrained(nano / "model").eval()
    taught: Any = AutoModelForCausalLM.from_pretrained(teacher).eval()
    run = compose([], settings(nano, tmp_path, "sft"), SFTConfig).config
    optimizer = make_optimizer(model, run.optimizer_config)
    sequences = list(SFTExp(run).train_dataset.rows)
    divergences, nats = [], []
    for start in range(0, 32, 8):
        kl, cross, learned = torch.tensor(0.0), torch.tensor(0.0), 0
        for row in sequences[start : start + 8]:
            ids, mask = torch.tensor([row.token_ids.tolist()]), torch.from_numpy(row.loss_mask[1:])
            student_logprobs, teacher_logprobs = (
                network(input_ids=ids).logits[0, :-1].log_softmax(-1)[mask] for network in (model, taught)
            )
            top = teacher_logprobs.detach().topk(K)
            target, logs = with_tail(top.values), with_tail(student_logprobs.gather(-1, top.indices))
            kl = kl + (target.exp() * (target - logs)).sum()
            cross = cross - student_logprobs.gather(-1, ids[0, 1:][mask][:, None]).sum()
            learned += len(student_logprobs)
        ((kl + 0.5 * cross) / learned).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        divergences.append((kl / learned).item())
        nats.append((cross / learned).item())
    assert [record["train/distillation_loss"] for record in records[1:]] == pytest.approx(divergences, rel=1e-3)
    assert [record["train/loss"] for record in records[1:]] == pytest.approx(nats, rel=1e-3)
    assert divergences[-1] < 0.95 * divergences[0]
    assert farthest(weights(tmp_path), model.state_dict()) < 5e-4


def test_stored_local_and_served_teachers_give_the_same_numbers(
    nano: Path, teacher: Path, rows: Path, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"num_epochs": 1, "distillation__top_k": K, "distillation__min_logprob": -8.0}
    stored_settings = stored(rows, **common)
    live_settings = {**stored_settings, "distillation__stored": False}
    with serving(teacher) as url:
        runs = {
            "stored": stored_settings,
            "local": {**live_settings, "distillation__teacher_path": str(teacher)},
            "served": {**live_settings, "distillation__endpoint__url": url, "max_length": 32},
        }
        records = {name: train(nano, tmp_path / name, **changes) for name, changes in runs.items()}
    for metric in ("train/distillation_loss", "train/teacher_divergence", "train/loss"):
        expected = [record[metric] for record in records["stored"][1:]]
        for name in ("local", "served"):
            assert [record[metric] for record in records[name][1:]] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("changes", [{}, {"distillation__top_k": 3}], ids=["whole", "likely"])
def test_a_student_comes_nearer_to_a_teacher_beside_it_and_resumes_exactly(
    changes: dict[str, Any], nano: Path, teacher: Path, tmp_path: Path
) -> None:
    taught = {"distillation__teacher_path": str(teacher), "distillation__task_coef": 0.0, **changes}
    taught |= {"deterministic": True, "ckpt_interval": 4, "distillation__beta": 0.0}
    uninterrupted = train(nano, tmp_path / "whole", **taught)
    for epochs in (1, 2):
        train(nano, tmp_path / "parts", **taught, num_epochs=epochs)
    assert farthest(weights(tmp_path / "whole"), weights(tmp_path / "parts")) == 0
    divergences = [record["train/teacher_divergence"] for record in uninterrupted[1:]]
    assert sum(divergences[-2:]) < 0.95 * sum(divergences[:2])


def test_distributions_that_generate_writes_are_trained_on(nano: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [{"prompt": [{"role": "user", "content": letter}]} for letter in "ab"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"generator__eval_sampling_params__temperature": 1.0, "generator__eval_n_samples_per_prompt": 3}
    sampling = as_words(overrides(nano, tmp_path, **changes))
    arguments = ["generate", str(nano / "model"), *sampling, "--prompts", str(prompts), "--to", str(out)]
    result = CliRunner().invoke(cli, [*arguments, "--top-logprobs", str(K)])
    assert result.exception is None, result.exception
    assert f"their distributions in {out / 'distributions.parquet'}" in result.stdout
    records = train(nano, tmp_path, **stored(out / "distributions.parquet", batch_size=6, num_epochs=3))
    assert len(records) == 4
    assert records[1]["train/teacher_divergence"] == pytest.approx(0, abs=1e-5)  # the student is the teacher
    greedy = ["--top-logprobs", "2", "generator.eval_sampling_params.temperature=0"]
    refused = CliRunner().invoke(cli, [*arguments, *greedy])
    assert isinstance(refused.exception, ConfigError)
    assert "not the model's own" in str(refused.exception)
    many = CliRunner().invoke(cli, [*arguments, "--top-logprobs", "9999"])
    assert isinstance(many.exception, UserError) and "the tokenizer has" in str(many.exception)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_logprobs": None}, "needs tokenized rows with input_ids, teacher_ids and teacher_logprobs"),
        ({"teacher_ids": [[1, 2]]}, r"2 tokens are learned, teacher_ids has 1 lists of 2, and teacher_logprobs has 2"),
        ({"teacher_ids": [[1, 2], [1]]}, "not a list of equally long lists of numbers"),
        ({"teacher_ids": [[1, 2], [1, 10**6]]}, "teacher_ids go from 1 to 1000000, and the tokenizer has 0 to"),
        ({"teacher_logprobs": [[2.0, 1.0], [0.0, 0.0]]}, "no log-probabilities in nats: .* add up to 10.11"),
    ],
)
def test_stored_distributions_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, nano: Path, tmp_path: Path
) -> None:
    row = {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1], "teacher_ids": [[1, 2], [3, 4]]}
    row |= {"teacher_logprobs": [[-1.0, -2.0], [-0.5, -1.5]], **changes}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        train(nano, tmp_path, **stored(file, batch_size=1))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"stored": True, "teacher_path": "m"}, "distillation.teacher_path"),
        ({"stored": True, "temperature": 2.0}, "distillation.temperature"),
        ({"endpoint.url": "http://there:8000"}, "distillation.top_k"),
        ({"stored": True, "tail": False}, "distillation.tail"),
        ({"stored": True, "/strategy": "megatron", "/device": "cuda"}, "strategy"),
    ],
)
def test_teachers_that_cannot_be_learned_from_are_refused(changes: dict[str, Any], path: str) -> None:
    common = {"kind": "sft", "model.path": "m", "train_datasets": ["x.jsonl"]}
    written = {f"distillation.{name}".rpartition("/")[2]: value for name, value in changes.items()}
    with pytest.raises(ConfigError) as refused:
        compose([], {**common, **written})
    assert [problem.path for problem in refused.value.problems] == [path]

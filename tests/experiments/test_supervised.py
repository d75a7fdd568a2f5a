"""Supervised fine-tuning and reward models, run to the end in this process."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import cattrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from skyrl.cli.main import main
from skyrl.config import ConfigError, RewardModelConfig, SFTConfig, SkyRLTrainConfig, compose, load
from skyrl.errors import DataError, ResumeError, RunError
from skyrl.experiments import experiment
from skyrl.experiments.sft import SFTExp
from skyrl.learners.schedule import make_optimizer
from skyrl.models.saving.reward_model import RewardModel
from skyrl.runs import recovery
from skyrl.runs.stored_runs import checkpoints_of
from skyrl.runs.summary import summary
from skyrl.tools.exporting import export
from tests.long_cases import long_except
from tests.supervised_run import chats, farthest, pairs, records, settings, toml_file, train, weights, write


def test_the_loss_falls_on_the_rows_and_on_others(nano: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "held_out.jsonl", chats(16, seed=1))
    records = train(nano, tmp_path, eval_datasets=(held_out,), eval_interval="1 epoch", eval_before_train=True)
    assert [record["step"] for record in records] == list(range(9))
    assert records[8]["train/loss"] < records[1]["train/loss"] / 2
    before, after = records[0], records[8]
    assert after["eval/held_out/loss"] < before["eval/held_out/loss"] / 2
    assert after["eval/all/perplexity"] == pytest.approx(2.718281828 ** after["eval/all/loss"])


@pytest.mark.parametrize(
    "weights_of_rows", long_except([(1,), (0.25, 1, 3)], (0.25, 1, 3)), ids=["unweighted", "weighted"]
)
def test_a_run_is_the_plain_loop_of_pytorch(nano: Path, tmp_path: Path, weights_of_rows: tuple[float, ...]) -> None:
    weighted = list(zip(chats(32), weights_of_rows * 32, strict=False))
    for row, weight in weighted:
        row["messages"][-1]["weight"] = weight
    rows = (write(tmp_path / "weighted.jsonl", [row for row, _ in weighted]),)
    records = train(nano, tmp_path, sampler="sequential", num_epochs=1, train_datasets=rows)
    model: Any = AutoModelForCausalLM.from_pretrained(nano / "model").eval()
    run = load([], settings(nano, tmp_path, "sft")).config
    assert isinstance(run, SFTConfig)
    optimizer = make_optimizer(model, run.optimizer_config)
    tokenizer = SFTExp(compose([], settings(nano, tmp_path, "sft"), SFTConfig).config).tokenizer
    losses = []
    for start in range(0, 32, 8):
        nats, learned = torch.tensor(0.0), 0.0
        for row, weight in weighted[start : start + 8]:
            prompt, answer = (
                [*tokenizer.encode(message["content"]), tokenizer.eos_token_id] for message in row["messages"]
            )
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            nats = nats + weight * torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
            learned += weight * len(answer)
        (nats / learned).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((nats / learned).item())
    assert [record["train/loss"] for record in records[1:]] == pytest.approx(losses, rel=1e-4)
    assert farthest(weights(tmp_path), model.state_dict()) < 2e-4


@pytest.mark.long
def test_packing_and_micro_batches_change_nothing_but_rounding(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path / "rows", num_epochs=1, optimizer_config__lr=1e-3)
    other: dict[str, Any] = {"use_sequence_packing": False, "max_tokens_per_microbatch": 24}
    train(nano, tmp_path / "tokens", num_epochs=1, optimizer_config__lr=1e-3, **other)
    assert farthest(weights(tmp_path / "rows"), weights(tmp_path / "tokens")) < 2e-4


@pytest.mark.long
def test_packed_rows_have_the_loss_of_unpacked_ones_to_a_millionth(nano: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [{"input_ids": rng.choices(range(4, 30), k=rng.randint(2, 60))} for _ in range(64)]
    shared = {"train_datasets": (write(tmp_path / "rows.jsonl", rows),), "batch_size": 16, "num_epochs": 1}
    still: dict[str, Any] = {**shared, "optimizer_config__lr": 1e-12}
    layouts: dict[str, dict[str, Any]] = {
        "packed": {"max_tokens_per_microbatch": 128},
        "padded": {"use_sequence_packing": False, "micro_train_batch_size_per_gpu": 4},
        "single": {"use_sequence_packing": False, "micro_train_batch_size_per_gpu": 1},
    }
    records_by_layout = {name: train(nano, tmp_path / name, **still, **layout) for name, layout in layouts.items()}
    packed, *others = (
        [record["train/loss"] for record in run if "train/loss" in record] for run in records_by_layout.values()
    )
    assert len(packed) == 4 and all(losses == pytest.approx(packed, abs=1e-6) for losses in others)


@pytest.mark.long
def test_a_run_that_goes_on_is_one_that_was_never_interrupted(nano: Path, tmp_path: Path) -> None:
    uninterrupted = train(nano, tmp_path / "whole", deterministic=True)
    train(nano, tmp_path / "parts", deterministic=True, num_steps=3, ckpt_interval=2)
    records = train(nano, tmp_path / "parts", deterministic=True, ckpt_interval=2)
    assert [record["step"] for record in records] == list(range(9))
    assert [record.get("train/loss") for record in records] == [record.get("train/loss") for record in uninterrupted]
    assert farthest(weights(tmp_path / "whole"), weights(tmp_path / "parts")) == 0.0


@pytest.mark.long
def test_a_run_on_stored_rows_is_one_on_rows_in_memory_and_resumes_at_its_row(nano: Path, tmp_path: Path) -> None:
    uninterrupted = train(nano, tmp_path / "memory", deterministic=True)
    stored = str(tmp_path / "store")
    train(nano, tmp_path / "parts", deterministic=True, num_steps=3, ckpt_interval=3, tokenized_path=stored)
    records = train(nano, tmp_path / "parts", deterministic=True, ckpt_interval=3, tokenized_path=stored)
    assert [record.get("train/loss") for record in records] == [record.get("train/loss") for record in uninterrupted]


@pytest.mark.long
def test_a_schedule_that_ends_with_the_run_is_not_stretched_on_resume(nano: Path, tmp_path: Path) -> None:
    cosine: dict[str, Any] = {"optimizer_config__scheduler": "cosine", "ckpt_interval": 2}
    train(nano, tmp_path, num_steps=2, **cosine)
    with pytest.raises(ResumeError, match="had 2 steps when .* and has 4: .*resume_with_changes"):
        train(nano, tmp_path, num_steps=4, **cosine)
    records = train(nano, tmp_path, num_steps=4, resume_with_changes=True, **cosine)
    assert [record["step"] for record in records] == list(range(5))


class FailsOnce(SFTExp):
    """The sixth batch of the first try is lost."""

    def collate(self, rows: Any) -> Any:
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == 6 and not self.is_another_try:
            raise RunError("the batch is lost")
        return super().collate(rows)


@pytest.mark.long
def test_a_run_that_fails_begins_again_at_its_last_checkpoint_where_it_may(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = train(nano, tmp_path / "whole", deterministic=True)
    folder = tmp_path / "failing"
    folder.mkdir()
    values = settings(nano, folder, "sft", deterministic=True, ckpt_interval=2, recover_mode="auto", recover_retries=1)
    monkeypatch.setattr(recovery, "PAUSE", 0.0)
    monkeypatch.setattr(experiment, "experiment_class", lambda run: FailsOnce)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with pytest.raises(SystemExit, match="^0$"):
        main(["run", toml_file(folder / "run.toml", values)])
    assert [record.get("train/loss") for record in records(folder)] == [
        record.get("train/loss") for record in uninterrupted
    ]
    with pytest.raises(ConfigError, match="auto decides where the run begins, but resume_from = empty contradicts it"):
        compose([], {**values, "resume_from": ""})


def test_a_checkpoint_that_has_to_be_there_is_missed_in_the_words_of_its_own_tree(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ResumeError) as refused:
        train(nano, tmp_path, recover_mode="resume")
    assert str(refused.value).startswith("recover_mode = resume, but ") and "trainer." not in str(refused.value)


@pytest.mark.parametrize("kind", long_except(["sft", "reward_model"], "reward_model"))
def test_a_run_that_was_moved_is_exported_out_of_the_checkpoints_in_its_folder(
    nano: Path, tmp_path: Path, kind: str
) -> None:
    train(nano, tmp_path, kind, num_epochs=1, ckpt_interval=4)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert checkpoints_of(str(moved)) == str(moved / "checkpoints")
    assert export(moved) == (4, moved / "exports" / "global_step_4" / "model")
    exported, trained = (
        load_file(folder / "model.safetensors")
        for folder in (moved / "exports" / "global_step_4" / "model", moved / "model")
    )
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in exported)


def test_a_folder_of_another_run_is_refused_in_the_words_of_its_own_tree(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, num_epochs=1, ckpt_interval=4)
    with pytest.raises(ResumeError) as refused:
        train(nano, tmp_path, num_epochs=1, ckpt_interval=4, seed=7)
    assert "seed: 42 there, 7 here" in str(refused.value) and "trainer." not in str(refused.value)
    assert "run_path=" in str(refused.value)


def test_sources_are_mixed_by_weight_and_limits_end_the_run(nano: Path, tmp_path: Path) -> None:
    second = write(tmp_path / "second.jsonl", chats(8, seed=3))
    both = (write(tmp_path / "train.jsonl", chats(32)), second)
    records = train(nano, tmp_path, train_datasets=both, train_dataset_weights=(1, 1), max_training_samples=30)
    assert records[-1]["step"] == 3  # 30 rows are three batches of eight


def test_an_epoch_has_rows_of_each_source_by_its_weight(nano: Path, tmp_path: Path) -> None:
    short = write(tmp_path / "short.jsonl", [{"input_ids": [5, 6, 7, 8]}] * 8)
    long = write(tmp_path / "long.jsonl", [{"input_ids": [9] * 10}] * 24)
    mixed: dict[str, Any] = {"train_datasets": (short, long), "train_dataset_weights": (3, 1)}
    records = train(nano, tmp_path, num_epochs=1, **mixed)
    learned = sum(record["train/learned_tokens"] for record in records if record["step"])
    assert learned == 24 * 3 + 8 * 9  # 32 rows at 3 : 1; nothing predicts the first token of a row


@pytest.mark.long
def test_rows_that_are_tokenized_already_train_like_their_chats(nano: Path, tmp_path: Path) -> None:
    of_chats = train(nano, tmp_path / "chats", num_epochs=1)
    rows = SFTExp(compose([], settings(nano, tmp_path, "sft"), SFTConfig).config).train_dataset.rows
    tokenized = [
        {"input_ids": row.token_ids.tolist(), "labels": np.where(row.loss_mask, row.token_ids, -100).tolist()}
        for row in rows
    ]
    source = write(tmp_path / "tokenized.jsonl", tokenized)
    records = train(nano, tmp_path / "tokenized", num_epochs=1, train_datasets=(source,))
    both = ([record["train/loss"] for record in run[1:]] for run in (of_chats, records))
    assert next(both) == next(both)


def test_each_evaluation_set_has_the_loss_of_its_own_tokens(nano: Path, tmp_path: Path) -> None:
    """Those of a model that has not learned anything, which transformers computes, too."""
    first_set = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 9, 11, 30], "labels": [-100, -100, 11, 30]}]
    sets = {"one": first_set, "two": [{"input_ids": [40, 41]}]}
    sources = tuple(write(tmp_path / f"{name}.jsonl", rows) for name, rows in sets.items())
    named: dict[str, Any] = {"eval_datasets": sources, "eval_dataset_names": ("first", "second")}
    [record] = train(nano, tmp_path, num_epochs=0, eval_before_train=True, **named)
    model: Any = AutoModelForCausalLM.from_pretrained(nano / "model").eval()

    def nats(ids: list[int], learned: int) -> float:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -learned - 1 : -1]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-learned:]), reduction="sum").item()

    first, second = nats([5, 6, 7], 2) + nats([5, 9, 11, 30], 2), nats([40, 41], 1)
    assert record["eval/first/loss"] == pytest.approx(first / 4, abs=1e-5)
    assert record["eval/second/loss"] == pytest.approx(second, abs=1e-5)
    assert record["eval/all/loss"] == pytest.approx((first + second) / 5, abs=1e-5)
    assert record["eval/first/perplexity"] == pytest.approx(math.exp(first / 4), rel=1e-4)


def test_the_end_of_a_run_names_what_it_left_and_nothing_else(nano: Path, tmp_path: Path) -> None:
    values = settings(nano, tmp_path, "sft", num_epochs=1)
    run: Any = compose([], values).config
    experiment = SFTExp(run)
    experiment.run()
    *path_lines, next_command, losses = summary(run, experiment.folder)
    assert [line.split()[:-1] for line in path_lines] == [["configuration"], ["metrics"], ["trained", "model"]]
    assert losses.startswith("train/loss ") and losses.endswith(" at step 4")
    assert f"skyrl report {tmp_path / 'run'}" in next_command


def test_too_few_rows_are_told(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="batch_size = 64 rows, but the training data has 32"):
        train(nano, tmp_path, batch_size=64)


@pytest.mark.long
def test_a_reward_model_tells_better_from_worse_and_transformers_reads_it(nano: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "held_out.jsonl", pairs(32, seed=1))
    records = train(nano, tmp_path, "reward_model", eval_datasets=(held_out,), eval_interval=8, num_epochs=3)
    assert records[-1]["eval/all/accuracy"] > 0.9 and records[-1]["train/accuracy"] > 0.9
    assert records[-1]["train/loss"] < records[1]["train/loss"] / 2
    folder = str(tmp_path / "run" / "model")
    model, classifier = RewardModel(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    chats = [[{"role": "user", "content": "abc"}, {"role": "assistant", "content": answer}] for answer in ("zxy", "mo")]
    better, worse = scores = model.scores(chats)
    assert better > worse
    found_there = [classifier(input_ids=torch.tensor([model.tokens(chat)])).logits.item() for chat in chats]
    assert scores == pytest.approx(found_there, abs=1e-5)


@pytest.mark.long
def test_pairs_stay_whole_in_every_layout(nano: Path, tmp_path: Path) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "plain": {},
        "cut": {"max_tokens_per_microbatch": 12},
        "padded": {"use_sequence_packing": False},
    }
    plain, cut, padded = (
        [record["train/loss"] for record in train(nano, tmp_path / name, "reward_model", num_epochs=1, **changes)[1:]]
        for name, changes in layouts.items()
    )
    assert cut == pytest.approx(plain, rel=1e-3)
    assert padded == pytest.approx(plain, rel=1e-3)


def test_kind_chooses_the_tree(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('kind = "reward_model"\nbatch_size = 6\n', encoding="utf-8")
    loaded: Any = load([str(file)]).config
    assert isinstance(loaded, RewardModelConfig) and loaded.batch_size == 6
    assert isinstance(load([], {"kind": "sft"}).config, SFTConfig)
    assert type(load([]).config) is SkyRLTrainConfig
    assert cattrs.structure(cattrs.unstructure(loaded), RewardModelConfig) == loaded
    with pytest.raises(ConfigError, match="'sfx' is not one of: rl, sft, reward_model, preference"):
        load([], ["kind=sfx"])


def test_everything_that_is_wrong_with_a_supervised_tree_is_told_at_once() -> None:
    wrong = {
        "kind": "sft",
        "batch_size": 3,
        "placement.num_gpus_per_node": 2,
        "eval_interval": 5,
        "chat_template.name_or_path": "qwen",
        "train_dataset_weights": (1.0,),
        "optimizer_config.num_warmup_steps": 3,
        "optimizer_config.warmup_steps_proportion": 0.1,
        "faults.on_non_finite": "roll_back",
    }
    with pytest.raises(ConfigError) as refused:
        compose([], wrong)
    paths = {problem.path for problem in refused.value.problems if problem.severity == "error"}
    assert paths == {
        "model.path",
        "train_datasets",
        "eval_datasets",
        "chat_template.name_or_path",
        "train_dataset_weights",
        "batch_size",
        "optimizer_config.warmup_steps_proportion",
        "faults.on_non_finite",
    }


def test_empty_answers_are_reported(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q", "chosen": "", "rejected": "n"}] * 8
    source = write(tmp_path / "rows.jsonl", rows)
    train(nano, tmp_path, "preference", num_epochs=0, train_datasets=(source,))
    assert "8 answers in training rows are empty: they teach to end at once" in capsys.readouterr().err
    unasked = write(tmp_path / "unasked.jsonl", [{**row, "prompt": "", "chosen": "y"} for row in rows])
    train(nano, tmp_path / "unasked", "preference", num_epochs=0, train_datasets=(unasked,))
    stderr = capsys.readouterr().err
    assert "8 prompts in training rows are empty: nothing is asked" in stderr and "teach to end" not in stderr


def test_rows_that_are_left_out_are_reported_before_anything_is_learned(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": [5, 6, 7]}] * 10 + [{"input_ids": [5] * 30}]
    source = write(tmp_path / "rows.jsonl", rows)
    train(nano, tmp_path, num_epochs=0, max_length=20, train_datasets=(source,))
    stderr = capsys.readouterr().err
    assert "1 training rows are longer than 20 tokens and left out" in stderr
    assert "2 training rows do not fill a batch and are left out of each epoch" in stderr
    train(nano, tmp_path / "carry", num_epochs=0, max_length=20, train_datasets=(source,), epoch_tail="carry")
    assert "do not fill a batch" not in capsys.readouterr().err

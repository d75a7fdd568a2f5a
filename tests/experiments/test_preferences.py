"""Preference runs, to the end in this process."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from skyrl.batch import TrainingBatch
from skyrl.cli.main import cli
from skyrl.config import ConfigError, compose
from skyrl.config.derive.run_kind import RunKind
from skyrl.experiments.preference import PreferenceExp
from skyrl.learners.row_layouts import packed
from skyrl.learners.workers.preference_roles import PairReferenceWorker
from skyrl.tools.evaluating import OF_ALL_LABELS, OF_ALL_PAIRS
from skyrl.training.collate import mismatched
from tests.supervised_run import farthest, pairs, settings, train, weights, write

WHOLE_BATCH = ["aot", "aot_unpaired", "sft"]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["train/loss"] for record in records if record["step"]]


def test_a_policy_learns_which_answers_are_better_and_is_measured_on_others(nano: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "held_out.jsonl", pairs(32, seed=1))
    evaluated = {"eval_datasets": (held_out,), "eval_interval": 8, "eval_before_train": True, "beta": 0.5}
    records = train(nano, tmp_path, "preference", **evaluated, num_epochs=3)
    before, first, after = records[0], records[1], records[-1]
    assert before["eval/all/loss"] == pytest.approx(0.6931, abs=1e-4) and before["eval/all/kl"] == 0.0
    assert first["train/margin"] == 0.0 and first["train/chosen_reward"] == first["train/rejected_reward"] == 0.0
    assert after["eval/all/accuracy"] > 0.9 and after["eval/all/loss"] < 0.5 and after["eval/all/kl"] > 0
    assert after["eval/all/margin"] == pytest.approx(
        after["eval/all/chosen_reward"] - after["eval/all/rejected_reward"], abs=1e-4
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "changes",
    [
        {"micro_train_batch_size_per_gpu": 1},
        {"use_sequence_packing": False},
        {"max_tokens_per_microbatch": 20},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("loss_type", [["sigmoid", "sigmoid_norm"], WHOLE_BATCH], ids="+".join)
def test_the_cut_of_a_batch_changes_nothing(
    nano: Path, tmp_path: Path, loss_type: list[str], changes: dict[str, Any]
) -> None:
    run: dict[str, Any] = {"loss_type": loss_type, "num_steps": 2, "beta": 0.5}
    run |= {"optimizer_config.optimizer": "sgd", "optimizer_config.lr": 0.1}
    full_batch = train(nano, tmp_path / "whole", "preference", **run, micro_train_batch_size_per_gpu=8)
    cut = train(nano, tmp_path / "cut", "preference", **run, **changes)
    assert losses(cut) == pytest.approx(losses(full_batch), rel=1e-6)
    assert farthest(weights(tmp_path / "whole"), weights(tmp_path / "cut")) < 1e-6


@pytest.mark.long
def test_an_answer_that_begins_or_is_empty_like_the_other_is_cut_like_any(nano: Path, tmp_path: Path) -> None:
    answers = [("xy", "xyz"), ("", "x"), ("zx", "zy"), ("xyzx", "x")]
    rows = [{"prompt": "abc"[:index], "chosen": one, "rejected": other} for index, (one, other) in enumerate(answers)]
    run: dict[str, Any] = {"train_datasets": (write(tmp_path / "rows.jsonl", rows),), "batch_size": 4, "num_steps": 2}
    run |= {"loss_type": ["sigmoid", "ipo", "sft"], "micro_train_batch_size_per_gpu": 4}
    full_batch = train(nano, tmp_path / "whole", "preference", **run)
    variants: dict[str, dict[str, Any]] = {
        "rows": {"use_sequence_packing": False},
        "one": {"micro_train_batch_size_per_gpu": 1},
    }
    for name, variant in variants.items():
        cut = train(nano, tmp_path / name, "preference", **{**run, **variant})
        assert losses(cut) == pytest.approx(losses(full_batch), rel=1e-5), name


@pytest.mark.long
@pytest.mark.parametrize("lora", [0, 4], ids=["all weights", "adapter"])
def test_every_way_to_a_reference_gives_the_same_numbers(nano: Path, tmp_path: Path, lora: int) -> None:
    """Frozen ranks, the policy without its adapter, and stored log-probabilities."""
    variants: dict[str, dict[str, Any]] = {
        "default": {},
        "named": {"ref_model_path": str(nano / "model")},
        "stored": {"precompute_ref_log_probs": True, "ref_log_probs_path": str(tmp_path / "stored")},
        "stored before": {"precompute_ref_log_probs": True, "ref_log_probs_path": str(tmp_path / "stored")},
    }
    losses_by_variant = {
        name: losses(train(nano, tmp_path / name, "preference", num_steps=3, model__lora__rank=lora, **variant))
        for name, variant in variants.items()
    }
    assert losses_by_variant["default"][-1] < 0.69
    for name, numbers in losses_by_variant.items():
        assert numbers == pytest.approx(losses_by_variant["default"], abs=1e-6), name


@pytest.mark.long
def test_stored_log_probabilities_are_computed_once(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = write(tmp_path / "held_out.jsonl", pairs(8, seed=1))
    run_settings = {"precompute_ref_log_probs": True, "ref_log_probs_path": str(tmp_path / "stored"), "num_steps": 1}
    run_settings |= {"eval_datasets": (held_out,), "eval_before_train": True}
    train(nano, tmp_path / "one", "preference", **run_settings)
    stderr = capsys.readouterr().err
    assert "of the reference for 32 training pairs, once" in stderr and "for 8 held_out pairs, once" in stderr
    train(nano, tmp_path / "two", "preference", **run_settings)
    assert "of the reference" not in capsys.readouterr().err
    assert len(list((tmp_path / "stored").iterdir())) == 2
    without_eval = {**run_settings, "eval_datasets": (), "eval_before_train": False}
    trained = tmp_path / "one" / "run" / "model"
    train(nano, tmp_path / "three", "preference", **without_eval, ref_model_path=str(trained))
    assert "for 32 training pairs, once" in capsys.readouterr().err
    base = copytree(nano / "model", tmp_path / "base")
    train(nano, tmp_path / "four", "preference", **without_eval, model__path=str(base))
    capsys.readouterr()
    copytree(trained, base, dirs_exist_ok=True)
    records = train(nano, tmp_path / "five", "preference", **without_eval, model__path=str(base))
    assert "for 32 training pairs, once" in capsys.readouterr().err
    assert losses(records) == pytest.approx([0.693147], abs=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss_type", [["simpo"], ["orpo", "sft"]], ids="+".join)
def test_losses_without_a_reference_load_none(nano: Path, tmp_path: Path, loss_type: list[str]) -> None:
    records = train(nano, tmp_path, "preference", loss_type=loss_type, beta=1.0, simpo_gamma=0.1)
    assert losses(records)[-1] < losses(records)[0]
    assert "train/kl" not in records[-1] and "timing/ref_logprobs" not in records[-1]


@pytest.mark.long
@pytest.mark.parametrize("variant", [{}, {"model__lora__rank": 4}, {"loss_type": ["kto"]}], ids=str)
def test_a_run_is_evaluated_alone_as_it_was_while_it_trained(
    nano: Path, tmp_path: Path, variant: dict[str, Any]
) -> None:
    rows = [*labelled(32, seed=1)[:10], *labelled(32, seed=1)[10::2]] if "loss_type" in variant else pairs(16, seed=1)
    held_out = write(tmp_path / "held_out.jsonl", rows)  # of single answers, 16 good ones and 5 bad ones
    variant = {"num_steps": 4, "ckpt_interval": 2, **variant}
    if "loss_type" in variant:
        variant["train_datasets"] = (write(tmp_path / "labelled.jsonl", labelled(32)),)
    records = train(nano, tmp_path, "preference", **variant, eval_datasets=(held_out,), eval_interval=2)
    for step, words in ((4, []), (2, ["--step", "2"])):
        result = CliRunner().invoke(cli, ["eval", str(tmp_path / "run"), *words, "--json"])
        assert result.exit_code == 0, result.output
        results = json.loads(result.stdout)["result"]
        expected = {name: value for name, value in records[step].items() if name.startswith("eval/")}
        assert results["metrics"] == pytest.approx(expected, abs=1e-4)
        low, high = results["intervals"]["eval/held_out/accuracy"]
        assert low <= results["metrics"]["eval/held_out/accuracy"] <= high and results["pairs"]["all"] == len(rows)
        of_all = OF_ALL_LABELS if "loss_type" in variant else OF_ALL_PAIRS
        measured = {name for name in expected if not name.endswith(of_all)}
        assert results["intervals"].keys() == measured
        for name in measured:
            low, high = results["intervals"][name]
            assert low <= results["metrics"][name] <= high, name


@pytest.mark.long
def test_a_run_whose_reference_has_changed_is_not_evaluated_beside_it(nano: Path, tmp_path: Path) -> None:
    base = copytree(nano / "model", tmp_path / "base")
    held_out = write(tmp_path / "held_out.jsonl", pairs(8, seed=1))
    run_settings = {"model__path": str(base), "num_steps": 1, "ckpt_interval": 1, "eval_datasets": (held_out,)}
    train(nano, tmp_path, "preference", **run_settings)
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(base)
    for words, message in (
        ([], "model.path: model.safetensors has changed"),
        ([f"ref_model_path={nano / 'model'}"], ""),
    ):
        result = CliRunner().invoke(cli, ["eval", str(tmp_path / "run"), *words])
        assert message in str(result.exception) and (result.exit_code == 0) == (not message), result.output


def rankings(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Three or four answers, of which the more letters of x, y, z the better."""
    rows = [*pairs(count, seed), *pairs(count, seed + 100)]
    lists = [{"answers": [rows[i]["rejected"], "xm" + "o" * (i % 3), rows[i]["chosen"]]} for i in range(count)]
    ranks = [[3, 2, 1] for _ in lists]
    for own, order, other in zip(lists[::2], ranks[::2], rows[count::2], strict=True):
        own["answers"].append(other["rejected"] + "mm")
        order.append(4)
    named = zip(rows, lists, ranks, strict=False)
    return [{"prompt": row["prompt"], **own, "ranks": order} for row, own, order in named]


LISTS: dict[str, Any] = {"loss_type": ["plackett_luce", "hinge"], "num_answers": 4, "beta": 0.5}


@pytest.mark.long
def test_a_policy_learns_rankings_however_they_are_cut(nano: Path, tmp_path: Path) -> None:
    rows, held_out = (write(tmp_path / f"{seed}.jsonl", rankings(32, seed)) for seed in (0, 1))
    run = {**LISTS, "train_datasets": (rows,), "eval_datasets": (held_out,), "eval_interval": 8, "num_epochs": 2}
    full_batch = train(nano, tmp_path / "whole", "preference", **run, micro_train_batch_size_per_gpu=8)
    assert full_batch[-1]["eval/all/accuracy"] > 0.75 and losses(full_batch)[-1] < 0.9 * losses(full_batch)[0]
    variants: tuple[dict[str, Any], ...] = (
        {"use_sequence_packing": False, "micro_train_batch_size_per_gpu": 1},
        {"max_tokens_per_microbatch": 60, "precompute_ref_log_probs": True, "tokenized_path": str(tmp_path / "store")},
    )
    for number, variant in enumerate(variants):
        cut = train(nano, tmp_path / str(number), "preference", **run, **variant)
        assert losses(cut) == pytest.approx(losses(full_batch), rel=1e-5)
        assert cut[-1]["eval/all/margin"] == pytest.approx(full_batch[-1]["eval/all/margin"], rel=1e-3)


def test_the_prompt_of_a_list_is_shared_and_short_lists_are_filled(nano: Path, tmp_path: Path) -> None:
    run: Any = compose([], settings(nano, tmp_path, "preference", **LISTS)).config
    experiment = PreferenceExp(run)
    rows = experiment.load((write(tmp_path / "rows.jsonl", rankings(2)),)).rows
    batch: TrainingBatch = experiment.collate(rows)
    assert batch.answer_lengths is not None
    assert batch.loss_mask.any(1).tolist() == [True] * 7 + [False]
    segments = packed(batch, segmented=True, share_prompts=True).inputs["segments"]
    assert segments.sizes == [4, 5, 3, 6, 8, 4, 4, 4, 5, 1]  # each prompt, then its answers


@pytest.mark.long
def test_pairs_are_weighted_by_the_policys_own_probabilities(nano: Path, tmp_path: Path) -> None:
    run = {"use_weighting": True, "num_steps": 1}
    records = train(nano, tmp_path, "preference", **run)
    variants: dict[str, dict[str, Any]] = {
        "one": {"micro_train_batch_size_per_gpu": 1},
        "rows": {"use_sequence_packing": False},
    }
    for name, variant in variants.items():
        other = train(nano, tmp_path / name, "preference", **run, **variant)
        for number in ("train/loss", "train/weight", "train/grad_norm"):
            assert other[-1][number] == pytest.approx(records[-1][number], rel=1e-5), name
    config: Any = compose([], settings(nano, tmp_path, "preference", **run)).config
    experiment = PreferenceExp(config)
    batch: TrainingBatch = experiment.collate(experiment.get_cursor().take())
    model = AutoModelForCausalLM.from_pretrained(nano / "model")
    with torch.no_grad():
        logs = model(input_ids=batch.input_ids).logits[:, :-1].log_softmax(-1)
    own = logs.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1) - (2 * logs).logsumexp(-1)
    mask = batch.loss_mask[:, 1:]
    weights = ((own * mask).sum(1) / mask.sum(1)).view(-1, 2).sum(1).exp()
    assert records[-1]["train/weight"] == pytest.approx(weights.mean().item(), rel=1e-4)
    assert records[-1]["train/loss"] == pytest.approx(0.693147 * weights.mean().item(), rel=1e-4)


MOVING: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 2, "num_steps": 5, "ckpt_interval": 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lora", [0, 4], ids=["all weights", "adapter"])
def test_the_reference_becomes_the_policy_every_few_steps(nano: Path, tmp_path: Path, lora: int) -> None:
    run_settings = {**MOVING, "ref_model_mixup_alpha": 1.0, "model__lora__rank": lora}
    records = [record for record in train(nano, tmp_path, "preference", **run_settings) if record["step"]]
    equal = [record["train/loss"] == pytest.approx(0.693147, abs=1e-5) for record in records]
    assert equal == [True, False, True, False, True]
    assert ["timing/update_ref_with_policy" in record for record in records] == [False, True, False, True, False]


@pytest.mark.long
def test_a_run_with_a_moving_reference_goes_on_bit_for_bit(nano: Path, tmp_path: Path) -> None:
    uninterrupted = train(nano, tmp_path / "whole", "preference", **MOVING)
    train(nano, tmp_path / "parts", "preference", **{**MOVING, "num_steps": 3})
    parts = train(nano, tmp_path / "parts", "preference", **MOVING)
    assert losses(parts) == losses(uninterrupted)
    assert farthest(weights(tmp_path / "whole"), weights(tmp_path / "parts")) == 0


def test_weights_are_mixed_into_the_reference_in_the_share_that_is_set(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, "preference", num_steps=2)
    config: Any = compose([], settings(nano, tmp_path, "preference")).config
    reference = PairReferenceWorker(config)
    before = {name: weight.clone() for name, weight in reference.strategy.shards(optimizer=False)}
    trained = weights(tmp_path)

    class Trained:
        @property
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {name: tuple(trained[name.removeprefix("model.")].shape) for name in before}

        def read(self, name: str, start: int = 0, count: int | None = None) -> torch.Tensor:
            flat = trained[name.removeprefix("model.")].flatten()[start:]
            return flat if count is None else flat[:count]

    reference.mix(Trained(), 0.6)
    for name, weight in reference.strategy.shards(optimizer=False):
        expected = 0.6 * trained[name.removeprefix("model.")] + 0.4 * before[name]
        torch.testing.assert_close(weight, expected)


def test_a_loss_of_ones_own_trains(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "from torch.nn.functional import logsigmoid\n\n\n"
        "def own(pairs, settings):\n"
        "    return -logsigmoid(settings.beta * (pairs.a - pairs.b))\n"
    )
    own = train(nano, tmp_path / "own", "preference", loss_type=[f"{file}:own"], num_steps=3)
    assert losses(own) == pytest.approx(losses(train(nano, tmp_path / "dpo", "preference", num_steps=3)), rel=1e-6)


def labelled(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Both answers of the pairs, each by itself."""
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs(count // 2, seed)
        for side in ("chosen", "rejected")
    ]


@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_a_policy_learns_from_single_answers_with_labels(nano: Path, tmp_path: Path, loss_type: str) -> None:
    rows, held_out = (write(tmp_path / f"{seed}.jsonl", labelled(32, seed)) for seed in (0, 1))
    run_settings = {"loss_type": [loss_type], "train_datasets": (rows,), "beta": 0.5, "num_epochs": 3}
    records = train(nano, tmp_path, "preference", **run_settings, eval_datasets=(held_out,), eval_interval=8)
    after = records[-1]
    assert losses(records)[0] == pytest.approx(0.5, abs=1e-6) and losses(records)[-1] < 0.4
    assert after["eval/all/accuracy"] > 0.8 and after["eval/all/chosen_reward"] > after["eval/all/rejected_reward"]
    assert (after["train/baseline"] >= 0) and (loss_type == "kto" or after["train/baseline"] == 0)


def test_a_prompt_is_paired_with_the_answer_of_the_row_before(nano: Path, tmp_path: Path) -> None:
    run: Any = compose([], settings(nano, tmp_path, "preference", loss_type=["kto"])).config
    experiment = PreferenceExp(run)
    file = write(tmp_path / "three.jsonl", [{**row, "prompt": "abc"[: 1 + i]} for i, row in enumerate(labelled(6)[:3])])
    rows = experiment.load((file,)).rows
    batch = experiment.collate(rows)
    others = mismatched(batch, 1000)
    for index, row in enumerate(rows):
        before = rows[index - 1]
        expected = [*row.token_ids[~row.mask], *before.token_ids[before.mask]]
        length = int(others.lengths[index])
        assert others.input_ids[index, :length].tolist() == expected
        assert int(others.loss_mask[index].sum()) == before.answer_tokens
    assert mismatched(batch, 4).lengths.tolist() == [4, 4, 4]


def test_a_reference_that_is_not_there_is_told_before_the_start(nano: Path, tmp_path: Path) -> None:
    values = settings(nano, tmp_path, "preference", ref_model_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="ref_model_path .*there is no model folder"):
        compose([], values, also=RunKind.preflight_checks)


def test_a_pair_that_is_too_long_is_left_out_and_told(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*pairs(16), {"prompt": "abc", "chosen": "xy", "rejected": "m" * 40}]
    train(nano, tmp_path, "preference", train_datasets=(write(tmp_path / "rows.jsonl", rows),), max_length=20)
    assert "1 training rows are longer than 20 tokens and left out" in capsys.readouterr().err


def test_the_prompt_of_a_pair_is_shared_up_to_the_answers(nano: Path, tmp_path: Path) -> None:
    run: Any = compose([], settings(nano, tmp_path, "preference")).config
    experiment = PreferenceExp(run)
    rows = [{"prompt": "abcabc", "chosen": "xyz", "rejected": "xzz"}, {"prompt": "a", "chosen": "x", "rejected": "m"}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    batch: TrainingBatch = experiment.collate(experiment.load((str(tmp_path / "two.jsonl"),)).rows)
    assert batch.answer_lengths is not None
    prompts = (batch.lengths - batch.answer_lengths).tolist()
    first = [int(mask.int().argmax()) for mask in batch.loss_mask]
    assert prompts == first and prompts[0] == prompts[1] > prompts[2] == prompts[3] > 0
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert torch.equal(batch.loss_mask.sum(1), batch.answer_lengths)

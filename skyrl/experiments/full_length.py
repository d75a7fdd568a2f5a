"""Runs of made-up steps (`num_dummy_steps`), which test whether batches of the longest rows fit before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any, TypeVar

import numpy as np

from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.derive.every_kind import folder_of
from skyrl.config.derive.sizes import longest_row
from skyrl.config.settings.run_basics import RunBasics
from skyrl.data.supervised_rows import Tally, TokenizedRows
from skyrl.data.tokenized_rows import LabelledRow, PreferenceRow, RankedRow, SupervisedRow
from skyrl.rollout.batches import FullLengthRollouts
from skyrl.tree import evolve_at

FOLDER = "full_length"
"""Folder of such a run, below that of the run itself, which stays free for training."""

S = TypeVar("S", bound=SupervisedConfig)


def probe_run(run: SkyRLTrainConfig) -> SkyRLTrainConfig:
    """A copy of the run without evaluation, checkpoints and exports, which resumes nothing and has its own folder."""
    changes = _traceless(run.trainer) | {
        "resume_mode": "none",
        "recover_mode": None,
        "recording": "off",
        "samples_per_step_kept": 1,
    }
    for name, value in changes.items():
        run = evolve_at(run, f"trainer.{name}", value)
    return run


def supervised_without_traces(run: S) -> S:
    """A copy of the run without data, evaluation, checkpoints and exports; it resumes nothing and has a new folder."""
    changes = _traceless(run.trainer) | {
        **dict.fromkeys(("train_dataset_weights", "eval_dataset_names", "tokenized_path", "recover_mode"), None),
        **dict.fromkeys(("train_datasets", "eval_datasets"), ()),
        "resume_from": "",
    }
    for name, value in changes.items():
        run = evolve_at(run, name, value)
    return run


def _traceless(trainer: RunBasics) -> dict[str, Any]:
    """Values of fields that every kind of run has."""
    folder = f"{folder_of(trainer)}/{FOLDER}"
    return {
        **dict.fromkeys(("eval_interval", "ckpt_interval", "hf_save_interval"), -1),
        "eval_before_train": False,
        "callbacks": (),
        "run_path": folder,
        "ckpt_path": f"{folder}/checkpoints",
        "export_path": f"{folder}/exports",
    }


def full_length_rollouts(run: SkyRLTrainConfig, vocabulary: int) -> FullLengthRollouts:
    """Batches of the run's size, with rows of the run's maximum length."""
    prompt, answer = longest_row(run)
    return FullLengthRollouts(
        prompts=run.trainer.train_batch_size,
        samples=run.generator.n_samples_per_prompt,
        prompt_tokens=prompt,
        answer_tokens=answer,
        vocabulary=vocabulary,
        has_logprobs=run.generator.sampling_params.logprobs is not None,
        seed=run.trainer.seed,
    )


def synthetic_sequences(run: SupervisedConfig, tokens: int, vocabulary: int) -> TokenizedRows[SupervisedRow]:
    """One batch of random rows of `tokens` tokens below `vocabulary`, all of which but the first are learned."""
    random = np.random.default_rng(run.seed)
    weights = np.ones(tokens, dtype=np.float32)
    weights[0] = 0  # nothing predicts the first token
    rows = (
        SupervisedRow(id=f"made up {number}", token_ids=random.integers(vocabulary, size=tokens), weights=weights)
        for number in range(run.batch_size)
    )
    return TokenizedRows(rows=tuple(rows), tally=Tally(sizes=[run.batch_size]))


def synthetic_pairs(run: SupervisedConfig, tokens: int, vocabulary: int) -> TokenizedRows[PreferenceRow]:
    """One batch of pairs of random rows of `tokens` tokens below `vocabulary`, without a common prefix."""
    random = np.random.default_rng(run.seed)
    ids = random.integers(vocabulary, size=(run.batch_size, 2, tokens))
    rows = (
        PreferenceRow(id=f"made up {number}", chosen=chosen, rejected=rejected)
        for number, (chosen, rejected) in enumerate(ids)
    )
    return TokenizedRows(rows=tuple(rows), tally=Tally(sizes=[run.batch_size]))


def synthetic_answers(run: SupervisedConfig, tokens: int, vocabulary: int) -> TokenizedRows[RankedRow]:
    """One batch of lists of random answers of `tokens` tokens below `vocabulary`, of which the first is a prompt."""
    answer = np.arange(tokens) > 0
    ids = np.random.default_rng(run.seed).integers(vocabulary, size=(run.batch_size, run.rows_of_an_item, tokens))
    rows = (
        RankedRow(id=f"made up {number}", sides=tuple((entry, answer) for entry in item))
        for number, item in enumerate(ids)
    )
    return TokenizedRows(rows=tuple(rows), tally=Tally(sizes=[run.batch_size]))


def synthetic_labelled(run: SupervisedConfig, tokens: int, vocabulary: int) -> TokenizedRows[LabelledRow]:
    """One batch of answers as of `synthetic_sequences`, every other one labelled as good."""
    sequences = synthetic_sequences(run, tokens, vocabulary)
    rows = (
        LabelledRow(id=row.id, token_ids=row.token_ids, mask=row.loss_mask, label=bool(number % 2))
        for number, row in enumerate(sequences.rows)
    )
    return TokenizedRows(rows=tuple(rows), tally=sequences.tally)


def fit_report(run: SkyRLTrainConfig, records: Iterable[Mapping[str, Any]]) -> str:
    """Sentence about finished made-up steps: that they fit, and how long they took."""
    prompt, answer = longest_row(run)
    samples = run.trainer.train_batch_size * run.generator.n_samples_per_prompt
    rows, steps = f"{samples:,} samples of {prompt:,} + {answer:,} tokens", run.trainer.num_dummy_steps
    return _fit_report(steps, rows, records, " without sampling", "trainer.num_dummy_steps")


def supervised_fit_report(run: SupervisedConfig, tokens: int, records: Iterable[Mapping[str, Any]]) -> str:
    """The same sentence about a supervised run with rows of `tokens` tokens."""
    rows = f"{run.batch_size * run.rows_of_an_item:,} rows of {tokens:,} tokens"
    return _fit_report(run.num_dummy_steps, rows, records, "", "num_dummy_steps")


def _fit_report(steps: int, rows: str, records: Iterable[Mapping[str, Any]], without: str, field: str) -> str:
    seconds = mean(record["timing/step"] for record in records if "timing/step" in record)
    return (
        f"{steps} made-up step{'s' * (steps != 1)} of {rows} fit, in {seconds:.1f} s each{without}. "
        f"Nothing was trained or kept: set {field} = 0 to train."
    )

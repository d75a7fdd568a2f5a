"""Supervised runs of made-up steps (`num_dummy_steps`), which test whether batches of the longest rows fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any, TypeVar

import numpy as np

from skyrl.config import SupervisedConfig
from skyrl.config.derive.every_kind import folder_of
from skyrl.data.supervised_rows import Rows, Tally
from skyrl.data.tokenized_rows import PreferenceRow, SupervisedRow
from skyrl.experiments.full_length import FOLDER
from skyrl.tree import evolve_at

S = TypeVar("S", bound=SupervisedConfig)


def without_traces(run: S) -> S:
    """A copy of the run without data, evaluation, checkpoints and exports; it resumes nothing and has a new folder."""
    folder = f"{folder_of(run.trainer)}/{FOLDER}"
    changes: dict[str, Any] = {
        **dict.fromkeys(("eval_interval", "ckpt_interval", "hf_save_interval"), -1),
        **dict.fromkeys(("train_dataset_weights", "eval_dataset_names", "tokenized_path", "recover_mode"), None),
        **dict.fromkeys(("train_datasets", "eval_datasets"), ()),
        "eval_before_train": False,
        "resume_from": "",
        "run_path": folder,
        "ckpt_path": f"{folder}/checkpoints",
        "export_path": f"{folder}/exports",
    }
    for name, value in changes.items():
        run = evolve_at(run, name, value)
    return run


def made_up_sequences(run: SupervisedConfig, tokens: int, vocabulary: int) -> Rows[SupervisedRow]:
    """One batch of random rows of `tokens` tokens below `vocabulary`, all of which but the first are learned."""
    random = np.random.default_rng(run.seed)
    weights = np.ones(tokens, dtype=np.float32)
    weights[0] = 0  # nothing predicts the first token
    rows = (
        SupervisedRow(id=f"made up {number}", token_ids=random.integers(vocabulary, size=tokens), weights=weights)
        for number in range(run.batch_size)
    )
    return Rows(rows=tuple(rows), tally=Tally(sizes=[run.batch_size]))


def made_up_pairs(run: SupervisedConfig, tokens: int, vocabulary: int) -> Rows[PreferenceRow]:
    """One batch of pairs of random rows of `tokens` tokens below `vocabulary`, without a common prefix."""
    random = np.random.default_rng(run.seed)
    ids = random.integers(vocabulary, size=(run.batch_size, 2, tokens))
    rows = (
        PreferenceRow(id=f"made up {number}", chosen=chosen, rejected=rejected)
        for number, (chosen, rejected) in enumerate(ids)
    )
    return Rows(rows=tuple(rows), tally=Tally(sizes=[run.batch_size]))


def verdict(run: SupervisedConfig, tokens: int, records: Iterable[Mapping[str, Any]]) -> str:
    """Sentence about finished made-up steps: that they fit, and how long they took."""
    seconds = [record["timing/step"] for record in records if "timing/step" in record]
    steps, rows = run.num_dummy_steps, run.batch_size * run.rows_of_an_item
    return (
        f"{steps} made-up step{'s' * (steps != 1)} of {rows:,} rows of {tokens:,} tokens fit, in {mean(seconds):.1f} s "
        "each. Nothing was trained or kept: set num_dummy_steps = 0 to train."
    )

"""Evaluation of a preference run on pairs of answers, without training: loss, accuracy, margin, rewards and KL."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.checkpoint.store import CheckpointStore, load_checkpoint
from skyrl.config import PreferenceConfig
from skyrl.config.loading.kinds import is_preference_run
from skyrl.config.loading.load import compose
from skyrl.errors import UserError
from skyrl.experiments.preference import PreferenceExp, reference_digests
from skyrl.learners.workers.preference_roles import reference_model
from skyrl.processes.event_loop import event_loop
from skyrl.runs.input_digests import changed_inputs
from skyrl.runs.inputs import notice
from skyrl.runs.stored_runs import Run, checkpoints_of
from skyrl.storage.atomic import write_file
from skyrl.tools.sampling_target import Target, model_of, stored_run_of
from skyrl.training.evaluation import mean_interval, share_interval
from skyrl.training.supervised import Sums

ALONE = (
    *("placement.num_nodes=1", "placement.num_gpus_per_node=1", "placement.executor=in_process"),
    *(f"{name}_parallel_size=1" for name in ("sequence", "context", "tensor", "expert")),
    *("callbacks=[]", "precompute_ref_log_probs=false"),
)
"""Settings of a run that evaluates in this process."""


def pair_run_of(target: Target) -> Run | None:
    """The configuration of a target that is a preference run, or a checkpoint of one; None for any other."""
    run = None if target.stored is None else stored_run_of(target)
    return run if run is not None and is_preference_run(run) else None


def evaluate_pairs(target: Target, overrides: Sequence[str], to: Path | None) -> tuple[dict[str, Any], Path]:
    """Evaluate a preference run on `eval_datasets`. Returns the results and the file that has them.

    The reference is that of the run. Raises `UserError` without pairs, or if the reference has changed since, and
    `ConfigError`, `DataError` and `ResumeError`.
    """
    folder = to or Path(str(target.stored)) / "evaluations" / f"step_{target.step}"
    composed = compose([str(target.stored)], [*overrides, *ALONE, f"run_path={folder}"], environ=os.environ)
    run = composed.config
    assert is_preference_run(run), "pair_run_of has found a preference run"
    if not run.eval_datasets:
        raise UserError("eval_datasets is empty: set it to the pairs to evaluate on")
    _refuse_changed_reference(target, run)
    with TemporaryDirectory() as scratch:
        model = model_of(target, Path(scratch) / "model")
        trained = compose(
            [str(target.stored)],
            [
                *overrides,
                *ALONE,
                f"run_path={folder}",
                f"model.path={model}",
                "model.lora.rank=0",
                "model.lora.path=null",
            ],
            environ=os.environ,
        ).config
        assert is_preference_run(trained)
        metrics, numbers = _measured(trained, run)
    pairs = {name: len(own) for name, own in numbers.items()}
    results = {
        "target": target.name,
        "step": target.step,
        "pairs": pairs,
        "confidence": 0.95,
        "metrics": metrics,
        "intervals": {
            f"eval/{name}/{number}": interval
            for name, own in numbers.items()
            for number, interval in _intervals(own, without=OF_ALL_LABELS if run.unpaired else OF_ALL_PAIRS).items()
        },
    }
    file = folder / "results.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps(results, indent=2) + "\n")
    return results, file


def _refuse_changed_reference(target: Target, run: PreferenceConfig) -> None:
    """Raises `UserError` if the reference is the run's own and its files are not those that the run trained beside."""
    trained = stored_run_of(target)
    assert is_preference_run(trained)
    if not trained.compares or reference_model(trained) != reference_model(run):
        return
    store = CheckpointStore(checkpoints_of(str(target.stored)), verify="size")
    checkpoint = (
        store.latest(fall_back=notice) if target.checkpoint is None else load_checkpoint(target.checkpoint, "size")
    )
    if checkpoint is not None and (changed := changed_inputs(checkpoint, reference_digests(trained))):
        raise UserError(
            f"the reference is not what it was when this run was trained:\n{changed}\n"
            "Restore it, or set ref_model_path to the model to compare with"
        )


OF_ALL_PAIRS = ("loss",)
"""Numbers that depend on other rows, so that they have no interval."""

OF_ALL_LABELS = ("loss", "margin", "baseline")
"""The same of single answers."""

Numbers = list[dict[str, float]]
"""The measurements of each pair, list or answer by itself, by name."""


def _measured(trained: PreferenceConfig, run: PreferenceConfig) -> tuple[dict[str, float], dict[str, Numbers]]:
    """Metrics of the trained policy beside the reference of the run, and the numbers of each set and of all."""
    policy, before = PreferenceExp(trained), PreferenceExp(run)
    if before.moves_reference:
        notice("the reference of this run moved with the policy; compared is the one that training began with")
    per_item: Numbers = []
    measure, rows = policy.measure, run.rows_of_an_item

    def measured(scores: Tensor, batch: TrainingBatch) -> Sums:
        for start in range(0, len(batch), rows):
            item = batch.rows(start, start + rows)
            sums = measure(scores[start : start + rows, : item.input_ids.shape[1]], item)
            per_item.append({name: total for name, (total, count) in sums.items() if count})
        return measure(scores, batch)

    policy.measure = measured  # type: ignore[method-assign]  # each item by itself, too
    with policy.resources, before.resources, event_loop() as wait_for:
        if run.compares:
            policy.reference = before.reference
        evaluation = policy.get_evaluation()
        assert evaluation is not None
        metrics = wait_for(evaluation.run(policy.learner))
    rest, by_dataset = iter(per_item), dict[str, Numbers]()
    for name, dataset in policy.eval_datasets.items():
        by_dataset[name] = list(islice(rest, len(dataset)))
    return metrics, {**by_dataset, "all": per_item}


def _intervals(numbers: Numbers, without: Sequence[str]) -> dict[str, tuple[float, float]]:
    """95 % intervals of the means but those `without`: Wilson's of the accuracy, bootstrapped of rewards, margin and
    KL.
    """
    names = [name for name in dict.fromkeys(name for own in numbers for name in own) if name not in without]
    values = {name: [[own[name]] for own in numbers if name in own] for name in names}
    return {name: (share_interval if name == "accuracy" else mean_interval)(own) for name, own in values.items()}


def pair_table(results: dict[str, Any]) -> list[str]:
    """Lines for a terminal: a row for each set and number, with its interval where it has one."""
    rows = [("set", "number", "value", "95 % interval")]
    for name, value in results["metrics"].items():
        source, _, number = name.removeprefix("eval/").rpartition("/")
        bounds = results["intervals"].get(name)
        rows.append((source, number, f"{value:.4f}", f"{bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

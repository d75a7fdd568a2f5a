"""Evaluation of a model that is not trained: scores, confidence intervals and samples, in a folder; and of a preference
run on pairs of answers: loss, accuracy, margin, rewards and KL.

results.json                what was evaluated, and every score with its 95 % interval
samples/<source>.jsonl      every sample with its reward
config.json                 the configuration
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
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
from skyrl.experiments.standalone import StandaloneSampling
from skyrl.learners.workers.roles import reference_model
from skyrl.processes.event_loop import event_loop
from skyrl.runs.input_digests import changed_inputs
from skyrl.runs.inputs import notice
from skyrl.runs.stored_runs import Run, checkpoints_of
from skyrl.storage.atomic import write_file
from skyrl.tools.sampling_target import Target, model_of, stored_run_of
from skyrl.training.evaluation import intervals, mean_interval, share_interval, with_all
from skyrl.training.supervised import Sums
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import required


def evaluate(target: Target, sampling: StandaloneSampling) -> dict[str, Any]:
    """Sample every evaluation prompt and score the answers. Returns the content of `results.json`.

    Metrics and their names are those of evaluation during training. Raises `DataError`, `TaskError`, `RewardError`,
    and any other error that evaluation in a run raises.
    """
    sandbox = sampling.check_inputs()
    evaluation = sampling.get_evaluation()
    if evaluation is None:
        raise UserError("data.val_data is empty: set it to the prompts to evaluate on")
    groups: tuple[TrajectoryGroup, ...] = sampling.sample(lambda: evaluation.sample(target.step))
    folder, metrics = sampling.folder.path, evaluation.measure(groups)
    evaluation.dump(folder / "samples", target.step, groups, metrics)
    sampling_params = required(sampling.cfg.generator.eval_sampling_params, "generator.eval_sampling_params")
    results = {
        "target": target.name,
        "step": target.step,
        "prompts": {source: len(own) for source, own in with_all(groups).items()},
        "samples_per_prompt": sampling.cfg.generator.eval_n_samples_per_prompt,
        "temperature": 0.0 if sampling_params.greedy else sampling_params.temperature,
        "seed": sampling.cfg.trainer.seed,
        "engine": sampling.cfg.generator.inference_engine.backend,
        "confidence": 0.95,
        "metrics": metrics,
        "intervals": {
            f"eval/{source}/{name}": bounds
            for source, own in with_all(groups).items()
            for name, bounds in intervals(own, sampling.cfg.generator.eval_n_samples_per_prompt).items()
        },
    }
    if sandbox is not None:
        sampling.folder.record_sandbox(sandbox)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def table(results: dict[str, Any]) -> list[str]:
    """Lines for a terminal: a row for each data source and score, with its interval."""
    shown = {
        name: value
        for name, value in results["metrics"].items()
        if not name.endswith("_stderr") and name.removeprefix("eval/").rpartition("/")[0] in results["prompts"]
    }
    return score_table("source", "score", shown, results["intervals"])


def score_table(of: str, number: str, metrics: Mapping[str, float], known: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines of a table of metrics `eval/SET/NUMBER`, with the 95 % intervals that are `known`; `of` and `number` are
    the titles of the first columns.
    """
    rows = [(of, number, "value", "95 % interval")]
    for name, value in metrics.items():
        source, _, score = name.removeprefix("eval/").rpartition("/")
        bounds = known.get(name)
        rows.append((source, score, f"{value:.4f}", f"{bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def failures(results: dict[str, Any]) -> list[str]:
    """Lines on attempts and prompts that have no score."""
    return [f"{name}: {value:g}" for name, value in results["metrics"].items() if name.count("/") == 1]


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
    stored, settings = [str(target.stored)], [*overrides, *ALONE, f"run_path={folder}"]
    run = compose(stored, settings, environ=os.environ).config
    assert is_preference_run(run), "pair_run_of has found a preference run"
    if not run.eval_datasets:
        raise UserError("eval_datasets is empty: set it to the pairs to evaluate on")
    _refuse_changed_reference(target, run)
    with TemporaryDirectory() as scratch:
        settings.append(f"model.path={model_of(target, Path(scratch) / 'model')}")
        settings += ["model.lora.rank=0", "model.lora.path=null"]
        trained = compose(stored, settings, environ=os.environ).config
        assert is_preference_run(trained)
        metrics, numbers = _measured(trained, run)
    bounds = {}
    for source, own in numbers.items():
        for number in dict.fromkeys(number for item in own for number in item):
            if number not in (OF_ALL_LABELS if run.unpaired else OF_ALL_PAIRS):
                values = [[item[number]] for item in own if number in item]
                # Wilson's interval of the accuracy, bootstrapped ones of rewards, margin and KL.
                interval_of = share_interval if number == "accuracy" else mean_interval
                bounds[f"eval/{source}/{number}"] = interval_of(values)
    results = {
        "target": target.name,
        "step": target.step,
        "pairs": {name: len(own) for name, own in numbers.items()},
        "confidence": 0.95,
        "metrics": metrics,
        "intervals": bounds,
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
    if target.checkpoint is None:
        checkpoint = CheckpointStore(checkpoints_of(str(target.stored)), verify="size").latest(fall_back=notice)
    else:
        checkpoint = load_checkpoint(target.checkpoint, "size")
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
    rest = iter(per_item)
    by_dataset = {name: list(islice(rest, len(dataset))) for name, dataset in policy.eval_datasets.items()}
    return metrics, {**by_dataset, "all": per_item}


def pair_table(results: dict[str, Any]) -> list[str]:
    """Lines for a terminal: a row for each set and number, with its interval where it has one."""
    return score_table("set", "number", results["metrics"], results["intervals"])

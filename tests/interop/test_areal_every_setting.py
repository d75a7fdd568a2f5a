"""Every setting of AReaL's classes, with another value than its default: an effect, a true reason, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl.interop.areal.backends import engine_backend
from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.report import Line
from tests.interop.corpora import areal_files, total

Fields = dict[str, dict[str, Any]]

WHOLE: dict[str, Any] = {
    "experiment_name": "e",
    "trial_name": "t",
    "actor.path": "a/b",
    "actor.backend": "fsdp:d4",
    "rollout.backend": "sglang:d4",
    "train_dataset.path": "x/y",
    "train_dataset.batch_size": 64,
    "gconfig.n_samples": 4,
    "actor.kl_ctl": 0.1,
    "ref.path": "a/b",
    "cluster.fileroot": "experiments",
}
"""A file in which one setting at a time is tried."""

PLACES: Mapping[str, tuple[str, ...]] = {
    "NormConfig": ("actor.adv_norm.", "actor.reward_norm."),
    "MicroBatchSpec": ("actor.mb_spec.", "ref.mb_spec.", "critic.mb_spec."),
    "GenerationHyperparameters": ("gconfig.", "eval_gconfig."),
    "OptimizerConfig": ("actor.optimizer.", "critic.optimizer."),
    "FSDPWrapPolicy": ("actor.fsdp.wrap_policy.",),
    "FSDPEngineConfig": ("actor.fsdp.", "ref.fsdp.", "critic.fsdp."),
    "ArchonFP8Config": ("actor.archon.fp8_config.",),
    "ArchonEngineConfig": ("actor.archon.",),
    "DistributedDataParallelConfig": ("actor.megatron.ddp.",),
    "FP8EngineConfig": ("actor.megatron.fp8_config.",),
    "MegatronEngineConfig": ("actor.megatron.", "ref.megatron.", "critic.megatron."),
    "SchedulingStrategy": ("ref.scheduling_strategy.", "rollout.scheduling_strategy."),
    "SchedulingSpec": ("actor.scheduling_spec[0].", "rollout.scheduling_spec[0]."),
    "TrainEngineConfig": ("ref.", "critic."),
    "RejectionSamplingConfig": ("actor.rejection_sampling.",),
    "PPOActorConfig": ("actor.",),
    "PPOCriticConfig": ("critic.",),
    "vLLMConfig": ("vllm.",),
    "SGLangConfig": ("sglang.",),
    "AgentConfig": ("rollout.agent.",),
    "InferenceEngineConfig": ("rollout.",),
    "EvaluatorConfig": ("evaluator.",),
    "SaverConfig": ("saver.",),
    "RecoverConfig": ("recover.",),
    "WandBConfig": ("stats_logger.wandb.",),
    "SwanlabConfig": ("stats_logger.swanlab.",),
    "TensorBoardConfig": ("stats_logger.tensorboard.",),
    "TrackioConfig": ("stats_logger.trackio.",),
    "StatsLoggerConfig": ("stats_logger.",),
    "SessionTracerConfig": ("perf_tracer.session_tracer.",),
    "MemoryProfilerConfig": ("memory_profiler.",),
    "PerfTracerConfig": ("perf_tracer.",),
    "NameResolveConfig": ("cluster.name_resolve.",),
    "ClusterSpecConfig": ("cluster.",),
    "SchedulerConfig": ("scheduler.",),
    "DatasetConfig": ("train_dataset.", "valid_dataset."),
    "LauncherConfig": ("launcher.",),
    "SlurmLauncherConfig": ("launcher.slurm.",),
    "DeepSpeedAutoTPEngineConfig": ("actor.ds_auto_tp.",),
    "TrainDatasetConfig": ("train_dataset.",),
    "ValidDatasetConfig": ("valid_dataset.",),
    "TeacherConfig": ("teacher.",),
    "GRPOConfig": ("",),
}
"""Class -> where its tables stand in a file."""


SUPERVISED: dict[str, Any] = {
    "experiment_name": "e",
    "trial_name": "t",
    "model.path": "a/b",
    "model.optimizer.lr": 1e-5,
    "train_dataset.path": "rows.jsonl",
    "valid_dataset.path": "others.jsonl",
    "train_dataset.batch_size": 8,
    "cluster.fileroot": "experiments",
}
"""The same of an experiment that generates nothing."""

OF_ROLLOUTS = (
    "rollout.",
    "gconfig.",
    "eval_gconfig.",
    "teacher.",
    "ref.",
    "critic.",
    "actor.adv_norm.",
    "actor.reward_norm.",
)
OF_PPO = ("RejectionSamplingConfig", "PPOActorConfig", "PPOCriticConfig", "GRPOConfig")


def place_of_a_model(cls: str, place: str) -> str | None:
    """Where a table of a reinforcement-learning file stands in a supervised one; None for a table that it has not."""
    if cls in OF_PPO or (place.startswith(OF_ROLLOUTS) and cls != "TrainEngineConfig"):
        return None
    if cls == "TrainEngineConfig":
        return "model."
    return place.replace("actor.", "model.", 1)


@pytest.fixture(scope="module")
def classes(reference: Path) -> dict[str, Any]:
    """AReaL's classes of May 2026: fields with types, defaults and choices."""
    found: dict[str, Any] = json.loads((reference / "areal_fields_2026_05.json").read_text())
    return found


def fields_of(cls: str, classes: dict[str, Any]) -> Fields:
    inherited: Fields = {}
    for base in classes[cls]["bases"]:
        inherited |= fields_of(base, classes) if base in classes else {}
    own: Fields = classes[cls]["fields"]
    return inherited | own


@pytest.fixture(scope="module")
def older_classes(reference: Path) -> dict[str, Any]:
    """AReaL's classes of September 2025, in the form of the newer ones."""
    found: dict[str, Any] = {}
    for rows in json.loads((reference / "areal_fields.json").read_text()).values():
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict):
                found.setdefault(row["class"], {"bases": [], "fields": {}})["fields"][row["field"]] = row
    return found


def settings(classes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and another value than its default of every setting that is no table."""
    for cls, places in PLACES.items():
        for name, field in fields_of(cls, classes).items() if cls in classes else ():
            if not any(inner in field["type"] for inner in classes):
                yield from ((place + name, another(field)) for place in places)


def another(field: dict[str, Any]) -> Any:
    """A value of the field's type that is not its default."""
    default, kind = field["default"], field["type"]
    choices = field.get("choices")
    others = [choice for choice in choices if choice != default] if isinstance(choices, list) else []
    if others:
        return others[0]
    if "bool" in kind:
        return not default
    if "float" in kind:
        return default / 2 if isinstance(default, float) and default else 0.5
    if "int" in kind and "list" not in kind:
        return default + 1 if isinstance(default, int) else 3
    if "dict" in kind:
        return {"A": "b"}
    return ["x"] if "list" in kind else "something"


def supervised_settings(classes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The same of a file of `SFTConfig` or `RWConfig`."""
    for cls, places in {**PLACES, "BaseExperimentConfig": ("",)}.items():
        mine = {place_of_a_model(cls, place) for place in places} - {None}
        for name, field in fields_of(cls, classes).items() if cls in classes else ():
            if not any(inner in field["type"] for inner in classes):
                yield from ((f"{place}{name}", another(field)) for place in sorted(filter(None, mine)))


def lines_of(changes: dict[str, Any], whole: Mapping[str, Any] = WHOLE, *, keep_engine: bool = False) -> list[Line]:
    """The lines of these settings in a file that is whole otherwise."""
    flat = {
        f"{key}.{name}" if name else key: each
        for key, value in changes.items()
        for name, each in (value.items() if isinstance(value, dict) else [("", value)])
    }
    needs = {"critic.path": "a/b"} if any(key.startswith("critic.") for key in changes) else {}
    values = {**whole, **needs, **flat}
    converted = convert_keys(values, keep_engine=keep_engine and bool(engine_backend(values)))
    return [line for line in converted.lines if line.source in flat]


def judge(lines: list[Line]) -> None:
    """Each has a place in the result, or a reason that says what is missing or why nothing is."""
    for line in lines:
        assert line.targets if line.outcome in ("kept", "renamed", "derived") else line.why, line
        assert "does not convert" not in line.why and "not known" not in line.why, line


def judge_tables(classes: dict[str, Any], *, keep_engine: bool) -> int:
    """Every table with all of its settings at once: how many there are."""
    by_table: dict[str, dict[str, Any]] = {}
    for key, value in settings(classes):
        by_table.setdefault(key.rpartition(".")[0], {})[key] = value
    for table in by_table.values():
        lines = lines_of(table, keep_engine=keep_engine)
        assert len(lines) >= len(table), "settings that were lost in silence"
        judge(lines)
    return sum(len(table) for table in by_table.values())


@pytest.mark.parametrize("keep_engine", [False, True])
def test_every_setting_of_areals_classes_has_an_outcome(classes: dict[str, Any], keep_engine: bool) -> None:
    assert judge_tables(classes, keep_engine=keep_engine) > 600


@pytest.mark.parametrize("keep_engine", [False, True])
def test_every_setting_of_the_older_classes_has_an_outcome(older_classes: dict[str, Any], keep_engine: bool) -> None:
    assert judge_tables(older_classes, keep_engine=keep_engine) > 200


@pytest.mark.long
@pytest.mark.parametrize("keep_engine", [False, True])
@pytest.mark.parametrize("age", ["classes", "older_classes"])
def test_every_setting_alone_has_an_outcome(age: str, keep_engine: bool, request: pytest.FixtureRequest) -> None:
    for key, value in settings(request.getfixturevalue(age)):
        lines = lines_of({key: value}, keep_engine=keep_engine)
        assert lines, key
        judge(lines)


@pytest.mark.parametrize("kind", ["sft", "rw"])
@pytest.mark.parametrize("age", ["classes", "older_classes"])
def test_every_setting_of_supervised_files_alone_has_an_outcome(
    age: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tried = 0
    for key, value in supervised_settings(request.getfixturevalue(age)):
        lines = lines_of({key: value}, {**SUPERVISED, "train_dataset.type": kind})
        assert lines, key
        judge(lines)
        tried += 1
    assert tried > 100


def test_19_of_20_settings_of_the_newer_files_that_ask_for_something_are_converted(reference: Path) -> None:
    files = areal_files(reference)
    outcomes = total(files)
    refused = outcomes["refused"] + outcomes["not yet"]
    assert refused <= 0.05 * (outcomes.total() - outcomes["needless"])

"""A kind of run is one module with a `RunKind`, and one line of `KINDS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import evolve

from skyrl.config import CriticConfig, PolicyConfig, RefConfig, SkyRLTrainConfig, TrainerConfig, resolve
from skyrl.config.derive.model_tables import Role, grids_of
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.loading.kinds import (
    KINDS,
    RL,
    is_reward_model_run,
    kind_named,
    kind_of,
    reads_chats,
    roles_of,
    samples_rollouts,
)
from skyrl.config.loading.load import compose
from skyrl.config.loading.supervised_kinds import REWARD_MODEL, SFT
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.supervised_root import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.errors import ConfigError
from skyrl.planning.layout import Pool, layout
from skyrl.planning.topology import Sizes
from skyrl.runs.shrinking import shrunk
from skyrl.tree import IDENTITY, field, frozen, get_at
from skyrl.tree.classes import docs_of, fields_of, is_config
from skyrl.tree.rules import paths_read

TEACHER = Role(
    name="teacher",
    path="",
    trainer="",
    placement="placement.",
    title="teacher",
    stored_as="teacher",
    learns=False,
    exists=lambda run: run.too_long == "truncate",
)
ROLES = (MODEL, TEACHER)


@frozen
class DistillationConfig(SupervisedConfig):
    """The tree of a kind that this module adds."""

    kind: Literal["distillation"] = field(default="distillation", metadata=IDENTITY)


DISTILLATION = evolve(
    SFT,
    name="distillation",
    root=DistillationConfig,
    checks=REWARD_MODEL.checks,  # those of every supervised run
    effects=REWARD_MODEL.effects,
    roles=ROLES,
    sizes=lambda run: Sizes(models=grids_of(run, ROLES), colocate_all=False),
)


def distillation(folder: Path, monkeypatch: pytest.MonkeyPatch, **values: Any) -> Any:
    """A resolved run of the kind that `KINDS` has a line for."""
    monkeypatch.setitem(KINDS, "distillation", f"{__name__}:DISTILLATION")
    files = {"model.path": str(folder), "train_datasets": ["rows.jsonl"], "batch_size": 4}
    gpus = {"placement.executor": "ray", "placement.num_gpus_per_node": 4}
    return compose([], {"kind": "distillation", **files, **gpus, **values}).config


def test_a_line_of_the_table_makes_a_kind_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = distillation(tmp_path, monkeypatch)
    assert type(run) is DistillationConfig
    assert kind_of(run) is DISTILLATION
    assert [role.name for role in roles_of(run)] == ["policy"]


def test_every_role_of_a_run_is_placed_and_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = distillation(tmp_path, monkeypatch, too_long="truncate")
    assert [role.name for role in roles_of(run)] == ["policy", "teacher"]
    assert layout(kind_of(run).sizes(run)).pools == (Pool(name="policy+teacher", nodes=1, gpus_per_node=4),)
    smaller = shrunk(run, "teacher")
    assert smaller is not None
    assert smaller[1] == {
        "placement.num_nodes": 1,
        "placement.num_gpus_per_node": 2,
    }  # 3 do not divide 4 rows


def test_the_facts_of_a_kind_say_what_it_does() -> None:
    facts = [
        (
            samples_rollouts(root),
            reads_chats(root),
            is_reward_model_run(root),
            kind.trained.scores,
            kind.trained.stored_as,
        )
        for kind in (RL, SFT, REWARD_MODEL)
        for root in [kind.root()]
    ]
    assert facts == [
        (True, False, False, False, "policy"),
        (False, True, False, False, "policy"),
        (False, False, True, True, "critic"),
    ]


@pytest.mark.parametrize("name", KINDS)
def test_a_table_knows_its_path_in_every_kind_of_run(name: str) -> None:
    kind = kind_named(name)
    run: Any = resolve(kind.root())
    assert run.trainer.table_path == kind.trainer
    assert [role.section(run).table_path for role in kind.roles] == [role.path for role in kind.roles]
    for name_of_field in (*fields_of(RunBasics), "use_sample_packing", "resume_mode", "resume_path"):
        get_at(run, run.trainer.path_of(name_of_field))  # raises AttributeError for a path that is in no file
    assert run.trainer.path_of("faults.stop_before") == kind.path("faults.stop_before")


@pytest.mark.parametrize("table", [TrainerConfig, SFTConfig, RewardModelConfig, PolicyConfig, CriticConfig, RefConfig])
def test_a_field_is_declared_again_only_to_differ(table: type[Any]) -> None:
    for base in table.__mro__[1:]:
        declared = vars(base)["__annotations__"] if is_config(base) else {}
        for name in declared.keys() & vars(table).get("__annotations__", {}).keys() & fields_of(table).keys():
            own, above = (
                (cls, fields_of(cls)[name].type, fields_of(cls)[name].default, docs_of(cls)[name])
                for cls in (table, base)
            )
            assert own[1:] != above[1:], f"{own[0].__name__}.{name} repeats {above[0].__name__}.{name}"
            assert fields_of(table)[name].metadata == fields_of(base)[name].metadata, name


def test_a_property_of_a_tree_counts_as_a_read_of_its_fields() -> None:
    run = SFTConfig(resume_from="old", use_sequence_packing=False)
    assert paths_read(lambda tree: tree.trainer.use_sample_packing, run) == {"use_sequence_packing"}
    assert paths_read(lambda tree: tree.trainer.resume_path, run) == {"resume_from"}
    assert paths_read(lambda tree: tree.trainer.folder("run_path"), resolve(run)) == {"run_path"}
    assert paths_read(lambda tree: tree.trainer.record_memory, SkyRLTrainConfig()) == {"trainer.policy.record_memory"}


@pytest.mark.parametrize("kind", [["rl"], ["a", 1], 3, True])
def test_a_kind_that_is_no_text_is_refused_in_words(kind: object) -> None:
    with pytest.raises(ConfigError, match="kind"):
        compose([], {"kind": kind})

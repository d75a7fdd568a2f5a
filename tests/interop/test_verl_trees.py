"""Every setting of verl's own trees has an outcome, and a file of defaults is the run of a file that is silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import tomli_w

from skyrl.config import load
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.resolve import resolve
from skyrl.interop.peer_trees import PeerTree, peer_trees
from skyrl.interop.report import Conversion
from skyrl.interop.systems import Switch
from skyrl.interop.verl.convert import convert_keys
from skyrl.interop.verl.switches import SWITCHES
from skyrl.tree import get_at
from skyrl.tree.sparse import as_toml_has_it

KINDS = ("fsdp", "megatron", "fully_async", "one_step_off", "sft")
ELSEWHERE = {
    "sft_megatron": "Megatron learners in supervised runs",
    "torchtitan": "strategy 'torchtitan'",
    "veomni": "strategy 'veomni'",
}
TREES = [tree for kind in (*KINDS, *ELSEWHERE) for tree in peer_trees("verl", kind)]
PROGRAMS = {"fully_async": "fully_async_main", "one_step_off": "one_step_off_policy.main_ppo"}


def name(tree: PeerTree) -> str:
    return f"{tree.kind}-{tree.version}"


@cache
def converted(at: int) -> Conversion:
    return convert_keys(TREES[at].defaults, "dump.yaml")


def refused(conversion: Conversion) -> list[str]:
    return [f"{line.source}: {line.reason}" for line in conversion.refused]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tree", TREES, ids=name)
def test_a_file_of_defaults_has_nothing_refused(tree: PeerTree) -> None:
    conversion = converted(TREES.index(tree))
    assert {line.source for line in conversion.lines} == {*tree.defaults}
    refusals = refused(conversion)
    assert [line.partition(": ")[2] for line in refusals] == ([ELSEWHERE[tree.kind]] if tree.kind in ELSEWHERE else [])
    assert not any(problem.severity == "error" for problem in conversion.problems)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tree", TREES, ids=name)
def test_the_report_names_the_version_of_a_whole_file(tree: PeerTree) -> None:
    if not tree.kind.startswith("sft_"):
        assert f"verl {tree.version} " in converted(TREES.index(tree)).notice


def test_a_file_of_few_settings_tells_no_version() -> None:
    assert convert_keys({"actor_rollout_ref.model.path": "a/b", "data.train_batch_size": 8}).notice == ""


MARKS: dict[str, dict[str, object]] = {"megatron": {"model_engine": "megatron"}, "sft": {"optim.lr": 1e-3}}
"""Settings by which a kind of run is known."""

AROUND = (
    "project_name", "run_name", "logger", "ckpt_path", "train_data", "val_data", "train_datasets", "path", "seed",
    # the same result in another way
    "offload_after_step", "schedule_unit", "async_ckpt_save", "share_group_prompts", "use_liger_kernel", "strategy",
    "attention_backend", "num_parallel_generation_workers", "max_num_seqs", "top_k", "top_p",
)  # fmt: skip
"""Last names of fields that may differ: where a run is kept, and how fast it is."""


def leaves(table: Mapping[str, object], path: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


def run_of(conversion: Conversion, folder: Path) -> RunConfig:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return resolve(load([file], environ={}).config)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tree", [tree for tree in TREES if tree.kind in KINDS], ids=name)
def test_a_silent_file_is_the_run_that_a_file_of_defaults_is(tree: PeerTree, tmp_path: Path) -> None:
    model = "model.path" if tree.kind == "sft" else "actor_rollout_ref.model.path"
    least = {model: "a/b", **MARKS.get(tree.kind, {})}
    full = converted(TREES.index(tree))
    silent = convert_keys(least, program=PROGRAMS.get(tree.kind, ""))
    paths = {path for path in [*leaves(full.tables), *leaves(silent.tables)] if path.rpartition(".")[2] not in AROUND}
    runs = run_of(full, tmp_path), run_of(silent, tmp_path)
    assert [
        (path, *pair) for path in paths for pair in [[get_at(run, path) for run in runs]] if pair[0] != pair[1]
    ] == []


ON = (True, "muon", "WSD", "dro", "importlib", "separate_async", "colocate_async", "gdpo", "http://a", 8)
"""Values that turn one feature or another on."""

WITHOUT_EFFECT_HERE = {
    "*.tiled_mlp.enabled": "speed",
    "*.use_fused_kernels": "speed",
    "trainer.use_v1": "versions of one trainer",
    "critic.model.*": "set by the policy",
    "distillation.enabled": "where its path is set",
    "reward.reward_model.*": "reward.reward_model.enable, which is not converted",
}
"""Switches whose feature needs nothing in some table -> a part of the reason."""


def switches() -> Iterator[tuple[Switch, str, PeerTree]]:
    """Each switch with each setting that it is, and a tree that has it."""
    seen: set[str] = set()
    for tree in sorted(TREES, key=lambda tree: tree.version, reverse=True):
        for switch in SWITCHES if tree.kind in KINDS else ():
            for key in sorted({switch.key_for(setting) for setting in tree.defaults} - {""}):
                if key in tree.defaults and key + switch.source not in seen:
                    seen.add(key + switch.source)
                    yield switch, key, tree


@pytest.mark.parametrize(("switch", "key", "tree"), [pytest.param(*case, id=case[1]) for case in switches()])
def test_a_switch_that_is_on_is_refused_by_its_name_or_has_an_effect(switch: Switch, key: str, tree: PeerTree) -> None:
    value = 8 if key.endswith("lora_rank") else next(value for value in ON if not switch.is_off(value))
    table = key.rpartition(".")[0]
    above = {outer: True for outer in ("reward.reward_model.enable",) if table.startswith(outer.rpartition(".")[0])}
    extra_keys = {"trainer.v1.trainer_mode": "separate_async"} if "hybrid_rollout" in key else {}
    read = {setting: default for setting, default in tree.defaults.items() if switch.key_for(setting) == key}
    conversion = convert_keys({**MARKS.get(tree.kind, {}), **read, **above, **extra_keys, key: value})
    lines = {line.source: line for line in conversion.lines}
    if not lines[key].is_refused and not lines[key].targets:
        reasons = [reason for pattern, reason in WITHOUT_EFFECT_HERE.items() if fnmatchcase(key, pattern)]
        assert any(reason in lines[key].reason for reason in reasons), lines[key].reason
    assert "not known" not in lines[key].reason
    below = [line for line in lines.values() if switch.key_for(line.source) == key]
    assert [line.source for line in below if f"read with {key}" in line.reason] == []
    assert [line.source for line in below if "not known" in line.reason] == []

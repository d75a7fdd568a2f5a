"""Every setting of AReaL's versions: by default nothing is refused; with another value, an effect, a true reason, or a
refusal by the name of what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import PreferenceConfig
from skyrl.interop.areal.backends import engine_backend
from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.areal.same_settings import KINDS
from skyrl.interop.areal.switches import SWITCHES
from skyrl.interop.peer_trees import PeerTree, peer_trees
from skyrl.interop.report import Line
from skyrl.interop.systems import Switch
from tests.interop.corpora import areal_files, total

TREES = {f"{kind}-{tree.version}": tree for kind in KINDS[:3] for tree in peer_trees("areal", kind)}
REQUIRED: dict[str, Any] = {
    "experiment_name": "e", "trial_name": "t", "cluster.fileroot": "experiments", "actor.path": "a/b",
    "actor.backend": "fsdp:d4", "rollout.backend": "sglang:d4", "ref.path": "a/b", "ref.backend": "fsdp:d4",
    "model.path": "a/b", "train_dataset.path": "x/y", "train_dataset.batch_size": 64, "rollout.consumer_batch_size": 64,
}  # fmt: skip
"""Settings that AReaL requires, or needs to train: it has no optimizer and one prompt per batch by default."""

OTHERS = {
    "level": "sequence", "action": "clamp", "metric": "kl_k1", "kl_estimator": "k3", "dtype": "float16",
    "importance_sampling_level": "sequence", "prox_logp_method": "loglinear", "lr_scheduler_type": "cosine",
    "weight_update_mode": "disk", "ac_mode": "full", "mean_level": "group", "std_level": "group", "mode": "online",
    "gae_timestep_unit": "turn", "schedule_policy": "fcfs", "backend": "megatron:d2t2",
}  # fmt: skip
"""Another value of settings that take one of several words."""


def absent(tree: PeerTree) -> list[str]:
    """Tables that a file has only if it asks for them."""
    keys = tree.defaults
    return [key for key, value in keys.items() if value is None and any(name.startswith(f"{key}.") for name in keys)]


def dump(tree: PeerTree, *tables: str) -> dict[str, Any]:
    """All settings with their defaults, as AReaL itself writes them, with these optional tables."""
    off = tuple(f"{key}." for key in absent(tree) if key not in tables)
    values = {key: value for key, value in tree.defaults.items() if not key.startswith(off) and key not in tables}
    values |= {key: value for key, value in REQUIRED.items() if key in values}
    if tree.version.startswith("0."):  # where `backend` is a name that an allocation may have
        values |= dict.fromkeys({"actor.backend", "ref.backend", "model.backend"} & values.keys(), "")
        values["allocation_mode"] = "sglang:d4+fsdp:d4" if "rollout.queue_size" in values else "fsdp:d4"
    if tree.kind in ("SFTConfig", "RWConfig"):
        rows = {"SFTConfig": "sft", "RWConfig": "rw"}[tree.kind]
        values |= {"train_dataset.type": rows, "actor.is_critic": rows == "rw"} if "actor.path" in values else {}
    return values | {key: "e" for key in values if key.endswith((".experiment_name", ".trial_name"))}


def needed(tree: PeerTree) -> tuple[str, ...]:
    """Optional tables without which AReaL's defaults train nothing, or reward entropy."""
    return ("ref", "actor.optimizer") if tree.kind == "GRPOConfig" else ("actor.optimizer", "model.optimizer")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", ["fsdp:d4", "megatron:d4", "archon:d4"])
@pytest.mark.parametrize("name", TREES)
def test_a_dump_of_the_defaults_converts_with_nothing_refused(name: str, backend: str) -> None:
    tree = TREES[name]
    values = dump(tree, *needed(tree))
    if tree.version.startswith("0.") or (tree.kind != "GRPOConfig" and backend.startswith("megatron")):
        backend = "fsdp:d4"
    values |= {key: backend for key in ("actor.backend", "ref.backend") if values.get(key)}
    conversion = convert_keys(values)
    assert conversion.refused == ()
    assert [problem for problem in conversion.problems if problem.severity == "error"] == []
    assert tree.version in conversion.notice


@pytest.mark.parametrize("tree", peer_trees("areal", "DPOConfig"), ids=lambda tree: tree.version)
def test_a_dump_of_the_defaults_of_dpo_converts_with_nothing_refused(tree: PeerTree) -> None:
    backends = {"actor.backend": "fsdp:d4", "ref.backend": "fsdp:d4"}
    conversion = convert_keys(dump(tree, "actor.optimizer", "ref") | backends | {"ref.path": "a/b"})
    assert (conversion.root, conversion.refused) == (PreferenceConfig, ())
    assert (conversion.tables["loss_type"], conversion.tables["beta"]) == (["sigmoid"], 0.1)
    assert tree.version in conversion.notice


TURNED_ON = {
    "actor.gae_lambda": "a function that computes",
    "*.enable_delta_weight_update": "changed weights", "*.archon.fp8_config.mode": "FP8 training",
    "*.fsdp.per_layer_optim_step": "per-layer optimizer steps",
}  # fmt: skip
"""Switch -> what is missing here, in the words of its refusal."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.key)
def test_a_feature_that_is_turned_on_has_an_effect_or_is_refused_by_its_name(switch: Switch) -> None:
    tree = TREES["GRPOConfig-2.0.0"]
    key = switch.key.replace("*", "actor", 1)
    backend = {"megatron": "megatron:d4", "archon": "archon:d4"}.get(switch.settings[0].split(".")[1], "fsdp:d4")
    values = dump(tree, *needed(tree), "actor.rejection_sampling") | {"actor.backend": backend}
    on = {"actor.gae_lambda": "a.b", "*.archon.fp8_config.mode": "blockwise", "actor.kl_ctl": 0.2}.get(switch.key, True)
    lengths = {"actor.max_new_tokens": values["gconfig.max_new_tokens"], "actor.overlong_tokens": 8}
    conversion = convert_keys({**values, key: on, **lengths, "actor.overlong_penalty_factor": 1.0})
    before = convert_keys({**values, key: 0.0 if switch.key == "actor.kl_ctl" else switch.default})
    of_switch = (f"only read with {key}, which is off", f"not read with {key} = ")
    idle = {line.source for line in before.lines if line.reason.startswith(of_switch)}
    assert idle, "no setting is idle while the feature is off"
    if reason := TURNED_ON.get(switch.key):
        assert any(line.source == key and reason in line.reason for line in conversion.refused)
    else:
        assert conversion.refused == ()
        assert conversion.tables != before.tables
    assert not [line for line in conversion.lines if line.reason.startswith(of_switch)]


def another(key: str, default: Any) -> Any:
    """A value that is not the default."""
    name = key.rpartition(".")[2]
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default / 2 if isinstance(default, float) and default else default + 1
    if isinstance(default, dict):
        return {"A": "b"}
    return ["x"] if isinstance(default, list) else "something"


def settings(tree: PeerTree) -> Iterator[tuple[str, Any]]:
    """Key and another value of every setting that is no table."""
    tables = absent(tree)
    yield from ((key, another(key, value)) for key, value in tree.defaults.items() if key not in tables)


def lines_of(changes: Mapping[str, Any], tree: PeerTree, *, keep_engine: bool = False) -> list[Line]:
    """The lines of these settings in a file that is whole otherwise."""
    base_settings = {key: value for key, value in REQUIRED.items() if key in tree.defaults}
    if tree.kind != "GRPOConfig":
        base_settings["train_dataset.type"] = {"SFTConfig": "sft", "RWConfig": "rw"}[tree.kind]
    flat = {
        f"{key}.{name}" if name else key: entry
        for key, value in changes.items()
        for name, entry in (value.items() if isinstance(value, dict) else [("", value)])
    }
    needs = {"critic.path": "a/b"} if any(key.startswith("critic.") for key in changes) else {}
    values = {**base_settings, **needs, **flat}
    converted = convert_keys(values, keep_engine=keep_engine and bool(engine_backend(values)))
    return [line for line in converted.lines if line.source in flat]


def judge(lines: list[Line]) -> None:
    """Each has a place in the result, or a reason that says what is missing or why nothing is."""
    for line in lines:
        assert line.targets if line.outcome in ("kept", "renamed", "derived") else line.reason, line
        assert "does not convert" not in line.reason and "not known" not in line.reason, line


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "keep_engine"),
    [
        *((f"GRPOConfig-{version}", keep_engine) for version in ("0.3.3", "2.0.0") for keep_engine in (False, True)),
        ("SFTConfig-0.3.3", False),
        ("SFTConfig-2.0.0", False),
    ],
)
def test_every_other_value_has_an_outcome(name: str, keep_engine: bool) -> None:
    tree = TREES[name]
    by_table: dict[str, dict[str, Any]] = {}
    for key, value in settings(tree):
        by_table.setdefault(key.rpartition(".")[0], {})[key] = value
    for table in by_table.values():
        lines = lines_of(table, tree, keep_engine=keep_engine)
        assert len(lines) >= len(table), "settings that were lost in silence"
        judge(lines)


@pytest.mark.long
@pytest.mark.parametrize("keep_engine", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_every_other_value_alone_has_an_outcome(name: str, keep_engine: bool) -> None:
    for key, value in settings(TREES[name]):
        lines = lines_of({key: value}, TREES[name], keep_engine=keep_engine)
        assert lines, key
        judge(lines)


@pytest.mark.long
def test_19_of_20_settings_of_the_newer_files_that_ask_for_something_are_converted(reference: Path) -> None:
    files = areal_files(reference)
    outcomes = total(files)
    refused = outcomes["refused"] + outcomes["not yet"]
    assert refused <= 0.05 * (outcomes.total() - outcomes["needless"])

"""SkyRL's own defaults, by version: a dump of them converts, and each feature that is turned on is refused by its name
or has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl.config import load
from skyrl.config.loading.newer_upstream_fields import FEATURES
from skyrl.interop.peer_trees import PeerTree, peer_trees
from skyrl.interop.report import Conversion, Line
from skyrl.interop.skyrl.scripts import convert_overrides, convert_skyrl

TREES = [tree for kind in ("rl", "sft") for tree in peer_trees("skyrl", kind)]

COMPUTED = {
    "data.dataloader.num_workers": 8,
    "generator.max_input_length": 512,
    "trainer.algorithm.temperature": 1.0,
    "trainer.ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "generator.eval_sampling_params.temperature": 0.0,
    "generator.eval_sampling_params.max_generate_length": 1024,
}
"""What SkyRL fills in when it builds a tree, and so has in a dump (train/config/config.py, `__post_init__`)."""


def dumped(tree: Mapping[str, Any], folder: Path) -> Conversion:
    """The conversion of a YAML file as SkyRL's `get_config_as_yaml_str` writes it."""
    nested: dict[str, Any] = {}
    for key, value in tree.items():
        *tables, name = key.split(".")
        table = nested
        for table_name in tables:
            table = table.setdefault(table_name, {})
        table[name] = value
    file = folder / "dump.yaml"
    file.write_text(yaml.safe_dump(nested))
    return convert_skyrl(str(file))


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.kind}-{tree.version}")
def test_a_dump_of_skyrls_defaults_converts(tree: PeerTree, tmp_path: Path) -> None:
    conversion = dumped(tree.defaults, tmp_path)
    assert {line.source for line in conversion.lines} == {*tree.defaults}
    assert conversion.refused == ()
    assert "custom field" not in conversion.report()


def test_a_dump_with_what_skyrl_computes_converts(tmp_path: Path) -> None:
    defaults = dict(peer_trees("skyrl", "rl")[-1].defaults)
    del defaults["generator.eval_sampling_params"]
    assert dumped(defaults | COMPUTED, tmp_path).refused == ()


def line_of(key: str, *overrides: str) -> Line:
    [line] = [line for line in convert_overrides(overrides).lines if line.source == key]
    return line


BELOW_MEGATRON = [
    (feature.name, path) for feature in FEATURES for path in feature.switches if ".megatron_config." in path
]


@pytest.mark.parametrize(("name", "path"), BELOW_MEGATRON)
def test_a_feature_of_megatron_is_refused_by_name_under_megatron_alone(name: str, path: str) -> None:
    lora_overrides = ["trainer.policy.model.lora.rank=8", "trainer.ref.model.lora.rank=8"]
    under = line_of(path, "trainer.strategy=megatron", *lora_overrides, f"{path}=1")
    assert (under.outcome, name in under.reason) == ("not yet", True)
    elsewhere = line_of(path, "trainer.strategy=fsdp", *lora_overrides, f"{path}=1")
    assert (elsewhere.outcome, elsewhere.reason) == ("needless", "not read with trainer.strategy = 'fsdp'")


@pytest.mark.parametrize(
    ("key", "switched", "outcome", "targets"),
    [
        ("trainer.policy.model.lora.max_loras=4", [], "needless", ()),
        ("trainer.policy.model.lora.max_loras=4", ["trainer.policy.model.lora.rank=8"], "not yet", ()),
        ("trainer.fully_async.sample_full_batch=true", [], "needless", ()),
        (
            "trainer.fully_async.sample_full_batch=true",
            ["trainer.fully_async.enabled=true"],
            "renamed",
            ("trainer.algorithm.dynamic_sampling.type", "trainer.algorithm.dynamic_sampling.max_sample_batches"),
        ),
        ("trainer.policy.megatron_config.moe_aux_loss_coeff=0.1", ["trainer.strategy=megatron"], "needless", ()),
        (
            "trainer.policy.megatron_config.moe_aux_loss_coeff=0.1",
            ["trainer.strategy=megatron", "trainer.policy.megatron_config.moe_router_load_balancing_type=aux_loss"],
            "renamed",
            ("trainer.policy.megatron_config.transformer_config_kwargs.moe_aux_loss_coeff",),
        ),
        (
            "trainer.policy.megatron_config.moe_router_dtype=fp64",
            ["trainer.strategy=megatron"],
            "renamed",
            ("trainer.policy.megatron_config.transformer_config_kwargs.moe_router_dtype",),
        ),
        (
            "trainer.policy.megatron_config.async_dist_ckpt_save=true",
            ["trainer.strategy=megatron"],
            "renamed",
            ("trainer.async_ckpt_save",),
        ),
        ("trainer.num_logger_eval_samples=5", [], "renamed", ("trainer.trackers.sample_rows",)),
        ("generator.use_cache_salt=false", [], "needless", ()),
        ("trainer.policy.megatron_config.lora_config.merge_lora=false", ["trainer.strategy=megatron"], "needless", ()),
        ("generator.inference_engine.use_expandable_segments=true", [], "needless", ()),
    ],
)
def test_a_newer_setting_acts_only_with_its_switch(
    key: str, switched: list[str], outcome: str, targets: tuple[str, ...]
) -> None:
    line = line_of(key.partition("=")[0], *switched, key)
    assert (line.outcome, line.targets) == (outcome, targets), line


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ("", [12]),  # SkyRL's defaults: 10 skipped, 1 to warm up, 1 recorded
        ("skip_first=0 warmup=0", [1]),
        ("skip_first=2 wait=1 warmup=1 active=2", [5, 6]),
        ("skip_first=0 wait=1 warmup=1 active=2 repeat=3", [3, 4, 7, 8, 11, 12]),
    ],
)
@pytest.mark.parametrize(("table", "path"), [("trainer.policy.", "trainer.profile_steps"), ("", "profile_steps")])
def test_the_profilers_schedule_becomes_the_steps_that_it_records(
    schedule: str, steps: list[int], table: str, path: str
) -> None:
    table += "torch_profiler_config."
    base = [] if path.startswith("trainer") else ["strategy=fsdp", "dataset_name=a/b"]
    conversion = convert_overrides([*base, f"{table}enable=true", *(table + setting for setting in schedule.split())])
    node: Any = conversion.tables
    for name in path.split("."):
        node = node[name]
    assert (node, conversion.refused) == (steps, ())


def test_a_schedule_without_an_end_is_refused() -> None:
    table = "trainer.policy.torch_profiler_config."
    assert {line.outcome for line in convert_overrides([f"{table}enable=true", f"{table}repeat=0"]).lines} == {
        "not yet"
    }


def test_the_dynamic_sampling_of_full_batches_wins_over_the_null_of_a_dump() -> None:
    full = ["trainer.fully_async.enabled=true", "trainer.fully_async.sample_full_batch=true"]
    dump_overrides = [
        "trainer.algorithm.dynamic_sampling.type=null",
        "trainer.algorithm.dynamic_sampling.max_sample_batches=30",
    ]
    sampling = convert_overrides([*full, *dump_overrides]).tables["trainer"]["algorithm"]["dynamic_sampling"]
    assert sampling == {"type": "filter", "max_sample_batches": -1}


def test_an_asynchronous_program_turns_on_what_only_asynchronous_training_reads() -> None:
    conversion = convert_overrides(
        ["trainer.fully_async.sample_full_batch=true"], program="examples.train.fully_async.main_fully_async"
    )
    assert conversion.tables["trainer"]["algorithm"]["dynamic_sampling"]["type"] == "filter"


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.kind}-{tree.version}")
def test_a_dump_names_its_version(tree: PeerTree, tmp_path: Path) -> None:
    notice = dumped(tree.defaults, tmp_path).report().partition("\n")[0]
    assert notice.startswith("The settings are those of SkyRL ") and tree.version in notice


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (["trainer.epochs=2"], ""),  # in every version
        (["generator.inference_engine.enable_http_endpoint=true"], "The settings are those of SkyRL 0.2.0."),
        (["trainer.policy.megatron_config.fp8_recipe=null"], "The settings are those of SkyRL 0.4.0."),
        (["trainer.mtp.enabled=false"], "The settings are those of SkyRL 0.3.0 or 0.4.0."),
        (["trainer.mtp.enabled=false", "trainer.mine=1"], ""),  # half of them are in no version
        (["generator.backend=vllm", "trainer.mtp.enabled=false"], ""),
    ],
)
def test_a_few_settings_name_their_version_if_they_tell(overrides: list[str], notice: str) -> None:
    assert convert_overrides(overrides).notice == notice


@pytest.mark.parametrize(
    ("overrides", "written"),
    [
        (["generator.eval_sampling_params.top_p=0.7"], {"temperature": 1.0, "max_generate_length": 1024}),
        (["generator.eval_sampling_params.temperature=0.5"], {"max_generate_length": 1024}),
        (["generator.eval_sampling_params=null"], {}),
        (["generator.sampling_params.top_p=0.7"], {}),
        (["generator.eval_sampling_params.top_p=0.7", "generator.backend=vllm"], {}),  # merged, in the Hydra era
        (["trainer.critic.optimizer_config.weight_decay=0.1"], {"lr": 1e-6}),
        (["trainer.critic.optimizer_config.lr=0.1"], {}),
        (["trainer.critic.model.path=a/b"], {}),
    ],
)
def test_a_table_given_in_part_has_the_defaults_of_skyrls_class(
    overrides: list[str], written: dict[str, object]
) -> None:
    conversion = convert_overrides(overrides)
    assert {line.source.rpartition(".")[2]: line.value for line in conversion.defaults} == written
    [table] = {line.source.rpartition(".")[0] for line in conversion.defaults} or {""}
    node: Any = conversion.tables
    for name in table.split(".") if table else ():
        node = node[name]
    assert not table or {name: node[name] for name in written} == written


ASYNC = ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]
MOE = "trainer.policy.megatron_config.moe_router_load_balancing_type=aux_loss"


@pytest.mark.parametrize(
    ("overrides", "listed", "not_listed"),
    [
        ([], {"generator.inference_engine.enable_ray_prometheus_stats"}, {"trainer.strategy"}),
        (ASYNC, {"trainer.fully_async.clear_kv_cache_on_weight_sync"}, set()),
        ([], set(), {"trainer.fully_async.clear_kv_cache_on_weight_sync"}),  # has no effect
        (
            ["trainer.strategy=megatron"],
            {"trainer.policy.megatron_config.empty_cuda_cache", "trainer.policy.megatron_config.moe_router_dtype"},
            {"trainer.policy.megatron_config.moe_aux_loss_coeff"},
        ),
        (["trainer.strategy=megatron", MOE], {"trainer.policy.megatron_config.moe_aux_loss_coeff"}, set()),
        (
            ["trainer.strategy=megatron", "trainer.policy.megatron_config.empty_cuda_cache=false"],
            set(),
            {"trainer.policy.megatron_config.empty_cuda_cache"},
        ),
    ],
)
def test_defaults_that_differ_are_listed_where_they_act(
    overrides: list[str], listed: set[str], not_listed: set[str]
) -> None:
    sources = {row.source for row in convert_overrides(["trainer.epochs=1", *overrides]).other_defaults}
    assert listed <= sources and not sources & not_listed


def test_a_dump_has_no_default_that_differs(tmp_path: Path) -> None:
    assert dumped(peer_trees("skyrl", "rl")[-1].defaults, tmp_path).other_defaults == ()


@pytest.mark.parametrize("tree", peer_trees("skyrl", "rl"), ids=lambda tree: tree.version)
def test_the_tree_itself_takes_a_dump(tree: PeerTree) -> None:
    loaded = load([], dict(tree.defaults))
    dropped = {path for path, value in tree.defaults.items() if path not in loaded.origins and value != {}}
    assert dropped <= {warning.path for warning in loaded.warnings}

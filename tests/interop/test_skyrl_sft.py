"""SkyRL's `main_sft` scripts become runs of `kind = "sft"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import SFTConfig, load
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.report import Conversion, Line
from skyrl.interop.skyrl.scripts import convert_overrides, convert_skyrl
from skyrl.interop.skyrl.sft import convert_settings
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import RECORDED, scripts_of_2026

RUN = ["strategy=fsdp", "model.path=a/b", "dataset_name=c/d", "placement.num_gpus_per_node=1"]


def loaded(conversion: Conversion, folder: Path) -> SFTConfig:
    """As the command writes it and `skyrl run` reads it."""
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    run: Any = load([str(file)]).config
    assert isinstance(run, SFTConfig)
    return run


def line_of(overrides: list[str], source: str) -> Line:
    return next(line for line in convert_overrides(overrides).lines if line.source == source)


def test_every_setting_of_the_published_scripts_has_a_line_and_its_value(reference: Path, tmp_path: Path) -> None:
    for script in scripts_of_2026(reference, "sft"):
        values = dict(override.split("=", 1) for override in script.facts["overrides"])
        assert {line.source for line in script.conversion.lines} == {*values}
        run = loaded(script.conversion, tmp_path)
        expected = (int(values["batch_size"]), int(values["seed"]), values["model.path"])
        assert (run.batch_size, run.seed, run.model.path) == expected


def test_the_published_scripts_lose_nothing() -> None:
    lines = [line for script in scripts_of_2026(RECORDED, "sft") for line in script.conversion.lines]
    assert not [line for line in lines if line.is_refused]


PACKED = (  # noqa: SIM905 - as the script writes it
    "strategy=megatron model.path=Qwen/Qwen2.5-0.5B-Instruct train_datasets=['allenai/tulu-3-sft-mixture'] "
    "train_dataset_splits=['train[:50000]'] eval_datasets=['allenai/tulu-3-sft-mixture'] "
    "eval_dataset_splits=['train[-500:]'] messages_key=messages max_length=4096 num_steps=4166 batch_size=24 "
    "micro_train_batch_size_per_gpu=6 remove_microbatch_padding=true use_sequence_packing=true "
    "max_tokens_per_microbatch=4096 seed=42 optimizer_config.lr=1e-6 optimizer_config.weight_decay=1e-2 "
    "optimizer_config.max_grad_norm=1.0 optimizer_config.num_warmup_steps=0 "
    "optimizer_config.scheduler=constant_with_warmup placement.num_nodes=1 placement.num_gpus_per_node=4 "
    "megatron_config.tensor_model_parallel_size=1 megatron_config.pipeline_model_parallel_size=1 "
    "megatron_config.context_parallel_size=1 logger=wandb project_name=skyrl_sft run_name=packed ckpt_path=/ckpts "
    "ckpt_interval=0 resume_from= train_on_what=all_assistant_messages hf_save_interval=2083 export_path=/exports"
).split()
"""SkyRL's script examples/train/sft/run_sft_megatron_tulu3_50k_packed.sh, with Megatron and packing."""


def test_the_documented_command_keeps_every_setting(tmp_path: Path) -> None:
    converted = convert_overrides(PACKED)
    assert not [line for line in converted.lines if line.is_refused]
    run = loaded(converted, tmp_path)
    assert (run.strategy, run.use_sequence_packing, run.max_tokens_per_microbatch) == ("megatron", True, 4096)
    assert run.megatron_config.tensor_model_parallel_size == 1 and run.placement.num_gpus_per_node == 4
    other = convert_overrides([argument for argument in PACKED if not argument.startswith("max_tokens_per_microbatch")])
    assert other.tables["max_tokens_per_microbatch"] == 4096  # SkyRL's bins are then of max_length


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0", "0.4.0"])
def test_the_defaults_of_every_release_are_converted(version: str) -> None:
    [tree] = [tree for tree in peer_trees("skyrl", "sft") if tree.version == version]
    converted = convert_settings([*tree.defaults.items()], "skyrl")
    assert not [line for line in converted.lines if line.is_refused]
    assert converted.tables["strategy"] == "megatron"


def test_megatrons_settings_bring_its_strategy() -> None:
    converted = convert_overrides(["dataset_name=c/d", "megatron_config.context_parallel_size=2"])
    assert converted.tables["strategy"] == "megatron"
    assert "megatron_config.pipeline_model_parallel_size" in {default.source for default in converted.other_defaults}


def test_a_sampler_of_the_user_keeps_its_class_and_its_arguments(tmp_path: Path) -> None:
    custom = ["sampler=custom", "sampler_class_path=mine.samplers.Curriculum", "sampler_kwargs.window=3"]
    converted = convert_overrides([*RUN, *custom])
    assert not [line for line in converted.lines if line.is_refused]
    run = loaded(converted, tmp_path).curriculum
    assert (run.sampler, run.sampler_kwargs) == ("mine.samplers:Curriculum", {"window": 3})
    unread = line_of([*RUN, "sampler=sequential", custom[1]], "sampler_class_path")
    assert unread.reason == "read with sampler = custom"


def test_a_script_is_recognised_by_its_entry_point(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "#!/bin/bash\nSTEPS=${1:-40}\npython -m skyrl.train.main_sft \\\n  strategy=fsdp model.path=a/b \\\n"
        "  train_datasets=\"['c/d']\" train_dataset_splits=\"['train[:100]']\" num_steps=$STEPS batch_size=8 "
        '"$@"\n'
    )
    run = loaded(convert_skyrl(str(file)), tmp_path)
    assert (run.train_datasets, run.num_steps, run.batch_size, run.strategy) == (("c/d:train[:100]",), 40, 8, "fsdp")


def test_a_file_is_recognised_by_its_names(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "strategy: fsdp\nmodel: {path: a/b}\ndataset_name: c/d\nmax_length: null\nremove_microbatch_padding: false\n"
    )
    run = loaded(convert_skyrl(str(file)), tmp_path)
    assert (run.train_datasets, run.max_length, run.use_sequence_packing) == (("c/d",), None, False)


@pytest.mark.parametrize(
    ("override", "outcome", "reason"),
    [
        ("strategy=megatron", "kept", ""),
        ("model_config_kwargs.rope_theta=1e6", "kept", ""),
        ("use_sequence_packing=true", "refused", "packing needs max_length or max_tokens_per_microbatch"),
        ("use_sequence_packing=false", "needless", "max_tokens_per_microbatch decides"),
        ("megatron_config.moe_enable_routing_replay=true", "needless", "not read with strategy = 'fsdp'"),
        ("megatron_config.tensor_model_parallel_size=2", "needless", "not read with strategy = 'fsdp'"),
        ("resume_from=", "kept", ""),
        ("ckpt_path=", "needless", "empty, so the default applies"),
        ("dummy_run_max_steps=5", "needless", "dummy_run_full_ctx is off"),
        ("dummy_run_full_ctx=true", "kept", ""),
        ("num_workers=8", "needless", "affects how fast batches are assembled"),
        ("sequence_parallel_size=2", "kept", ""),
        ("use_torch_compile=true", "kept", ""),
        ("batch_sise=8", "refused", "did you mean batch_size?"),
        ("optimizer_config.learning_rate=1e-5", "refused", "did you mean optimizer_config.lr?"),
        ("eval_dataset_split=train", "needless", "eval_dataset_name, which is not set"),
    ],
)
def test_one_setting_converts_to_the_expected_outcome(override: str, outcome: str, reason: str) -> None:
    key = override.partition("=")[0]
    line = line_of([*(argument for argument in RUN if not argument.startswith(key + "=")), override], key)
    assert (line.outcome in (outcome, "renamed" if outcome == "kept" else outcome), reason in line.reason) == (
        True,
        True,
    ), line


@pytest.mark.parametrize(("written", "steps"), [(["dummy_run_max_steps=3"], 3), ([], 5)])
def test_dummy_steps_convert_with_skyrls_default(written: list[str], steps: int) -> None:
    conversion = convert_overrides(["strategy=fsdp", "max_length=64", "dummy_run_full_ctx=true", *written])
    assert conversion.tables["num_dummy_steps"] == steps and conversion.refused == ()


def test_settings_that_are_left_out_are_compared_by_their_defaults() -> None:
    conversion = convert_overrides(["dataset_name=c/d"])
    assert conversion.tables["optimizer_config"] == {"lr": 1e-6}
    assert [line.source for line in conversion.defaults] == ["optimizer_config.lr", "model.path"]
    assert convert_overrides(["strategy=fsdp", "optimizer_config.lr=1e-4"]).tables["optimizer_config"] == {"lr": 1e-4}
    assert [
        (default.source, default.source_default, default.skyrl_default) for default in conversion.other_defaults
    ] == [
        ("placement.num_gpus_per_node", 4, 1),
        ("resume_from", "", "latest"),
        ("strategy", "megatron", "fsdp2"),
    ]


@pytest.mark.parametrize(
    ("written", "sources"),
    [
        ([], ["yahma/alpaca-cleaned:train[:100]"]),
        (["dataset_split=train[:7]"], ["yahma/alpaca-cleaned:train[:7]"]),
        (["train_datasets=null", "dataset_name=null"], ["yahma/alpaca-cleaned:train[:100]"]),
        (["dataset_name=c/d"], ["c/d"]),
        (["dummy_run_full_ctx=true"], None),
    ],
)
def test_a_file_without_data_trains_on_what_skyrl_would(written: list[str], sources: list[str] | None) -> None:
    conversion = convert_overrides(["strategy=fsdp", *written])
    assert (conversion.tables.get("train_datasets"), conversion.refused) == (sources, ())

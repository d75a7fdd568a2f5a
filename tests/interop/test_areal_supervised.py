"""AReaL's SFT and RW experiments become runs of `kind = "sft"` and `kind = "reward_model"`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import PreferenceConfig, RewardModelConfig, SFTConfig, load
from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.report import Line

MODEL = {"model.path": "a/b", "model.optimizer.lr": "2e-5"}
SFT = {**MODEL, "train_dataset.type": "sft", "train_dataset.path": "rows.jsonl"}
RW = {**MODEL, "model.is_critic": True, "train_dataset.type": "rw", "train_dataset.path": "pairs.jsonl"}


DPO = {
    "actor.path": "a/b",
    "actor.optimizer.lr": "5e-7",
    "actor.beta": 0.2,
    "actor.loss_type": "ipo",
    "ref.path": "a/b",
    "train_dataset.type": "dpo",
    "train_dataset.path": "pairs.jsonl",
}


def line_of(keys: dict[str, Any], source: str) -> Line:
    return next(line for line in convert_keys(keys).lines if line.source == source)


def test_the_published_sft_files_are_sft_runs_with_their_numbers(reference: Path) -> None:
    files = json.loads((reference / "areal_yaml_keys.json").read_text())
    supervised = {name: keys for name, keys in files.items() if "model.path" in keys}
    assert supervised
    for name, keys in supervised.items():
        conversion = convert_keys(keys, name)
        assert conversion.root is SFTConfig
        assert conversion.tables["model"] == {"path": keys["model.path"]}
        assert conversion.tables["optimizer_config"]["lr"] == float(keys["model.optimizer.lr"])
        assert conversion.tables["optimizer_config"]["adam_eps"] == float(keys["model.optimizer.eps"])
        assert conversion.tables["batch_size"] == keys["train_dataset.batch_size"]
        assert {line.source.partition(".")[0] for line in conversion.lines if line.outcome == "not yet"} <= {
            "launcher",
            "allocation_mode",
        }


def test_a_split_that_the_file_names_replaces_that_of_the_scripts() -> None:
    keys = SFT | {"train_dataset.path": "a/b", "train_dataset.split": "train[:9]", "valid_dataset.path": "c/d"}
    tables = convert_keys(keys).tables
    assert (tables["train_datasets"], tables["eval_datasets"]) == (["a/b:train[:9]"], ["c/d:test"])
    assert "AReaL's scripts" not in line_of(keys, "train_dataset.path").reason
    assert "AReaL's scripts" in line_of(keys, "valid_dataset.path").reason


@pytest.mark.parametrize(
    ("keys", "root"),
    [
        (SFT, SFTConfig),
        (RW, RewardModelConfig),
        (MODEL, SFTConfig),
        ({**MODEL, "model.is_critic": True}, RewardModelConfig),
        ({"train_dataset.type": "rw"}, RewardModelConfig),
    ],
)
def test_row_type_or_value_head_selects_the_kind_of_run(keys: dict[str, Any], root: type[Any]) -> None:
    conversion = convert_keys(keys)
    assert conversion.root is root
    assert conversion.tables["kind"] == ("sft" if root is SFTConfig else "reward_model")
    assert [line for line in conversion.lines if line.outcome == "refused"] == []


@pytest.mark.parametrize(
    ("keys", "key", "value", "outcome", "reason"),
    [
        (SFT, "model.is_critic", True, "refused", "rows of type 'sft' train no value head"),
        (RW, "model.is_critic", False, "refused", "a reward model needs a value head"),
        (SFT, "valid_dataset.type", "rw", "refused", "rows of type 'sft'"),
        (SFT, "tokenizer_path", "a/b", "needless", "same as model.path, its default here"),
        (SFT, "tokenizer_path", "", "needless", "not set"),
        (SFT, "model.optimizer", None, "refused", "training needs an optimizer"),
        (SFT, "model.mb_spec.granularity", 2, "needless", "both rows of a pair always stay together"),
        (SFT, "evaluator.freq_steps", 10, "needless", "there is no valid_dataset"),
        (SFT, "allocation_mode", "megatron:d2t2p2", "not yet", "FSDP2 can use all 8 GPUs"),
        (SFT, "allocation_mode", "sglang:d4+fsdp:d4", "not yet", "unsupported allocation_mode"),
        (SFT, "allocation_mode", "sglang:d4", "refused", "is not a training backend"),
        (SFT, "cluster.n_nodes", 2, "renamed", ""),
        (SFT, "sglang.context_length", 32768, "needless", "supervised runs generate nothing"),
        (SFT, "train_dataset.drop_last", True, "needless", "incomplete batches are dropped by default"),
        (RW, "train_dataset.drop_last", False, "renamed", ""),
        (SFT, "valid_dataset.max_length", 99, "not yet", "a separate maximum length for evaluation"),
        (SFT, "model.optimizr.lr", 1e-5, "refused", "did you mean model.optimizer.lr?"),
    ],
)
def test_one_setting_converts_to_the_expected_outcome(
    keys: dict[str, Any], key: str, value: Any, outcome: str, reason: str
) -> None:
    line = line_of({**keys, key: value}, key)
    assert (line.outcome, reason in line.reason) == (outcome, True), line


def test_gpus_convert_to_ranks_on_nodes_of_eight() -> None:
    tables = convert_keys({**SFT, "allocation_mode": "fsdp:d16", "cluster.n_gpus_per_node": 8}).tables
    assert tables["placement"] == {"num_nodes": 2, "num_gpus_per_node": 8} and tables["strategy"] == "fsdp2"


def test_degrees_above_one_convert_to_parallel_sizes() -> None:
    tables = convert_keys({**SFT, "allocation_mode": "fsdp:d2t2c2"}).tables
    assert (tables["tensor_parallel_size"], tables["sequence_parallel_size"]) == (2, 2)
    assert tables["placement"]["num_gpus_per_node"] == 8


@pytest.mark.parametrize("order", [1, -1])
def test_autotp_is_deepspeeds_tensor_parallelism(order: int) -> None:
    keys = dict(list({"allocation_mode": "fsdp:d4", "model.ds_auto_tp.autotp_size": 2}.items())[::order])
    tables = convert_keys({**SFT, **keys}).tables
    assert (tables["strategy"], tables["tensor_parallel_size"]) == ("deepspeed", 2)


def test_a_dataset_of_a_hub_is_not_evaluated_on_the_rows_that_it_trains_on() -> None:
    tables = convert_keys({**SFT, "train_dataset.path": "o/gsm8k", "valid_dataset.path": "o/gsm8k"}).tables
    assert (tables["train_datasets"], tables["eval_datasets"]) == (["o/gsm8k:train"], ["o/gsm8k:test"])


def test_the_command_writes_a_file_that_loads_as_its_kind(tmp_path: Path) -> None:
    source, out = tmp_path / "rw.yaml", tmp_path / "rw.toml"
    source.write_text(
        "model: {path: a/b, is_critic: true, dtype: float32, optimizer: {lr: 1e-5, warmup_steps_proportion: 0.1}}\n"
        "train_dataset: {path: pairs.jsonl, type: rw, batch_size: 16, shuffle: false, max_length: 512}\n"
        "valid_dataset: {path: more.jsonl, type: rw, max_length: 512}\n"
        "recover: {mode: auto, retries: 2, freq_steps: 5, freq_secs: 600}\nevaluator: {freq_epochs: 1}\n"
        "total_train_steps: 30\n"
    )
    result = CliRunner().invoke(cli, ["config", "convert", str(source), "--from", "areal", "--to", str(out)])
    assert result.exit_code == 0 and "refused 0\n" in result.output
    run: Any = load([str(out)]).config
    assert isinstance(run, RewardModelConfig)
    assert (run.train_datasets, run.eval_datasets, run.max_length) == (("pairs.jsonl",), ("more.jsonl",), 512)
    assert (run.batch_size, run.sampler, run.bf16, run.num_steps) == (16, "sequential", False, 30)
    assert (run.optimizer_config.lr, run.optimizer_config.warmup_steps_proportion) == (1e-5, 0.1)
    assert (run.recover_mode, run.recover_retries, run.ckpt_interval) == ("auto", 2, (5, "600s"))
    assert run.eval_interval == "1 epoch"


def test_float16_converts_to_param_dtype_with_loss_scaling() -> None:
    keys = {"experiment_name": "x", "model.path": "m", "train_dataset.path": "rows", "train_dataset.type": "sft"}
    half = keys | {"model.dtype": "float16", "model.optimizer.initial_loss_scale": 1024.0}
    run = convert_keys(half).tables
    assert run["fsdp_config"]["mixed_precision"]["param_dtype"] == "float16"
    assert run["optimizer_config"]["initial_loss_scale"] == 1024.0
    assert convert_keys(half | {"model.dtype": "bfloat16"}).tables["bf16"] is True


def test_the_settings_of_dpo_may_be_at_the_root_as_in_areals_example() -> None:
    at_root = {name.replace("actor.beta", "beta").replace("actor.loss_type", "loss_type"): DPO[name] for name in DPO}
    assert "beta" in at_root
    for keys in (DPO, at_root):
        conversion = convert_keys(keys)
        assert (conversion.root, conversion.refused) == (PreferenceConfig, ())
        assert (conversion.tables["loss_type"], conversion.tables["beta"]) == (["ipo"], 0.2)


def test_a_dpo_experiment_keeps_its_loss_and_a_reference_of_its_own() -> None:
    tables = convert_keys(DPO).tables
    assert (tables["loss_type"], tables["beta"]) == (["ipo"], 0.2)
    assert "ref_model_path" not in tables
    assert convert_keys(DPO | {"ref.path": "a/sft"}).tables["ref_model_path"] == "a/sft"
    assert "docs/preferences.md" in line_of(DPO, "train_dataset.path").reason


def test_a_reference_in_another_type_is_refused_by_its_name() -> None:
    [line] = convert_keys(DPO | {"actor.dtype": "bfloat16", "ref.dtype": "float32"}).refused
    assert (line.source, line.outcome) == ("ref.dtype", "not yet")

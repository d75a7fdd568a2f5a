"""verl's supervised trainers become `kind = "sft"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from skyrl.config import SFTConfig, load
from skyrl.errors import ConfigError
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.report import Conversion, Line
from skyrl.interop.verl.convert import convert_keys, convert_verl
from skyrl.tree.sparse import as_toml_has_it

LEAST: dict[str, Any] = {"model.path": "a/b", "optim.lr": 1e-5, "data.train_files": "a.parquet"}


def loaded(conversion: Conversion, folder: Path) -> Any:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return load([file], environ={}).config


def of_script(text: str, folder: Path) -> Conversion:
    script = folder / "run.sh"
    script.write_text(text)
    return convert_verl(str(script))


def line_of(conversion: Conversion, source: str) -> Line:
    return next(line for line in (*conversion.lines, *conversion.defaults) if line.source == source)


def test_a_script_of_the_supervised_trainer_is_converted(tmp_path: Path) -> None:
    conversion = of_script(
        "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=~/a.parquet "
        "data.val_files=~/b.parquet data.train_batch_size=64 data.max_length=2048 data.truncation=right "
        "optim.lr=2e-5 optim.lr_warmup_steps_ratio=0.05 optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1 "
        "engine=fsdp engine.ulysses_sequence_parallel_size=2 engine.strategy=fsdp2 model=hf_model "
        "model.path=Qwen/Qwen3-8B model.lora_rank=16 model.lora_alpha=32 trainer.total_epochs=3 "
        "trainer.save_freq=after_each_epoch trainer.test_freq=20 trainer.logger=console trainer.resume_mode=disable\n",
        tmp_path,
    )
    assert (conversion.refused, conversion.root) == ((), SFTConfig)
    run = loaded(conversion, tmp_path)
    assert run.train_datasets == ("~/a.parquet",) and run.eval_datasets == ("~/b.parquet",)
    assert (run.batch_size, run.max_length, run.too_long, run.max_tokens_per_microbatch) == (64, 2048, "truncate", 8192)
    optimizer = run.optimizer_config
    assert (optimizer.lr, optimizer.scheduler, optimizer.warmup_steps_proportion) == (2e-5, "cosine", 0.05)
    assert (run.model.path, run.model.lora.rank, run.model.lora.alpha) == ("Qwen/Qwen3-8B", 16, 32)
    assert (run.num_epochs, run.ckpt_interval, run.eval_interval, run.resume_from) == (3, "1 epoch", 20, "")
    assert (run.strategy, run.sequence_parallel_size, run.placement.num_gpus_per_node) == ("fsdp2", 2, 8)
    assert (run.train_on_what, run.eval_before_train) == ("all_assistant_messages", False)


def test_verls_defaults_are_written(tmp_path: Path) -> None:
    conversion = convert_keys({"model.path": "a/b", "data.messages_key": "messages", "engine.strategy": "fsdp"})
    run = loaded(conversion, tmp_path)
    assert (run.optimizer_config.lr, run.batch_size, run.num_epochs, run.max_length) == (1e-3, 256, 4, 1024)
    assert {line.source for line in conversion.defaults} >= {
        "optim.lr",
        "data.train_batch_size",
        "trainer.total_epochs",
    }


def test_the_trainer_on_ray_names_its_gpus(tmp_path: Path) -> None:
    run = loaded(
        of_script(
            "python3 -m verl.trainer.sft_trainer_ray model.path=a/b data.train_files=a trainer.nnodes=2 "
            "trainer.n_gpus_per_node=4\n",
            tmp_path,
        ),
        tmp_path,
    )
    assert (run.placement.num_nodes, run.placement.num_gpus_per_node) == (2, 4)


def test_the_older_trainer_has_its_own_names_and_defaults(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc_per_node 4 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet "
        "data.multiturn.enable=true data.multiturn.messages_key=chat model.partial_pretrain=a/b "
        "data.micro_batch_size_per_gpu=2 use_remove_padding=true ulysses_sequence_parallel_size=2\n"
    )
    conversion = of_script(text, tmp_path)
    run = loaded(conversion, tmp_path)
    assert conversion.refused == ()
    assert (run.model.path, run.messages_key, run.micro_train_batch_size_per_gpu) == ("a/b", "chat", 2)
    assert (run.optimizer_config.lr, run.optimizer_config.adam_betas) == (1e-5, (0.9, 0.95))
    assert (run.optimizer_config.scheduler, run.optimizer_config.warmup_steps_proportion) == ("cosine", 0.1)
    assert (run.sequence_parallel_size, run.placement.num_gpus_per_node) == (2, 4)
    rows = of_script(text.replace("multiturn.enable=true", "prompt_key=question"), tmp_path)
    assert "rename them to instruction and output" in line_of(rows, "data.prompt_key").reason


@pytest.mark.parametrize(
    ("keys", "source", "outcome", "reason"),
    [
        ({"engine": "megatron"}, "engine", "not yet", "Megatron learners in supervised runs"),
        ({"engine.strategy": "veomni"}, "engine.strategy", "not yet", "strategy 'veomni'"),
        ({"data.custom_cls.path": "a.py"}, "data.custom_cls.path", "not yet", "custom dataset classes"),
        ({"data.truncation": "left", "data.pad_mode": "right"}, "data.truncation", "not yet", "cut from the left"),
        ({"data.truncation": "error"}, "data.truncation", "needless", "skipped and counted"),
        ({"data.train_max_samples": 100}, "data.train_max_samples", "not yet", "a subset of rows"),
        ({"model.trust_remote_code": True}, "model.trust_remote_code", "not yet", "code from a model's repository"),
        (
            {"optim.override_optimizer_config.lr": 2e-5},
            "optim.lr",
            "needless",
            "verl uses override_optimizer_config.lr instead",
        ),
        ({"optim.optimizer": "AdamW8bit"}, "optim.optimizer", "not yet", "the optimizer 'AdamW8bit'"),
        ({"engine.qat.enable": True}, "engine.qat.enable", "not yet", "quantization-aware training"),
        ({"trainer.test_freq": 5}, "trainer.test_freq", "needless", "there are no val_files"),
        ({"model.lora_alpha": 8}, "model.lora_alpha", "needless", "which is off"),
        ({"trainer.total_epoch": 8}, "trainer.total_epoch", "refused", "not known to this converter"),
    ],
)
def test_every_setting_that_is_left_out_has_its_reason(
    keys: dict[str, Any], source: str, outcome: str, reason: str
) -> None:
    line = line_of(convert_keys(LEAST | keys), source)
    assert (line.outcome, line.targets) == (outcome, ())
    assert reason in line.reason


@pytest.mark.parametrize("kind", ["sft", "fsdp"])
def test_a_dump_of_verls_own_is_read_from_a_file(kind: str, tmp_path: Path) -> None:
    tree = peer_trees("verl", kind)[-1]
    nested: dict[str, Any] = {}
    for key, value in tree.defaults.items():
        *tables, name = key.split(".")
        table = nested
        for table_name in tables:
            table = table.setdefault(table_name, {})
        table[name] = value
    file = tmp_path / "dump.yaml"
    file.write_text(yaml.safe_dump(nested))
    conversion = convert_verl(str(file))
    assert conversion.refused == () and f"verl {tree.version} " in conversion.notice


def test_steps_that_are_profiled_are_listed(tmp_path: Path) -> None:
    run = loaded(convert_keys(LEAST | {"profiler.enable": True, "trainer.profile_interval": [3, 5]}), tmp_path)
    assert run.profile_steps == (3, 4, 5)


@pytest.mark.parametrize("table", ["", "actor_rollout_ref:\n  "])
def test_a_file_with_a_model_of_images_is_refused(table: str, tmp_path: Path) -> None:
    indent = "  " if not table else "    "
    file = tmp_path / "run.yaml"
    file.write_text(f"{table}model:\n{indent}path: Qwen/Qwen3-VL-2B\noptim:\n  lr: 1.0e-5\n")
    with pytest.raises(ConfigError, match="trains on rows with images"):
        convert_verl(str(file))

"""No field of a supervised tree does nothing: a component reads it in some run, or a table has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.config import RewardModelConfig, SFTConfig, TrainerConfig, compose
from skyrl.config.kinds import kind_of
from skyrl.experiments.collaborators import start_processes
from skyrl.experiments.experiment import experiment_class
from skyrl.learners.zero_config import engine_config
from skyrl.tree.classes import leaf_paths
from tests.config.test_every_field_is_read import (
    _FSDP_READERS,
    NVME,
    WHOLE,
    is_component,
    recorded,
    separate,
)
from tests.supervised_run import chats, pairs, settings, write

HANDED_ON = {
    "batch_size": "train_batch_size",
    "max_tokens_per_microbatch": "max_tokens_per_microbatch",
    "micro_train_batch_size_per_gpu": "micro_train_batch_size_per_gpu",
    "use_sequence_packing": "use_sample_packing",
    "resume_from": "resume_path",
    "ckpt_path": "ckpt_path",
    **{
        name: name
        for name in (
            "strategy", "device", "seed", "deterministic", "compute_dtype", "attention", "recompute_activations",
            "disable_fast_tokenizer", "resume_with_changes", "recover_mode", "max_ckpts_to_keep",
            "log_path", "logger", "run_path", "export_path", "ckpt_interval", "hf_save_interval", "eval_interval",
            "eval_before_train",
        )
    },
    **{f"placement.{name}": name for name in ("executor", "ray_address")},
    **{f"placement.{name}": name for name in (
        "start_timeout_seconds", "call_timeout_seconds", "heartbeat_timeout_seconds"
    )},
}  # fmt: skip
"""What `SupervisedConfig.trainer` says in the terms of the RL tree, which learners, checkpoints and sessions read."""

DECIDED_BY_RULES = {
    "bf16": "compute_dtype",
    "flash_attn": "attention",
    "gradient_checkpointing": "recompute_activations",
    "run_name": "run_path",
}

READ_ELSEWHERE = {
    "kind",  # by the command, as what follows
    "recover_retries",
    "optimizer_config.num_decay_steps",  # by one schedule
    "optimizer_config.offload_after_step",  # where others want the GPU
    "faults.max_skipped_steps",  # by reinforcement learning, as their effects say
    "faults.max_roll_backs",
    *(f"fsdp_config.{name}" for name in _FSDP_READERS),  # on several ranks
    "chat_template.source",  # where there is a name or a path
    "eval_dataset_names",  # by `evaluation_names`, which gives the names to components
}


@contextmanager
def recorded_trainers() -> Iterator[set[str]]:
    """Names that components read of any `TrainerConfig`, or of its placement."""
    reads: set[str] = set()

    def read(self: Any, name: str) -> Any:
        if is_component(sys._getframe(1).f_globals.get("__name__", "")):
            reads.add(name)
        return object.__getattribute__(self, name)

    classes: list[Any] = [TrainerConfig, type(TrainerConfig().placement)]
    for cls in classes:
        cls.__getattribute__ = read
    try:
        yield reads
    finally:
        for cls in classes:
            del cls.__getattribute__


def runs(nano: Path, out: Path) -> Iterator[Any]:
    """Of each kind, one that goes on after its third step, with everything that one process does."""
    held_out = write(out / "held_out.jsonl", chats(8, seed=1))
    for kind, more in {"sft": {"eval_datasets": (held_out,), "eval_interval": 2}, "reward_model": {}}.items():
        folder = out / kind
        folder.mkdir()
        changes = {
            **more,
            "fsdp_config__mixed_precision": WHOLE,
            "ckpt_interval": 3,
            "hf_save_interval": 3,
            "recover_mode": "auto",
            "train_dataset_weights": (1.0,),
        }
        yield compose([], settings(nano, folder, kind, **changes, num_steps=3)).config
        named = str(folder / "run" / "checkpoints" / "global_step_3")
        again = {**changes, "recover_mode": None, "resume_from": named, "num_steps": 4, "faults__on_non_finite": "skip"}
        yield compose([], settings(nano, folder, kind, **again)).config
        other = {"model__lora__rank": 2, "num_steps": 1, "max_length": 20, "run_path": str(folder / "other")}
        rows = chats(40) if kind == "sft" else pairs(40)
        longer = {"instruction": "a" * 20, "output": "b"} if kind == "sft" else {**rows[0], "chosen": "x" * 20}
        bad = {"train_datasets": (write(folder / "bad.jsonl", [*rows, longer, {}]),)}
        yield compose([], settings(nano, folder, kind, **other, **bad, bad_rows="skip")).config


@pytest.fixture(scope="module")
def reads(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[type[Any], set[str]]:
    """By root, the paths that are read."""
    out = tmp_path_factory.mktemp("reads")
    found: dict[type[Any], set[str]] = {SFTConfig: set(), RewardModelConfig: set()}
    with recorded_trainers() as of_trainers:
        for written in runs(nano, out):
            run = separate(written)
            with recorded(run) as here:
                experiment_class(run)(run).run()
            found[type(run)] |= {path for _, path in here}
            on_ray = separate(
                evolve(run, placement=evolve(run.placement, executor="ray"), deepspeed_config=with_nvme(run))
            )
            with recorded(on_ray) as there:
                tell_the_processes(on_ray)
            found[type(run)] |= {path for _, path in there}
    for paths in found.values():
        paths |= {path for path, name in HANDED_ON.items() if name in of_trainers}
    return found


def with_nvme(run: Any) -> Any:
    zero = run.deepspeed_config.zero_optimization
    offloads = {name: evolve(getattr(zero, name), **NVME) for name in ("offload_param", "offload_optimizer")}
    return evolve(run.deepspeed_config, zero_optimization=evolve(zero, **offloads))


def tell_the_processes(run: Any) -> None:
    """What is read on the way to processes that are not started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.processes.ray_processes.RayProcesses", lambda *_, **__: None)
        start_processes(run)
    engine_config(
        run.deepspeed_config,
        run.optimizer_config,
        compute_dtype=torch.float32,
        micro_batch_rows=1,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("root", [SFTConfig, RewardModelConfig])
def test_every_field_is_read_by_a_component_or_listed(reads: dict[type[Any], set[str]], root: type[Any]) -> None:
    known = reads[root] | READ_ELSEWHERE | set(kind_of(root).unimplemented_paths) | set(DECIDED_BY_RULES)
    assert {path for path, _ in leaf_paths(root)} - known == set()


@pytest.mark.parametrize("root", [SFTConfig, RewardModelConfig])
def test_nothing_that_is_read_is_still_listed(reads: dict[type[Any], set[str]], root: type[Any]) -> None:
    assert not reads[root] & READ_ELSEWHERE
    assert set(DECIDED_BY_RULES.values()) <= reads[root]

"""What a supervised run is told about values that do nothing in it, and which it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import load
from skyrl.config.loading.check import check
from skyrl.config.loading.resolve import resolve_with_origins

SFT: dict[str, Any] = {"kind": "sft", "model.path": "m", "train_datasets": ["rows"], "device": "cpu"}
EVALUATED: dict[str, Any] = {"eval_datasets": ["others"], "eval_interval": 2}


def said(values: dict[str, Any]) -> set[tuple[str, str]]:
    """Severity and path of what is reported."""
    loaded: Any = load([], SFT | values)
    run, origins, broken = resolve_with_origins(loaded.config, loaded.origins)
    return {(problem.severity, problem.path) for problem in check(run, origins, broken)}


@pytest.mark.parametrize(
    ("path", "value", "acts"),
    [
        ("eval_datasets", ["others"], {"eval_before_train": True}),
        ("eval_dataset_names", ["other"], EVALUATED),
        ("chat_template.source", "file", {"chat_template.name_or_path": "template.jinja"}),
        ("max_ckpts_to_keep", 2, {"ckpt_interval": 5}),
        ("export_path", "exports", {"hf_save_interval": "1 epoch"}),
        ("optimizer_config.max_skipped_updates", 1, {"faults.on_non_finite": "skip"}),
        ("micro_train_batch_size_per_gpu", 1, {"max_tokens_per_microbatch": -1}),
    ],
)
def test_a_value_acts_under_its_condition_alone(path: str, value: Any, acts: dict[str, Any]) -> None:
    off = {"max_tokens_per_microbatch": 64}
    assert ("warning", path) in said({**off, path: value})
    assert ("warning", path) not in said({**off, **acts, path: value})


@pytest.mark.parametrize("path", ["optimizer_config.offload_after_step", "faults.max_skipped_steps"])
def test_what_supervised_runs_do_not_do_is_told(path: str) -> None:
    assert ("warning", path) in said({path: False if path.endswith("step") else 1})


def test_checkpoints_have_a_folder_where_they_are_saved_or_resumed_from() -> None:
    folder = {"ckpt_path": "checkpoints"}
    assert ("warning", "ckpt_path") not in said(folder)  # the newest one there is resumed from
    assert ("warning", "ckpt_path") not in said({**folder, "resume_from": "", "ckpt_interval": 5})
    assert ("warning", "ckpt_path") in said({**folder, "resume_from": ""})
    assert ("warning", "ckpt_path") in said({**folder, "recover_mode": "disabled"})
    assert ("warning", "ckpt_path") not in said({**folder, "resume_from": "", "recover_mode": "fault"})


def test_changes_are_resumed_with_where_a_run_may_resume() -> None:
    assert ("warning", "resume_with_changes") not in said({"resume_with_changes": True})
    assert ("warning", "resume_with_changes") in said({"resume_with_changes": True, "resume_from": ""})


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"model.lora.rank": 4, "model.lora.init_method": "pissa"}, "model.lora.init_method"),
        ({"model.lora.rank": 4, "model.lora.exclude_modules": "q_proj"}, "model.lora.exclude_modules"),
        ({"placement.num_gpus_per_node": 2, "fsdp_config.fsdp_size": 3}, "fsdp_config.fsdp_size"),
        ({"fsdp_config.wrap_policy": {"other": 1}, "placement.num_gpus_per_node": 2}, "fsdp_config.wrap_policy"),
        ({"strategy": "deepspeed", "deepspeed_config.prescale_gradients": True}, "deepspeed_config.prescale_gradients"),
    ],
)
def test_a_model_that_cannot_be_made_so_is_refused(values: dict[str, Any], path: str) -> None:
    assert ("error", path) in said(values)

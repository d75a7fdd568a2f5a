"""What DeepSpeed is told, field by field."""

from __future__ import annotations

import re
import sys
from typing import Any

import attrs
import pytest
import torch

from skyrl.config import DeepSpeedConfig, OffloadConfig, OptimizerConfig, TrainerConfig, ZeroOptimizationConfig
from skyrl.errors import UserError
from skyrl.installation import install_command
from skyrl.learners.ranks import Ranks
from skyrl.learners.row_support import RowSupport
from skyrl.learners.strategy import ModelSource, StrategyContext
from skyrl.learners.zero.strategy import Zero, engine_config, import_deepspeed
from skyrl.tree import evolve_at

CPU = torch.device("cpu")


def told(config: DeepSpeedConfig, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"compute_dtype": torch.float32, "micro_batch_rows": 2, "device": CPU}
    return engine_config(config, OptimizerConfig(max_grad_norm=0.7), **(facts | changes))


FIELDS: dict[str, Any] = {
    "stage": 2,
    "overlap_comm": False,
    "contiguous_gradients": False,
    "round_robin_gradients": True,
    "zero_hpz_partition_size": 4,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "reduce_bucket_size": 11,
    "allgather_bucket_size": 12,
    "sub_group_size": 13,
    "stage3_max_live_parameters": 14,
    "stage3_max_reuse_distance": 15,
    "stage3_prefetch_bucket_size": 16,
    "stage3_param_persistence_threshold": 17,
    "stage3_gather_16bit_weights_on_model_save": True,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_zero_reaches_deepspeed(name: str) -> None:
    changed = DeepSpeedConfig(zero_optimization=ZeroOptimizationConfig(**{name: FIELDS[name]}))
    assert told(changed)["zero_optimization"][name] == FIELDS[name]
    assert told(DeepSpeedConfig())["zero_optimization"].get(name) != FIELDS[name]


def test_these_are_all_fields_of_zero() -> None:
    zero: Any = ZeroOptimizationConfig()
    names = {field.name for field in attrs.fields(type(zero))}
    assert names == {*FIELDS, "offload_param", "offload_optimizer"}


@pytest.mark.parametrize(
    ("config", "path", "expected"),
    [
        (DeepSpeedConfig(communication_data_type="bfloat16"), "communication_data_type", "bf16"),
        (DeepSpeedConfig(prescale_gradients=True), "prescale_gradients", True),
        (DeepSpeedConfig(wall_clock_breakdown=True), "wall_clock_breakdown", True),
        (DeepSpeedConfig(), "communication_data_type", None),
        (DeepSpeedConfig(), "gradient_clipping", 0.7),
        (DeepSpeedConfig(), "train_micro_batch_size_per_gpu", 2),
        (DeepSpeedConfig(), "bf16", {"enabled": False}),
    ],
)
def test_a_setting_reaches_deepspeed(config: DeepSpeedConfig, path: str, expected: Any) -> None:
    assert told(config).get(path) == expected


def test_sizes_left_to_deepspeed_are_left_out() -> None:
    zero: Any = ZeroOptimizationConfig()
    sizes = {name for name, value in attrs.asdict(zero).items() if value == "auto"}
    assert len(sizes) == 7
    assert not sizes & set(told(DeepSpeedConfig())["zero_optimization"])


def test_bfloat16_is_switched_on_where_something_is_sharded() -> None:
    assert told(DeepSpeedConfig(), compute_dtype=torch.bfloat16)["bf16"] == {"enabled": True}
    unsharded = DeepSpeedConfig(zero_optimization=ZeroOptimizationConfig(stage=0))
    assert told(unsharded, compute_dtype=torch.bfloat16)["bf16"] == {"enabled": False}


def test_offloading_is_told_where_it_exists_and_memory_is_pinned_for_a_gpu_only() -> None:
    drive = OffloadConfig(device="nvme", nvme_path="/drive", pin_memory=True)
    zero = ZeroOptimizationConfig(offload_param=OffloadConfig(device="cpu", pin_memory=True), offload_optimizer=drive)
    on_cpu = told(DeepSpeedConfig(zero_optimization=zero))["zero_optimization"]
    assert on_cpu["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert on_cpu["offload_optimizer"] == {"device": "nvme", "pin_memory": False, "nvme_path": "/drive"}
    on_gpu = told(DeepSpeedConfig(zero_optimization=zero), device=torch.device("cuda"))["zero_optimization"]
    assert on_gpu["offload_param"] == {"device": "cpu", "pin_memory": True}
    at_stage_2 = told(DeepSpeedConfig(zero_optimization=evolve_at(zero, "stage", 2)))["zero_optimization"]
    assert "offload_param" not in at_stage_2 and "offload_optimizer" in at_stage_2


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=re.escape(install_command("deepspeed"))):
        import_deepspeed(CPU)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_that_never_changes_computes_in_the_configured_type_below_stage_3(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.learners.zero.strategy.import_deepspeed", lambda *_: None)  # there is no engine
    rows = RowSupport(attention="sdpa", pack=False, share_prompts=False)
    source = ModelSource(load=lambda device: torch.nn.Linear(2, 2), meta_model=lambda: None, rows=rows)
    trainer = TrainerConfig()
    context = StrategyContext(
        run=trainer,
        section=trainer.ref,
        ranks=Ranks(),
        device=CPU,
        compute_dtype=torch.bfloat16,
        optimizer=None,
    )
    zero = Zero(source, DeepSpeedConfig(zero_optimization=ZeroOptimizationConfig(stage=stage)), context)
    with zero.computing():
        assert zero.model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert zero.model.weight.dtype is torch.float32

"""`resolve()` for supervised runs: what follows from the rest."""

from __future__ import annotations

from typing import Any

from skyrl.config.machine import has_cuda_device
from skyrl.config.supervised import SupervisedConfig
from skyrl.tree.rules import Rule, rule


@rule(writes="device", reads=(), unset="auto")
def device_is_what_the_machine_has(run: SupervisedConfig) -> str:
    """A CUDA device where there is one, the CPU otherwise."""
    return "cuda" if has_cuda_device() else "cpu"


@rule(writes="placement.executor", reads=("placement.num_nodes", "placement.num_gpus_per_node"), unset="auto")
def one_rank_needs_one_process(run: SupervisedConfig) -> str:
    """Ray is for several ranks."""
    alone = run.placement.num_nodes * run.placement.num_gpus_per_node == 1
    return "in_process" if alone else "ray"


@rule(writes="compute_dtype", reads=("bf16", "device"))
def bf16_is_for_accelerators(run: SupervisedConfig) -> str:
    """On a CPU the product of small float32 matrices is as fast and exact."""
    return "bfloat16" if run.bf16 and run.device == "cuda" else "float32"


@rule(writes="attention", reads=("flash_attn", "device"))
def flash_attention_needs_cuda(run: SupervisedConfig) -> str:
    """FlashAttention has no CPU kernel."""
    return "flash_attention_2" if run.flash_attn and run.device == "cuda" else "sdpa"


@rule(writes="recompute_activations", reads=("gradient_checkpointing", "device"))
def checkpointing_saves_device_memory(run: SupervisedConfig) -> bool:
    """Gradient checkpointing trades time for accelerator memory."""
    return run.gradient_checkpointing and run.device == "cuda"


@rule(writes="run_path", reads=("run_name",))
def a_run_has_a_folder_of_its_name(run: SupervisedConfig) -> str:
    """Below the folder that the command runs in."""
    return f"runs/{run.run_name}"


@rule(writes="ckpt_path", reads=("run_path", "run_name"))
def checkpoints_lie_in_the_runs_folder(run: SupervisedConfig) -> str:
    """Beside the metrics."""
    return f"{_folder(run)}/checkpoints"


@rule(writes="export_path", reads=("run_path", "run_name"))
def exports_lie_in_the_runs_folder(run: SupervisedConfig) -> str:
    """Beside the metrics."""
    return f"{_folder(run)}/exports"


@rule(writes="log_path", reads=("run_path", "run_name"))
def logs_lie_in_the_runs_folder(run: SupervisedConfig) -> str:
    """Beside the metrics."""
    return f"{_folder(run)}/logs"


def _folder(run: SupervisedConfig) -> str:
    return (run.run_path or f"runs/{run.run_name}").rstrip("/")


SUPERVISED_RULES: tuple[Rule[Any], ...] = (
    device_is_what_the_machine_has,
    one_rank_needs_one_process,
    bf16_is_for_accelerators,
    flash_attention_needs_cuda,
    checkpointing_saves_device_memory,
    a_run_has_a_folder_of_its_name,
    checkpoints_lie_in_the_runs_folder,
    exports_lie_in_the_runs_folder,
    logs_lie_in_the_runs_folder,
)
"""In order: a rule comes after those that write what it reads."""

"""Rules and effects of the fields that every kind of run has.

The functions read the table that holds the fields: `trainer` of a reinforcement-learning run, the root of a supervised
one. `below("trainer")` lifts them into the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from skyrl.config.foundation.intervals import read_interval
from skyrl.config.settings.strategies import facts_of
from skyrl.tree.rules import Condition, Effect, Rule, effects, fields_in, is_one, listed, rule

if TYPE_CHECKING:
    from skyrl.config.settings.supervised_root import SupervisedConfig
    from skyrl.config.settings.trainer import TrainerConfig

    Trainer: TypeAlias = TrainerConfig | SupervisedConfig


def has_cuda_device() -> bool:
    """Whether the kernel knows an NVIDIA GPU. Reads the file system only: no driver is loaded, no library imported."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def has_flash_attention() -> bool:
    """Whether the package `flash-attn` is installed. No library is imported. FlashAttention 4 is a different
    distribution, whose kernels transformers does not use for `flash_attention_2`.
    """
    return _is_installed("flash-attn")


def has_liger_kernel() -> bool:
    """Whether the distribution liger-kernel is installed."""
    return _is_installed("liger-kernel")


def _is_installed(distribution: str) -> bool:
    """Whether a distribution is installed. The import takes a tenth of `skyrl config check`: only CUDA runs need it."""
    from importlib import metadata

    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@rule(writes="device", reads=(), unset="auto")
def device_follows_machine(trainer: Trainer) -> str:
    """The device is CUDA if there is a CUDA device, and the CPU otherwise."""
    return "cuda" if has_cuda_device() else "cpu"


@rule(writes="compute_dtype", reads=("bf16", "device"))
def bf16_needs_cuda(trainer: Trainer) -> str:
    """On a CPU the product of small float32 matrices is as fast and exact, so `bf16` has an effect on CUDA only."""
    return "bfloat16" if trainer.bf16 and trainer.device == "cuda" else "float32"


@rule(writes="attention", reads=("flash_attn", "device"), asks_machine=True)
def attention_follows_installed_kernels(trainer: Trainer) -> str:
    """Torch's own attention serves where FlashAttention has no kernel (a CPU) or its package is not installed."""
    wanted = trainer.flash_attn and trainer.device == "cuda"
    return "flash_attention_2" if wanted and has_flash_attention() else "sdpa"


@rule(writes="use_liger_kernel", reads=("device",), asks_machine=True)
def liger_kernels_need_cuda(trainer: Trainer) -> bool:
    """Fused kernels are for GPUs, and come with a package of their own."""
    return trainer.device == "cuda" and has_liger_kernel()


@rule(writes="recompute_activations", reads=("gradient_checkpointing", "device"))
def checkpointing_saves_device_memory(trainer: Trainer) -> bool:
    """Gradient checkpointing trades time for accelerator memory; on a CPU it would only cost the time."""
    return trainer.gradient_checkpointing and trainer.device == "cuda"


@rule(writes="run_path", reads=("run_name",))
def run_path_follows_run_name(trainer: Trainer) -> str:
    """The run's folder is `runs/<run_name>`, below the folder that the command runs in."""
    return f"runs/{trainer.run_name}"


@rule(writes="log_path", reads=("run_path", "run_name"))
def log_path_follows_run_path(trainer: Trainer) -> str:
    """Logs are in the run's folder, beside the metrics."""
    return f"{folder_of(trainer)}/logs"


def folder_of(trainer: Trainer) -> str:
    """The run's own folder, without a slash at its end."""
    return (trainer.run_path or f"runs/{trainer.run_name}").rstrip("/")


EVERY_KIND_RULES: tuple[Rule[Any], ...] = (
    device_follows_machine,
    bf16_needs_cuda,
    attention_follows_installed_kernels,
    liger_kernels_need_cuda,
    checkpointing_saves_device_memory,
    run_path_follows_run_name,
    log_path_follows_run_path,
)
"""Derivation rules in order: a rule comes after those that write what it reads."""


def _named(trainer: Trainer) -> frozenset[str]:
    """Names of the trackers besides the console."""
    names = (trainer.logger,) if isinstance(trainer.logger, str) else trainer.logger
    return frozenset(names) - {"console"}


def names_a_service(trainer: Trainer) -> bool:
    """Whether `logger` names a tracker besides the console."""
    return bool(_named(trainer))


def saves(trainer: Trainer) -> bool:
    """Whether checkpoints are saved while the run trains."""
    return read_interval(trainer.ckpt_interval).ever


def _names(*services: str) -> Condition:
    words = f"logger names {listed(services, 'or')}"
    return Condition(words, lambda trainer: not _named(trainer).isdisjoint(services))


def _handles_a_lost_rank(*policies: str) -> Condition:
    words = f"the run is on Ray, and on_lost_rank is {' or '.join(policies)}"
    return Condition(words, lambda trainer: _ON_RAY.holds(trainer) and trainer.faults.on_lost_rank in policies)


def _on_cuda(words: str) -> Condition:
    return Condition(f"the device is cuda{words}", lambda trainer: trainer.device == "cuda")


_ON_RAY = Condition("the run is on Ray", lambda trainer: trainer.placement.executor != "in_process")
_SERVICE = Condition("logger names a tracker besides the console", names_a_service)
_RUN_IS_NAMED = Condition(
    "run_path is left out, or logger names a tracker besides the console (`skyrl launch` names its job after it)",
    lambda trainer: trainer.run_path == f"runs/{trainer.run_name}" or names_a_service(trainer),
)
_OWN_KERNELS = Condition(
    "the strategy is not megatron, which has fused kernels of its own",
    lambda trainer: not facts_of(trainer).own_modules,
)
_OWN_RECOMPUTATION = Condition(
    "the strategy is not megatron, whose recomputation is in megatron_config.transformer_config_kwargs",
    lambda trainer: facts_of(trainer).recomputation is None,
)
_RECOMPUTES = Condition("activations are recomputed", lambda trainer: bool(trainer.recompute_activations))
_STALL_LIMIT = Condition(
    "stall_timeout_seconds is a time", lambda trainer: trainer.faults.stall_timeout_seconds is not None
)

EVERY_KIND_EFFECTS: tuple[Effect, ...] = (
    Effect("project_name", _SERVICE),
    Effect("run_name", _RUN_IS_NAMED),
    Effect("max_ckpts_to_keep", Condition("checkpoints are saved (ckpt_interval)", saves)),
    Effect("log_path", _ON_RAY),
    Effect("recover_retries", is_one("recover_mode", "auto", "fault")),
    *effects(
        _ON_RAY,
        *fields_in("placement", "ray_address start_timeout_seconds call_timeout_seconds heartbeat_timeout_seconds"),
    ),
    Effect("bf16", _on_cuda(" (a CPU computes in float32)")),
    Effect("flash_attn", _on_cuda(" (a CPU uses sdpa)")),
    Effect("use_liger_kernel", _on_cuda("") & _OWN_KERNELS),
    Effect("gradient_checkpointing", _on_cuda(" (a CPU has the memory)") & _OWN_RECOMPUTATION),
    Effect("offload_activations", _RECOMPUTES),
    *(Effect(f"trackers.{name}", _names(name)) for name in ("wandb", "swanlab", "mlflow", "tensorboard")),
    *effects(_SERVICE, *fields_in("trackers", "tags notes group sample_rows finish_seconds python")),
    Effect("trackers.job_type", _names("wandb", "swanlab", "mlflow")),
    Effect("faults.on_lost_rank", _ON_RAY),
    Effect("faults.max_lost_ranks", _handles_a_lost_rank("wait", "shrink")),
    Effect("faults.lost_rank_timeout_seconds", _handles_a_lost_rank("wait")),
    Effect("faults.on_stall", _STALL_LIMIT),
)

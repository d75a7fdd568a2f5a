"""Rules and effects of the fields that every kind of run has.

The functions read the table that holds the fields: `trainer` of a reinforcement-learning run, the root of a supervised
one. `below("trainer")` lifts them into the first.
"""

from __future__ import annotations

from pathlib import Path

from skyrl.config.derive import rules_in
from skyrl.config.foundation.intervals import read_interval
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.trackers import TrackersConfig
from skyrl.tree.classes import tables_of
from skyrl.tree.rules import Condition, Effect, effects, fields_in, is_one, join_choices, rule


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
def device_follows_machine(run: RunBasics) -> str:
    """The device is CUDA if there is a CUDA device, and the CPU otherwise."""
    return "cuda" if has_cuda_device() else "cpu"


@rule(writes="compute_dtype", reads=("bf16", "device"))
def bf16_needs_cuda(run: RunBasics) -> str:
    """On a CPU the product of small float32 matrices is as fast and exact, so `bf16` has an effect on CUDA only."""
    return "bfloat16" if run.bf16 and run.device == "cuda" else "float32"


@rule(writes="attention", reads=("flash_attn", "device"), asks_machine=True)
def attention_follows_installed_kernels(run: RunBasics) -> str:
    """Torch's own attention serves where FlashAttention has no kernel (a CPU) or its package is not installed."""
    requested = run.flash_attn and run.device == "cuda"
    return "flash_attention_2" if requested and has_flash_attention() else "sdpa"


@rule(writes="use_liger_kernel", reads=("device",), asks_machine=True)
def liger_kernels_need_cuda(run: RunBasics) -> bool:
    """Fused kernels are for GPUs, and come with a package of their own."""
    return run.device == "cuda" and has_liger_kernel()


@rule(writes="recompute_activations", reads=("gradient_checkpointing", "device"))
def checkpointing_saves_device_memory(run: RunBasics) -> bool:
    """Gradient checkpointing trades time for accelerator memory; on a CPU it would only cost the time."""
    return run.gradient_checkpointing and run.device == "cuda"


@rule(writes="run_path", reads=("run_name",))
def run_path_follows_run_name(run: RunBasics) -> str:
    """The run's folder is `runs/<run_name>`, below the folder that the command runs in."""
    return f"runs/{run.run_name}"


@rule(writes="log_path", reads=("run_path", "run_name"))
def log_path_follows_run_path(run: RunBasics) -> str:
    """Logs are in the run's folder, beside the metrics."""
    return f"{folder_of(run)}/logs"


@rule(writes="ckpt_path", reads=("run_path", "run_name"))
def checkpoint_path_follows_run_path(run: RunBasics) -> str:
    """Beside the metrics."""
    return f"{folder_of(run)}/checkpoints"


@rule(writes="export_path", reads=("run_path", "run_name"))
def export_path_follows_run_path(run: RunBasics) -> str:
    """Beside the metrics."""
    return f"{folder_of(run)}/exports"


def folder_of(run: RunBasics) -> str:
    """The run's own folder, without a slash at its end."""
    return (run.run_path or f"runs/{run.run_name}").rstrip("/")


EVERY_KIND_RULES = rules_in(__name__)
"""Derivation rules in order: a rule comes after those that write what it reads."""


def _tracker_names(run: RunBasics) -> frozenset[str]:
    """Names of the trackers besides the console."""
    names = (run.logger,) if isinstance(run.logger, str) else run.logger
    return frozenset(names) - {"console"}


def names_a_service(run: RunBasics) -> bool:
    """Whether `logger` names a tracker besides the console."""
    return bool(_tracker_names(run))


def saves(run: RunBasics) -> bool:
    """Whether checkpoints are saved while the run trains."""
    return read_interval(run.ckpt_interval).ever


def evaluates(run: RunBasics) -> bool:
    """Whether the run ever evaluates."""
    return run.eval_before_train or read_interval(run.eval_interval).ever


def may_resume(run: RunBasics) -> bool:
    """Whether the run may start from a checkpoint."""
    return run.recover_mode != "disabled" and (run.resume_mode != "none" or run.recover_mode is not None)


def _names(*services: str) -> Condition:
    words = f"logger names {join_choices(services, 'or')}"
    return Condition(words, lambda run: not _tracker_names(run).isdisjoint(services))


def _handles_a_lost_rank(*policies: str) -> Condition:
    words = f"the run is on Ray, and on_lost_rank is {' or '.join(policies)}"
    return Condition(words, lambda run: _ON_RAY.holds(run) and run.faults.on_lost_rank in policies)


def _cuda_condition(words: str) -> Condition:
    return Condition(f"the device is cuda{words}", lambda run: run.device == "cuda")


_ON_RAY = Condition("the run is on Ray", lambda run: run.placement.executor != "in_process")
_SERVICE = Condition("logger names a tracker besides the console", names_a_service)
_RUN_IS_NAMED = Condition(
    "run_path is left out, or logger names a tracker besides the console (`skyrl launch` names its job after it)",
    lambda run: run.run_path == f"runs/{run.run_name}" or names_a_service(run),
)
_OWN_KERNELS = Condition(
    "the strategy is not megatron, which has fused kernels of its own",
    lambda run: not facts_of(run).own_modules,
)
_OWN_RECOMPUTATION = Condition(
    "the strategy is not megatron, whose recomputation is in megatron_config.transformer_config_kwargs",
    lambda run: facts_of(run).recomputation is None,
)
_RECOMPUTES = Condition("activations are recomputed", lambda run: bool(run.recompute_activations))
_STALL_LIMIT = Condition("stall_timeout_seconds is a time", lambda run: run.faults.stall_timeout_seconds is not None)

EVERY_KIND_EFFECTS: tuple[Effect, ...] = (
    Effect("project_name", _SERVICE),
    Effect("run_name", _RUN_IS_NAMED),
    Effect("max_ckpts_to_keep", Condition("checkpoints are saved (ckpt_interval)", saves)),
    Effect("ckpt_path", Condition("checkpoints are saved or resumed from", lambda run: saves(run) or may_resume(run))),
    Effect("log_path", _ON_RAY),
    Effect("recover_retries", is_one("recover_mode", "auto", "fault")),
    *effects(
        _ON_RAY,
        *fields_in("placement", "ray_address start_timeout_seconds call_timeout_seconds heartbeat_timeout_seconds"),
    ),
    Effect("bf16", _cuda_condition(" (a CPU computes in float32)")),
    Effect("flash_attn", _cuda_condition(" (a CPU uses sdpa)")),
    Effect("use_liger_kernel", _cuda_condition("") & _OWN_KERNELS),
    Effect("gradient_checkpointing", _cuda_condition(" (a CPU has the memory)") & _OWN_RECOMPUTATION),
    Effect("offload_activations", _RECOMPUTES),
    *(Effect(f"trackers.{name}", _names(name)) for name in tables_of(TrackersConfig)),
    *effects(_SERVICE, *fields_in("trackers", "tags notes group sample_rows finish_seconds python")),
    Effect("trackers.job_type", _names("wandb", "swanlab", "mlflow")),
    Effect("faults.on_lost_rank", _ON_RAY),
    Effect("faults.max_lost_ranks", _handles_a_lost_rank("wait", "shrink")),
    Effect("faults.lost_rank_timeout_seconds", _handles_a_lost_rank("wait")),
    Effect("faults.on_stall", _STALL_LIMIT),
)

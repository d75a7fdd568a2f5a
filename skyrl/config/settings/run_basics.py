"""The settings that every kind of run has: device and arithmetic, evaluation, checkpoints, folders, trackers, faults.

A reinforcement-learning run has them in its table `trainer`, a supervised run at its root.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from skyrl.config.foundation.entry import LocatedConfig
from skyrl.config.foundation.intervals import Interval, interval
from skyrl.config.settings.alarms import AlarmConfig
from skyrl.config.settings.faults import FaultsConfig
from skyrl.config.settings.placement import ProcessesConfig
from skyrl.config.settings.trackers import TRACKERS, TrackersConfig, known_trackers
from skyrl.tree import FREE, IDENTITY, field, frozen, required
from skyrl.tree.classes import choice_metadata
from skyrl.tree.code_names import named_code
from skyrl.tree.validators import all_positive, non_negative, positive, positive_or_minus_one


class RunDefaults:
    """Settings of reinforcement-learning runs that other kinds of run do not have, with their values in those."""

    min_microbatches: int = 1
    share_group_prompts: bool = True
    fp32_lm_head: bool = False
    gradient_checkpointing_use_reentrant: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    update_ref_every_epoch: bool = False
    default_alarms: bool = True
    async_ckpt_save: bool = True
    ckpt_verify: Literal["digest", "size"] = "digest"
    ckpt_keep_every: int = -1
    ckpt_keep_best: int = -1
    ckpt_best_metric: str | None = None
    ckpt_best_is: Literal["max", "min"] = "max"

    @property
    def rows_of_an_item(self) -> int:
        """Rows of a batch that one item of the data becomes."""
        return 1

    @property
    def ref_update_interval(self) -> Interval:
        """How often the reference gets the weights of the policy, or a share of them."""
        return "1 epoch" if self.update_ref_every_epoch else -1


@frozen
class RunBasics(RunDefaults, LocatedConfig):
    """Settings that every kind of run has."""

    if TYPE_CHECKING:  # Fields of reinforcement-learning runs, which other kinds of run derive from fields of theirs.

        @property
        def use_sample_packing(self) -> bool: ...
        @property
        def longest_row(self) -> int | None: ...
        @property
        def micro_forward_batch_size_per_gpu(self) -> int: ...
        @property
        def resume_mode(self) -> Literal["none", "latest", "from_path"] | None: ...
        @property
        def resume_path(self) -> str | None: ...
        @property
        def record_memory(self) -> bool: ...

    placement: ProcessesConfig = ProcessesConfig()
    """Processes of the run."""

    strategy: Literal["fsdp", "fsdp2", "deepspeed", "megatron"] = "fsdp2"
    """How models are spread over ranks. `fsdp` and `fsdp2` are one: PyTorch's second fully sharded data parallelism."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of learners and the embedded engine. auto: cuda where there is a GPU, cpu otherwise."""

    faults: FaultsConfig = FaultsConfig()
    """Handling of interruptions, stalls and non-finite values."""

    seed: int = field(default=42, validator=non_negative, metadata=IDENTITY)
    """Seed of every random choice: the order of the data, sampled tokens, the initialization of adapters, and dropout.
    """

    deterministic: bool = False
    """Two runs of this configuration on the same machine give the same bits, with any number of torch engines and of
    environment workers: deterministic kernels in the learners, and the engine's deterministic mode. Slower."""

    num_dummy_steps: int = field(default=0, validator=non_negative, metadata=FREE)
    """Take this many steps on synthetic rows of maximum length instead of training, then end: a run that does not fit
    in memory fails within minutes. Nothing is sampled, evaluated, resumed or kept; no data is read by a supervised run,
    while in reinforcement learning whole batches are scored and used for updates, and weights are sent to the engines.
    Metrics go to `full_length` in the run's folder. 0: train as usual."""

    micro_train_batch_size_per_gpu: int = field(default=2, validator=positive)
    """Samples or rows (for a reward model: pairs) in one forward and backward pass on one GPU; gradients add up to the
    mini-batch. More is faster and needs more memory; results differ by rounding only."""

    max_tokens_per_microbatch: int = field(default=-1, validator=positive_or_minus_one("no bound in tokens"))
    """Maximum number of tokens in one pass through the model, on one GPU or on those that share sequences, instead of a
    fixed number of rows: micro-batches of long rows hold fewer of them, and every rank makes the same number of passes.
    A longer row or pair, or a longer group that shares its prompt, is a micro-batch by itself. -1: micro-batches are
    counted in rows."""

    bf16: bool = True
    """Compute in bfloat16 where the device is cuda; see `compute_dtype`."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of forward and backward; master weights and the optimizer are float32. None: bfloat16 where `bf16` is on and
    the device is cuda, float32 otherwise: a CPU multiplies small float32 matrices faster, and exactly."""

    flash_attn: bool = True
    """Use FlashAttention where the device is cuda; see `attention`."""

    attention: Literal["sdpa", "flash_attention_2", "eager"] | None = None
    """Implementation of attention in learners and the embedded engine. None: flash_attention_2 where `flash_attn` is
    on, the device is cuda and the package flash-attn is installed; sdpa otherwise: torch's own attention, which on CUDA
    uses the FlashAttention kernels that torch ships."""

    use_liger_kernel: bool | None = None
    """Compute norms, gated feed-forward layers and rotary embeddings of learners by the fused kernels of Liger Kernel
    (arXiv:2410.10989), on CUDA. A module whose results differ from its kernel's keeps its own code. None: on where the
    device is cuda and the package liger-kernel is installed. Equal up to rounding."""

    gradient_checkpointing: bool = field(default=True, metadata=FREE)
    """Keep only the layers' inputs and compute the rest again in backward, on cuda; see `recompute_activations`."""

    recompute_activations: bool | None = field(default=None, metadata=FREE)
    """Whether gradient checkpointing is used. None: `gradient_checkpointing` if the device is cuda; off on a CPU, where
    memory is not scarce."""

    offload_activations: bool = field(default=False, metadata=FREE)
    """Keep the layers' inputs in host memory until backward, if activations are recomputed: GPU memory then grows less
    with the tokens of a micro-batch. On a CPU they are in host memory already."""

    tokenizer_path: str | None = field(default=None, metadata=IDENTITY)
    """Hugging Face name or folder of a tokenizer other than the one beside the model, for learner, engines and exports.
    None: the model's own."""

    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer, which is written in Python."""

    eval_before_train: bool = field(default=False, metadata=FREE)
    """Evaluate once before the first training step."""

    eval_interval: Interval = field(default=0, validator=interval, metadata=FREE)
    """Training steps between evaluations, or epochs ("1 epoch"), or time ("30m"), or a list of these, each counted by
    itself; one more evaluation follows the last step. -1 or 0: no evaluation while training."""

    resume_with_changes: bool = field(default=False, metadata=FREE)
    """Resume although fields that the numbers depend on were changed since; they are listed. The run's identity (seed,
    models and data) may not change. False: only fields that change no number may differ."""

    recover_mode: Literal["disabled", "auto", "fault", "resume"] | None = field(default=None, metadata=FREE)
    """Start and restart of a run, in AReaL's words. disabled: starts from scratch, is not restarted; auto: starts from
    the newest good checkpoint if there is one, and is restarted after a failure; fault: starts from scratch, and is
    restarted from the newest good checkpoint; resume: starts from a checkpoint that must exist, is not restarted. None:
    `resume_mode` (in a supervised run: `resume_from`) decides."""

    recover_retries: int = field(default=3, validator=non_negative, metadata=FREE)
    """Maximum number of restarts of a failed run, in the modes that restart it."""

    ckpt_path: str | None = field(default=None, metadata=FREE)
    """Folder of the checkpoints. None: `checkpoints` in the run's folder."""

    ckpt_interval: Interval = field(default=0, validator=interval, metadata=FREE)
    """Training steps between checkpoints, or epochs, or time, or a list, as in `eval_interval`; the last step is saved
    too, as is the last one before a run is stopped. -1 or 0: none."""

    max_ckpts_to_keep: int = field(default=-1, validator=positive_or_minus_one("all"), metadata=FREE)
    """Number of newest checkpoints to keep; older ones are deleted once a newer one is verified. -1: all."""

    hf_save_interval: Interval = field(default=0, validator=interval, metadata=FREE)
    """Training steps between exports of the model in Hugging Face format, or epochs, or time, or a list, as in
    `eval_interval`. -1 or 0: none but the trained model, in the run's folder."""

    export_path: str | None = field(default=None, metadata=FREE)
    """Folder of the exports. None: `exports` in the run's folder."""

    run_path: str | None = field(default=None, metadata=FREE)
    """The run's own folder: its configuration, metrics, samples, curve and trained model. None: `runs/<run_name>`."""

    log_path: str | None = field(default=None, metadata=FREE)
    """Folder of the logs of processes on Ray, one file for each process; each node writes those of its own processes.
    None: `logs` in the run's folder."""

    project_name: str = field(default="skyrl_sft", metadata=FREE)
    """Name under which trackers group runs."""

    run_name: str = field(default="skyrl_sft_run", metadata=FREE)
    """Name of this run for trackers, and of its folder."""

    logger: str | tuple[str, ...] = field(
        default="console", converter=named_code, validator=known_trackers, metadata=choice_metadata(FREE, TRACKERS)
    )
    """Trackers of metrics besides the run's folder: console, wandb, tensorboard, mlflow, swanlab, or one of your own
    by import path (`my_package.trackers:Mine`, `trackers.py:Mine`; docs/tracking.md); one name, or a list."""

    trackers: TrackersConfig = TrackersConfig()
    """Settings of trackers other than the console."""

    alarms: tuple[AlarmConfig, ...] = field(default=(), metadata=FREE)
    """Conditions on metrics, each with an action: a warning, a checkpoint, or the end of the run (early stopping).
    Written as `[[trainer.alarms]]`, in a supervised run as `[[alarms]]`; see docs/alarms.md."""

    callbacks: tuple[str, ...] = field(default=(), converter=named_code, metadata=FREE)
    """Import paths of classes derived from `skyrl.Callback`, which hear the events of the training loop and may ask it
    to evaluate, save or stop (`my_package.callbacks:Mine`, `callbacks.py:Mine`); see docs/python.md."""

    profile_steps: tuple[int, ...] = field(default=(), validator=all_positive, metadata=FREE)
    """Training steps that are profiled. `skyrl timeline RUN` writes a Chrome trace of when each phase and each call of
    an engine or learner ran, by the clock of the command; `profile/step_<n>` in the run's folder holds a torch.profiler
    trace of every optimizer step of each rank, which takes several times as long while profiled."""

    def folder(self, field: Literal["run_path", "ckpt_path", "export_path", "log_path"]) -> str:
        """The folder in this field, which derivation has filled. Raises `ConfigError` if it has not."""
        path: str | None = getattr(self, field)
        return required(path, self.path_of(field))

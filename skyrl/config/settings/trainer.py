"""How the run is trained: where, for how long, in which batches, and what is kept."""

from collections.abc import Mapping
from typing import Any, Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.foundation.intervals import Interval, interval
from skyrl.config.settings.alarms import AlarmConfig
from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.faults import FaultsConfig
from skyrl.config.settings.fully_async import FullyAsyncConfig
from skyrl.config.settings.learners import CriticConfig, PolicyConfig, RefConfig
from skyrl.config.settings.placement import PlacementConfig
from skyrl.config.settings.tracker_settings import TrackersConfig
from skyrl.config.settings.trackers import Tracker
from skyrl.tree import FREE, IDENTITY, field, frozen
from skyrl.tree.validators import all_positive, non_negative, positive, positive_or_minus_one, positive_or_off


@frozen
class TrainerConfig(BaseConfig):
    """The training half of a run. A learner can be built from this alone, with no generation settings."""

    placement: PlacementConfig = PlacementConfig()
    """GPUs that each model gets."""

    strategy: Literal["fsdp", "fsdp2", "deepspeed", "megatron"] = "fsdp2"
    """How models are spread over ranks. `fsdp` and `fsdp2` are one: PyTorch's second fully sharded data parallelism."""

    sequence_parallel_backend: Literal["ulysses"] = "ulysses"
    """How ranks share a sequence where a model's `sequence_parallel_size` is above 1: an all-to-all before and after
    attention exchanges stretches of it for heads."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of learners and the embedded engine. auto: cuda where there is a GPU, cpu otherwise."""

    policy: PolicyConfig = PolicyConfig()
    """The model that is trained."""

    ref: RefConfig = RefConfig()
    """The frozen model that the policy is held near to."""

    critic: CriticConfig = CriticConfig()
    """The model that predicts returns."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective, estimator and corrections."""

    fully_async: FullyAsyncConfig = FullyAsyncConfig()
    """Generation and training at the same time."""

    faults: FaultsConfig = FaultsConfig()
    """Handling of interruptions, stalls and non-finite values."""

    seed: int = field(default=42, validator=non_negative, metadata=IDENTITY)
    """Seed of every random choice: the order of prompts, sampled tokens, the initialization of adapters, and dropout.
    """

    deterministic: bool = False
    """Two runs of this configuration on the same machine give the same bits, with any number of torch engines and of
    environment workers: deterministic kernels in the learners, and the engine's deterministic mode. Slower."""

    epochs: int = field(default=1, validator=non_negative, metadata=FREE)
    """Passes over the training prompts. 0: evaluate and stop. It may be raised on resume, to train longer; a schedule
    that decays is then recomputed for the new length."""

    max_training_steps: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop after this many training steps, even within an epoch. None: `epochs` decides. May be raised on resume."""

    max_training_prompts: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop before training on more prompts than this, repetitions counted. None: no such limit. May be raised on
    resume."""

    num_dummy_steps: int = field(default=0, validator=non_negative, metadata=FREE)
    """Take this many steps on synthetic samples of maximum length instead of training, then end: a run that does not
    fit in memory fails within minutes. Whole batches are scored and used for updates, and weights are sent to the
    engines; nothing is sampled, evaluated, resumed or kept. Metrics go to `full_length` in the run's folder. 0: train
    as usual."""

    train_batch_size: int = field(default=1024, validator=positive)
    """Prompts per training step; each gives `generator.n_samples_per_prompt` samples."""

    policy_mini_batch_size: int = field(default=256, validator=positive)
    """Prompts per optimizer step of the policy, over all ranks; it divides `train_batch_size`."""

    policy_mini_batch_size_in_samples: int | None = field(default=None, validator=positive)
    """Policy mini-batch in samples, the unit of learners. None: `policy_mini_batch_size` times
    `generator.n_samples_per_prompt`."""

    critic_mini_batch_size: int = field(default=256, validator=positive)
    """Prompts per optimizer step of the critic, over all ranks; it divides `train_batch_size`."""

    critic_mini_batch_size_in_samples: int | None = field(default=None, validator=positive)
    """Critic mini-batch in samples, the unit of learners. None: `critic_mini_batch_size` times
    `generator.n_samples_per_prompt`."""

    update_epochs_per_batch: int = field(default=1, validator=positive)
    """Passes over each training batch (PPO's epochs). 1: every sample is used once."""

    micro_train_batch_size_per_gpu: int = field(default=1, validator=positive)
    """Samples in one forward and backward pass on one GPU; gradients add up to the mini-batch. More is faster and needs
    more memory; results differ by rounding only."""

    micro_forward_batch_size_per_gpu: int = field(default=1, validator=positive)
    """Samples in one forward pass without gradients on one GPU, for log-probabilities and values."""

    max_tokens_per_microbatch: int = field(default=-1, validator=positive_or_minus_one("no bound in tokens"))
    """Maximum number of tokens in one pass through the model, on one GPU or on those that share sequences, instead of a
    fixed number of samples: micro-batches of long samples hold fewer of them, and every rank makes the same number of
    passes. A longer sample, or a longer group that shares its prompt, is a micro-batch by itself. -1: micro-batches are
    counted in samples."""

    min_microbatches: int = field(default=1, validator=positive)
    """Minimum number of passes into which each rank splits its samples of a mini-batch if `max_tokens_per_microbatch`
    is set: more, smaller passes need less memory. Capped at the rank's number of samples."""

    use_sample_packing: bool = True
    """Lay the samples of a micro-batch end to end without padding; the result is the same up to rounding."""

    share_group_prompts: bool = True
    """Compute the prompt of neighbouring samples of one group once for all of them in a packed micro-batch, where
    `attention` is sdpa and a small copy of the model shows that the result is the same up to rounding."""

    update_ref_every_epoch: bool = False
    """Copy the policy into the reference at the end of every epoch; checkpoints then include the reference. Its model
    must have the policy's architecture."""

    max_prompt_length: int = field(default=512, validator=positive)
    """Tokens of a prompt with its chat template. Longer prompts are left out of the data, and counted."""

    tokenizer_path: str | None = field(default=None, metadata=IDENTITY)
    """Hugging Face name or folder of a tokenizer other than the one beside the model, for learner, engines and exports.
    None: the policy's own."""

    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer, which is written in Python."""

    bf16: bool = True
    """Compute in bfloat16 where the device is cuda; see `compute_dtype`."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of forward and backward; master weights and the optimizer are float32. None: bfloat16 where `bf16` is on and
    the device is cuda, float32 otherwise: a CPU multiplies small float32 matrices faster, and exactly."""

    fp32_lm_head: bool = False
    """Compute logits in float32 from the 16-bit output matrix, in the policy, the reference and the engines: what is
    then left of the difference between learner and engine is that of their layers (MiniMax-M1, arXiv:2506.13585).
    A server that runs already is started so: vLLM with `--hf-overrides '{"head_dtype": "float32"}'`."""

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

    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=FREE)
    """Use PyTorch's older, reentrant form of gradient checkpointing."""

    recompute_activations: bool | None = field(default=None, metadata=FREE)
    """Whether gradient checkpointing is used. None: `gradient_checkpointing` if the device is cuda; off on a CPU, where
    memory is not scarce."""

    offload_activations: bool = field(default=False, metadata=FREE)
    """Keep the layers' inputs in host memory until backward, if activations are recomputed: GPU memory then grows less
    with the tokens of a micro-batch. On a CPU they are in host memory already."""

    rope_scaling: Mapping[str, Any] | None = None
    """Rotary scaling of all models, as their Hugging Face configuration spells it (`rope_type`, `factor`, ...); entries
    that are left out, including the base, keep the model's values. Longer sequences also need
    `policy.model_config_kwargs.max_position_embeddings`. None: the model's own."""

    rope_theta: float | None = field(default=None, validator=positive)
    """Base of the rotary frequencies of all models. None: the model's own."""

    longest_row: int | None = field(default=None, validator=positive)
    """Tokens of the longest row, prompt and answers together, in training and evaluation. Models whose rotary
    embeddings depend on length (`longrope`, `dynamic`) use those for rows of this length everywhere, exports included.
    None: the length given to the engine, or else the longest input and answer."""

    eval_before_train: bool = field(default=True, metadata=FREE)
    """Evaluate once before the first training step."""

    eval_interval: Interval = field(default=5, validator=interval, metadata=FREE)
    """Training steps between evaluations, or epochs ("1 epoch"), or time ("30m"), or a list of these, each counted by
    itself; one more evaluation follows the last step. -1 or 0: no evaluation while training."""

    eval_batch_size: int = field(default=1024, validator=positive)
    """Prompts evaluated at a time; the last batch may be smaller."""

    resume_mode: Literal["none", "latest", "from_path"] | None = field(default="latest", metadata=FREE)
    """Checkpoint to resume from. latest: the newest complete checkpoint of this run, if there is one; from_path:
    `resume_path`; none or null: start from scratch. A checkpoint of another run is refused."""

    resume_path: str | None = field(default=None, metadata=FREE)
    """Checkpoint folder (`.../global_step_N`) for `from_path`."""

    resume_with_changes: bool = field(default=False, metadata=FREE)
    """Resume although fields that the numbers depend on were changed since; they are listed. The run's identity (seed,
    models and data) may not change. False: only fields that change no number may differ."""

    recover_mode: Literal["disabled", "auto", "fault", "resume"] | None = field(default=None, metadata=FREE)
    """Start and restart of a run, in AReaL's words. disabled: starts from scratch, is not restarted; auto: starts from
    the newest good checkpoint if there is one, and is restarted after a failure; fault: starts from scratch, and is
    restarted from the newest good checkpoint; resume: starts from a checkpoint that must exist, is not restarted. None:
    `resume_mode` decides."""

    recover_retries: int = field(default=3, validator=non_negative, metadata=FREE)
    """Maximum number of restarts of a failed run, in the modes that restart it."""

    ckpt_path: str = field(default="~/ckpts/", metadata=FREE)
    """Folder of the checkpoints, which hold everything needed to resume, or its address in an object store
    (`s3://bucket/run`). All machines of a run must see it. If it is left at its default and `run_path` is set, it is
    `checkpoints` in that folder."""

    ckpt_interval: Interval = field(default=10, validator=interval, metadata=FREE)
    """Training steps between checkpoints, or epochs, or time, or a list, as in `eval_interval`; the last step is saved
    too, as is the last one before a run is stopped. -1 or 0: none."""

    async_ckpt_save: bool = field(default=True, metadata=FREE)
    """Copy the state and continue training while the copy is written; the next checkpoint and the end of the run wait
    for it. Needs host memory for one copy. False: the run waits."""

    ckpt_verify: Literal["digest", "size"] = field(default="digest", metadata=FREE)
    """Extent of the comparison with a checkpoint's manifest before it is resumed from, and before older ones are
    deleted. digest: every byte; size: that every file exists with its length."""

    max_ckpts_to_keep: int = field(default=-1, validator=positive_or_minus_one("all"), metadata=FREE)
    """Number of newest checkpoints to keep; older ones are deleted once a newer one is verified, unless
    `ckpt_keep_every` or `ckpt_keep_best` keeps them. -1: all."""

    ckpt_keep_every: int = field(default=-1, validator=positive_or_off, metadata=FREE)
    """Keep the checkpoints of steps divisible by this number as well. -1: off."""

    ckpt_keep_best: int = field(default=-1, validator=positive_or_off, metadata=FREE)
    """Keep this many checkpoints with the best `ckpt_best_metric` as well. -1: off."""

    ckpt_best_metric: str | None = field(default=None, metadata=FREE)
    """Metric of the saved step that ranks checkpoints, named as in `metrics.jsonl`, such as `eval/all/avg_score`. The
    checkpoint of a step without it is never among the best."""

    ckpt_best_is: Literal["max", "min"] = field(default="max", metadata=FREE)
    """Whether the best value of `ckpt_best_metric` is the largest or the smallest."""

    hf_save_interval: Interval = field(default=-1, validator=interval, metadata=FREE)
    """Training steps between exports of the policy in Hugging Face format, or epochs, or time, or a list, as in
    `eval_interval`. -1 or 0: none."""

    export_path: str = field(default="~/exports/", metadata=FREE)
    """Folder of exported models and dumps. If it is left at its default and `run_path` is set, it is `exports` in that
    folder."""

    run_path: str | None = field(default=None, metadata=FREE)
    """The run's own folder: its configuration, metrics, samples, curve and trained model. None: `runs/<run_name>`."""

    log_path: str = field(default="/tmp/skyrl-logs", metadata=FREE)
    """Folder of the logs of engines and learners on Ray, one file for each process; each node writes those of its own
    processes. If not set, it is `logs` in the run's folder."""

    project_name: str = field(default="skyrl", metadata=FREE)
    """Name under which trackers group runs."""

    run_name: str = field(default="test_run", metadata=FREE)
    """Name of this run for trackers, and of its folder."""

    logger: Tracker | tuple[Tracker, ...] = field(default="wandb", metadata=FREE)
    """Trackers of metrics besides the run's folder: one name, or a list. If it is left at its default and the package
    `wandb` or its key is missing, it is the console."""

    trackers: TrackersConfig = TrackersConfig()
    """Settings of trackers other than the console."""

    alarms: tuple[AlarmConfig, ...] = field(default=(), metadata=FREE)
    """Conditions on metrics, each with an action: a warning, a checkpoint, or the end of the run (early stopping).
    Written as `[[trainer.alarms]]`; see docs/alarms.md."""

    default_alarms: bool = field(default=True, metadata=FREE)
    """Whether the default alarms are on, such as for collapsed entropy and exploding lengths. They only warn; an entry
    of the same name in `alarms` changes one."""

    profile_steps: tuple[int, ...] = field(default=(), validator=all_positive, metadata=FREE)
    """Training steps that are profiled. `skyrl timeline RUN` writes a Chrome trace of when each phase and each call of
    an engine or learner ran, by the clock of the command; `profile/step_<n>` in the run's folder holds a torch.profiler
    trace of every optimizer step of each rank, which takes several times as long while profiled."""

    recording: Literal["off", "jsonl", "jsonl.gz"] = field(default="off", metadata=FREE)
    """Store every batch and its results below `run_path`, exactly, for `skyrl replay`, `skyrl bisect` and
    `rollouts_from`. Takes about 55 bytes per token of a batch, prompts counted with every sample, or half of that as
    jsonl.gz; and all weights are gathered once more per step for their digests. off: only samples for people to read
    are kept."""

    samples_per_step_kept: int = field(default=-1, validator=positive_or_minus_one("all"), metadata=FREE)
    """Number of samples of each step kept for people to read, in `trajectories.jsonl` and `tokens` below `run_path`:
    groups drawn at random by the step's number, the last one possibly in part. They take about 20 bytes per token. -1:
    all."""

    rollouts_from: str | None = field(default=None, metadata=IDENTITY)
    """Folder of a recorded run whose batches are trained on: no engine is started, nothing is sampled, and only
    `max_training_steps` can shorten the run. None: the policy samples."""

    dump_data_batch: bool = field(default=False, metadata=FREE)
    """Write the tensors of every training batch into `export_path/dumped_data`, for debugging: tokens, mask,
    log-probabilities, rewards and advantages, as safetensors."""

    dump_eval_results: bool = field(default=True, metadata=FREE)
    """Write every evaluated sample and the scores below `export_path`."""

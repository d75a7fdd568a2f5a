"""How the run is trained: where, for how long, in which batches, and what is kept."""

from collections.abc import Mapping
from typing import Any, Literal

from skyrl.config.alarms import AlarmConfig
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.entry import BaseConfig
from skyrl.config.faults import FaultsConfig
from skyrl.config.fully_async import FullyAsyncConfig
from skyrl.config.intervals import Interval, interval
from skyrl.config.learners import CriticConfig, PolicyConfig, RefConfig
from skyrl.config.placement import PlacementConfig
from skyrl.config.tracker_settings import TrackersConfig
from skyrl.config.trackers import Tracker
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
    """The frozen model that it is held near to."""

    critic: CriticConfig = CriticConfig()
    """The model that predicts returns."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective, estimator and corrections."""

    fully_async: FullyAsyncConfig = FullyAsyncConfig()
    """Generation and training at the same time."""

    faults: FaultsConfig = FaultsConfig()
    """Interruptions, stalls, and numbers that are none."""

    seed: int = field(default=42, validator=non_negative, metadata=IDENTITY)
    """Every random choice follows from it: the order of prompts, every token that is sampled, and how an adapter
    starts, and what is dropped."""

    deterministic: bool = False
    """Two runs of this configuration on the same machine give the same bits, with any number of torch engines and of
    environment workers: deterministic kernels in the learners, and the engine's deterministic mode. Slower."""

    epochs: int = field(default=1, validator=non_negative, metadata=FREE)
    """Passes over the training prompts. 0: evaluate and stop. It may be raised on resume, to train longer; a schedule
    that decays is then laid out anew."""

    max_training_steps: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop after this many training steps, even within an epoch. None: `epochs` decides. May be raised on resume."""

    max_training_prompts: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop before more prompts than this were trained on, repetitions counted. None: no such limit. May be raised on
    resume."""

    num_dummy_steps: int = field(default=0, validator=non_negative, metadata=FREE)
    """Take this many steps on synthetic samples of the greatest length in place of training, and end: a run that does
    not fit in memory fails within minutes. Whole batches are scored, used for updates, and weights are sent to the
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
    """Tokens in one pass through the model on one GPU, or on those that share sequences, in place of a number of
    samples: long samples go in smaller company, and every rank makes as many passes. A sample, or a group that shares
    its prompt, that is longer goes alone. -1: micro-batches are counted in samples."""

    min_microbatches: int = field(default=1, validator=positive)
    """Least number of passes that each rank cuts its samples of a mini-batch into where `max_tokens_per_microbatch`
    bounds a pass: more and smaller ones need less memory. At most as many as it has samples."""

    use_sample_packing: bool = True
    """Lay the samples of a micro-batch end to end without padding; the result is the same up to rounding."""

    share_group_prompts: bool = True
    """Compute the prompt of neighbouring samples of one group once for all of them in a packed micro-batch, where
    `attention` is sdpa and the model's layers see whole sequences; the result is the same up to rounding."""

    update_ref_every_epoch: bool = False
    """Copy the policy into the reference at the end of every epoch; checkpoints then hold the reference, too. Its
    model has to be of the policy's architecture."""

    max_prompt_length: int = field(default=512, validator=positive)
    """Tokens of a prompt with its chat template. Longer prompts are left out of the data, and counted."""

    tokenizer_path: str | None = field(default=None, metadata=IDENTITY)
    """Hugging Face name or folder of a tokenizer other than the one beside the model, for learner, engines and exports.
    None: the policy's own."""

    disable_fast_tokenizer: bool = False
    """Use the tokenizer written in Python."""

    bf16: bool = True
    """Compute in bfloat16 where the device is cuda; see `compute_dtype`."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of forward and backward; master weights and the optimizer are float32. None: bfloat16 where `bf16` is on and
    the device is cuda, float32 otherwise: a CPU multiplies small float32 matrices faster, and exactly."""

    flash_attn: bool = True
    """Use FlashAttention where the device is cuda; see `attention`."""

    attention: Literal["sdpa", "flash_attention_2", "eager"] | None = None
    """Implementation of attention in learners and the embedded engine. None: flash_attention_2 where `flash_attn` is
    on, the device is cuda and the package flash-attn is installed; sdpa otherwise, which is torch's own and on CUDA
    takes the FlashAttention kernels that torch brings."""

    gradient_checkpointing: bool = field(default=True, metadata=FREE)
    """Keep only the layers' inputs and compute the rest again in backward, on cuda; see `recompute_activations`."""

    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=FREE)
    """Use PyTorch's older, reentrant form of it."""

    recompute_activations: bool | None = field(default=None, metadata=FREE)
    """Gradient checkpointing as it is done. None: `gradient_checkpointing` where the device is cuda; off on a CPU,
    where memory is not what is short."""

    offload_activations: bool = field(default=False, metadata=FREE)
    """Keep those inputs of layers in host memory until backward, where activations are recomputed: the memory of a GPU
    then grows less with the tokens of a micro-batch. On a CPU they are there already."""

    rope_scaling: Mapping[str, Any] | None = None
    """Rotary scaling of all models, as their Hugging Face configuration spells it (`rope_type`, `factor`, ...); what it
    leaves out, the base among it, stays the model's own. Longer sequences also need
    `policy.model_config_kwargs.max_position_embeddings`. None: the model's own."""

    rope_theta: float | None = field(default=None, validator=positive)
    """Base of the rotary frequencies of all models. None: the model's own."""

    eval_before_train: bool = field(default=True, metadata=FREE)
    """Evaluate once before the first training step."""

    eval_interval: Interval = field(default=5, validator=interval, metadata=FREE)
    """Training steps between evaluations, or epochs ("1 epoch"), or time ("30m"), or a list, in which each counts by
    itself; one more follows the last step. -1 or 0: no evaluation while training."""

    eval_batch_size: int = field(default=1024, validator=positive)
    """Prompts evaluated at a time; the last batch may be smaller."""

    resume_mode: Literal["none", "latest", "from_path"] | None = field(default="latest", metadata=FREE)
    """Checkpoint to resume from. latest: the newest whole checkpoint of this run, if there is one; from_path:
    `resume_path`; none or null: start anew. A checkpoint of another run is refused."""

    resume_path: str | None = field(default=None, metadata=FREE)
    """Checkpoint folder (`.../global_step_N`) for `from_path`."""

    resume_with_changes: bool = field(default=False, metadata=FREE)
    """Resume although fields that the numbers depend on were changed since; they are listed. The run's identity (seed,
    models and data) may not change. False: only fields that change no number may differ."""

    recover_mode: Literal["disabled", "auto", "fault", "resume"] | None = field(default=None, metadata=FREE)
    """Start and restart of a run, in AReaL's words. disabled: starts anew, is not restarted; auto: starts from the
    newest good checkpoint if there is one, and is restarted after a failure; fault: starts anew, and is restarted from
    the newest good checkpoint; resume: starts from a checkpoint that must exist, is not restarted. None: `resume_mode`
    decides."""

    recover_retries: int = field(default=3, validator=non_negative, metadata=FREE)
    """Number of restarts of a failed run, under the modes that restart it."""

    ckpt_path: str = field(default="~/ckpts/", metadata=FREE)
    """Folder of the checkpoints, which hold all that is needed to go on, or its address in an object store
    (`s3://bucket/run`). All machines of a run must see it. Left at its default, it is `checkpoints` in a `run_path`
    that is written."""

    ckpt_interval: Interval = field(default=10, validator=interval, metadata=FREE)
    """Training steps between checkpoints, or epochs, or time, or a list, as in `eval_interval`; the last step is saved
    too, and the last before a run is stopped. -1 or 0: none."""

    async_ckpt_save: bool = field(default=True, metadata=FREE)
    """Copy the state and continue while it is written; the next checkpoint, and the end, wait for it. Takes host memory
    for one copy. False: the run waits."""

    ckpt_verify: Literal["digest", "size"] = field(default="digest", metadata=FREE)
    """Extent of the comparison with a checkpoint's manifest before it is resumed from, and before older ones are
    deleted. digest: every byte; size: that every file exists with its length."""

    max_ckpts_to_keep: int = field(default=-1, validator=positive_or_minus_one("all"), metadata=FREE)
    """Checkpoints kept, the newest; older ones are deleted once a newer one is verified, unless one of the next two
    keeps them. -1: all."""

    ckpt_keep_every: int = field(default=-1, validator=positive_or_off, metadata=FREE)
    """Keep those of steps that this divides, too. -1: none for that."""

    ckpt_keep_best: int = field(default=-1, validator=positive_or_off, metadata=FREE)
    """Keep so many with the best `ckpt_best_metric`, too. -1: none for that."""

    ckpt_best_metric: str | None = field(default=None, metadata=FREE)
    """Metric of the step that was saved, as in `metrics.jsonl`: `eval/all/avg_score`. Where a step lacks it, its
    checkpoint is not among the best."""

    ckpt_best_is: Literal["max", "min"] = field(default="max", metadata=FREE)
    """Whether the best value of `ckpt_best_metric` is the largest or the smallest."""

    hf_save_interval: Interval = field(default=-1, validator=interval, metadata=FREE)
    """Training steps between exports of the policy in Hugging Face format, or epochs, or time, or a list, as in
    `eval_interval`. -1 or 0: none."""

    export_path: str = field(default="~/exports/", metadata=FREE)
    """Folder of exported models and dumps. Left at its default, it is `exports` in a `run_path` that is written."""

    run_path: str | None = field(default=None, metadata=FREE)
    """The run's own folder: its configuration, metrics, samples, curve and trained model. None: `runs/<run_name>`."""

    log_path: str = field(default="/tmp/skyrl-logs", metadata=FREE)
    """Folder of the logs of engines and learners on Ray, one file for each process; each node writes those of its own.
    Unless it is written, it is `logs` in the run's folder."""

    project_name: str = field(default="skyrl", metadata=FREE)
    """Name under which trackers group runs."""

    run_name: str = field(default="test_run", metadata=FREE)
    """Name of this run for trackers, and of its folder."""

    logger: Tracker | tuple[Tracker, ...] = field(default="wandb", metadata=FREE)
    """Trackers of metrics besides the run's folder: one name, or a list. Left at its default, it is the console where
    the package `wandb` or a key for it is missing."""

    trackers: TrackersConfig = TrackersConfig()
    """Settings of trackers other than the console."""

    alarms: tuple[AlarmConfig, ...] = field(default=(), metadata=FREE)
    """Conditions on metrics, each with what follows: a warning, a checkpoint, or the end of the run, which is early
    stopping. Written as `[[trainer.alarms]]`; see docs/alarms.md."""

    default_alarms: bool = field(default=True, metadata=FREE)
    """Whether the default alarms are on, such as for collapsed entropy and exploding lengths. They warn, and change
    nothing else; one of them is changed by an entry of its name in `alarms`."""

    profile_steps: tuple[int, ...] = field(default=(), validator=all_positive, metadata=FREE)
    """Training steps that are profiled. `skyrl timeline RUN` writes when each phase ran, and each call of an engine or
    learner, by the clock of the command, as a Chrome trace; `profile/step_<n>` in the run's folder has a trace by
    torch.profiler of every optimizer step of each rank, which takes several times as long meanwhile."""

    recording: Literal["off", "jsonl", "jsonl.gz"] = field(default="off", metadata=FREE)
    """Keep every batch and what came of it below `run_path`, exactly: for `skyrl replay`, `skyrl bisect` and
    `rollouts_from`. About 55 bytes for each token of a batch, prompts counted with every sample, half of that in
    jsonl.gz; and all weights are gathered once more in each step, for their digests. off: samples for people alone."""

    samples_per_step_kept: int = field(default=-1, validator=positive_or_minus_one("all"), metadata=FREE)
    """Samples of each step that are kept for people, in `trajectories.jsonl` and `tokens` below `run_path`: groups that
    the step's number draws, the last perhaps in part. They take about 20 bytes a token. -1: all."""

    rollouts_from: str | None = field(default=None, metadata=IDENTITY)
    """Folder of a run with a recording, whose batches are trained on: no engine is started, nothing is sampled, and
    `max_training_steps` alone may shorten it. None: the policy samples."""

    dump_data_batch: bool = field(default=False, metadata=FREE)
    """Write the tensors of every training batch into `export_path/dumped_data`, for debugging: tokens, mask,
    log-probabilities, rewards and advantages, as safetensors."""

    dump_eval_results: bool = field(default=True, metadata=FREE)
    """Write every evaluated sample and the scores below `export_path`."""

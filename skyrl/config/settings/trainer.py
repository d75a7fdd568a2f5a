"""How the run is trained: where, for how long, in which batches, and what is kept."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from skyrl.config.foundation.intervals import Interval, interval
from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.fully_async import FullyAsyncConfig
from skyrl.config.settings.learners import CriticConfig, PolicyConfig, RefConfig, TeacherConfig
from skyrl.config.settings.placement import PlacementConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.trackers import TRACKERS, known_trackers
from skyrl.tree import FREE, IDENTITY, field, frozen
from skyrl.tree.classes import choice_metadata
from skyrl.tree.code_names import named_code
from skyrl.tree.validators import non_negative, positive, positive_or_minus_one, positive_or_off


@frozen
class TrainerConfig(RunBasics):
    """The training half of a run. A learner can be built from this alone, with no generation settings."""

    table_path: ClassVar[str] = "trainer"

    placement: PlacementConfig = PlacementConfig()
    """GPUs that each model gets."""

    sequence_parallel_backend: Literal["ulysses"] = "ulysses"
    """How ranks share a sequence where a model's `sequence_parallel_size` is above 1: an all-to-all before and after
    attention exchanges stretches of it for heads."""

    policy: PolicyConfig = PolicyConfig()
    """The model that is trained."""

    ref: RefConfig = RefConfig()
    """The frozen model that the policy is held near to."""

    critic: CriticConfig = CriticConfig()
    """The model that predicts returns."""

    teacher: TeacherConfig = TeacherConfig()
    """The frozen model that the policy is distilled from."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective, estimator and corrections."""

    fully_async: FullyAsyncConfig = FullyAsyncConfig()
    """Generation and training at the same time."""

    epochs: int = field(default=1, validator=non_negative, metadata=FREE)
    """Passes over the training prompts. 0: evaluate and stop. It may be raised on resume, to train longer; a schedule
    that decays is then recomputed for the new length."""

    max_training_steps: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop after this many training steps, even within an epoch, or after `epochs`, whichever comes first. None:
    `epochs` decides. May be raised on resume."""

    max_training_prompts: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop before training on more prompts than this, repetitions counted. None: no such limit. May be raised on
    resume."""

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

    micro_forward_batch_size_per_gpu: int = field(default=1, validator=positive)
    """Samples in one forward pass without gradients on one GPU, for log-probabilities and values."""

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

    fp32_lm_head: bool = False
    """Compute logits in float32 from the 16-bit output matrix, in the policy, the reference and the engines: what is
    then left of the difference between learner and engine is that of their layers (MiniMax-M1, arXiv:2506.13585).
    A server that runs already is started so: vLLM with `--hf-overrides '{"head_dtype": "float32"}'`."""

    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=FREE)
    """Use PyTorch's older, reentrant form of gradient checkpointing."""

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

    eval_batch_size: int = field(default=1024, validator=positive)
    """Prompts evaluated at a time; the last batch may be smaller."""

    resume_mode: Literal["none", "latest", "from_path"] | None = field(default="latest", metadata=FREE)
    """Checkpoint to resume from. latest: the newest complete checkpoint of this run, if there is one; from_path:
    `resume_path`; none or null: start from scratch. A checkpoint of another run is refused."""

    resume_path: str | None = field(default=None, metadata=FREE)
    """Checkpoint folder (`.../global_step_N`) for `from_path`."""

    ckpt_path: str = field(default="~/ckpts/", metadata=FREE)
    """Folder of the checkpoints, which hold everything needed to resume, or its address in an object store
    (`s3://bucket/run`). All machines of a run must see it. If it is left at its default, it is `checkpoints` in the
    run's folder (`run_path`)."""

    async_ckpt_save: bool = field(default=True, metadata=FREE)
    """Copy the state and continue training while the copy is written; the next checkpoint and the end of the run wait
    for it. Needs host memory for one copy. False: the run waits."""

    ckpt_verify: Literal["digest", "size"] = field(default="digest", metadata=FREE)
    """Extent of the comparison with a checkpoint's manifest before it is resumed from, and before older ones are
    deleted. digest: every byte; size: that every file exists with its length."""

    ckpt_keep_every: int = field(default=-1, validator=positive_or_off, metadata=FREE)
    """Keep the checkpoints of steps divisible by this number as well. -1: off."""

    ckpt_keep_best: int = field(default=-1, validator=positive_or_off, metadata=FREE)
    """Keep this many checkpoints with the best `ckpt_best_metric` as well. -1: off."""

    ckpt_best_metric: str | None = field(default=None, metadata=FREE)
    """Metric of the saved step that ranks checkpoints, named as in `metrics.jsonl`, such as `eval/all/avg_score`. The
    checkpoint of a step without it is never among the best."""

    ckpt_best_is: Literal["max", "min"] = field(default="max", metadata=FREE)
    """Whether the best value of `ckpt_best_metric` is the largest or the smallest."""

    export_path: str = field(default="~/exports/", metadata=FREE)
    """Folder of exported models and dumps. If it is left at its default, it is `exports` in the run's folder
    (`run_path`)."""

    log_path: str = field(default="/tmp/skyrl-logs", metadata=FREE)
    """Folder of the logs of engines and learners on Ray, one file for each process; each node writes those of its own
    processes. If not set, it is `logs` in the run's folder."""

    logger: str | tuple[str, ...] = field(
        default="wandb", converter=named_code, validator=known_trackers, metadata=choice_metadata(FREE, TRACKERS)
    )
    """Trackers of metrics besides the run's folder: console, wandb, tensorboard, mlflow, swanlab, or one of your own
    by import path (`my_package.trackers:Mine`, `trackers.py:Mine`; docs/tracking.md); one name, or a list. If it is
    left at its default and the package `wandb` or its key is missing, it is the console."""

    default_alarms: bool = field(default=True, metadata=FREE)
    """Whether the default alarms are on, such as for collapsed entropy and exploding lengths. They only warn; an entry
    of the same name in `alarms` changes one."""

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

    # Settings of every kind of run, with other defaults.
    micro_train_batch_size_per_gpu: int = field(default=1, validator=positive)
    eval_before_train: bool = field(default=True, metadata=FREE)
    eval_interval: Interval = field(default=5, validator=interval, metadata=FREE)
    ckpt_interval: Interval = field(default=10, validator=interval, metadata=FREE)
    hf_save_interval: Interval = field(default=-1, validator=interval, metadata=FREE)
    project_name: str = field(default="skyrl", metadata=FREE)
    run_name: str = field(default="test_run", metadata=FREE)

    @property
    def record_memory(self) -> bool:
        """Whether traces of the models that learn say what is allocated: `policy.record_memory`."""
        return self.policy.record_memory

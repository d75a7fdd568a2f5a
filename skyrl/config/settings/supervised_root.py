"""Runs that learn from existing rows: supervised fine-tuning and reward models.

`kind = "sft"` and `kind = "reward_model"` at the top of a file choose these roots. They share the RL tree's tables for
models, optimizers and sharding, and use the names of SkyRL's `SFTConfig` for fields with the same meaning.
"""

from collections.abc import Mapping
from typing import Any, Literal

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.intervals import Interval, interval
from skyrl.config.settings.alarms import AlarmConfig
from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.deepspeed import DeepSpeedConfig
from skyrl.config.settings.faults import FaultsConfig
from skyrl.config.settings.generator import ChatTemplateConfig
from skyrl.config.settings.learners import CriticConfig, FSDPConfig, OptimizerConfig, PolicyConfig
from skyrl.config.settings.models import ModelConfig
from skyrl.config.settings.placement import PlacementConfig
from skyrl.config.settings.supervised_placement import SFTPlacementConfig
from skyrl.config.settings.tracker_settings import TrackersConfig
from skyrl.config.settings.trackers import Tracker
from skyrl.config.settings.trainer import TrainerConfig
from skyrl.tree import FREE, IDENTITY, FrozenDict, field, frozen
from skyrl.tree.validators import (
    all_positive,
    non_negative,
    positive,
    positive_or_minus_one,
    rule_of_one_field,
)

SCORE = "score"
"""Name of a reward model's head, which is the one that transformers gives it."""

_OF_A_LEARNER = (
    "model", "optimizer_config", "fsdp_config", "deepspeed_config", "use_dropout", "sequence_parallel_size",
    "context_parallel_size", "tensor_parallel_size", "expert_parallel_size",
)  # fmt: skip
"""Fields that a policy and a critic have under the same name. The experiment chooses which of the two learns."""

_OF_A_TRAINER = (
    "strategy", "faults", "device", "seed", "deterministic", "max_tokens_per_microbatch", "compute_dtype", "attention",
    "use_liger_kernel", "recompute_activations", "offload_activations", "tokenizer_path", "disable_fast_tokenizer",
    "eval_before_train",
    "eval_interval", "resume_with_changes", "recover_mode", "recover_retries", "ckpt_interval", "max_ckpts_to_keep",
    "hf_save_interval", "run_path", "project_name", "run_name", "logger", "trackers", "alarms", "profile_steps",
    "num_dummy_steps",
)  # fmt: skip
"""Fields that `TrainerConfig` has under the same name."""

TrainOnWhat = Literal["last_assistant_message", "all_assistant_messages"]
"""Messages of a chat that are learned."""

_sources = rule_of_one_field(lambda value: all(value), "names that are not empty")
_weights = rule_of_one_field(lambda value: all(weight > 0 for weight in value), "positive numbers")


@frozen
class SupervisedConfig(RunConfig):
    """Common settings of supervised fine-tuning and reward models: model, data, batches, and what is kept."""

    model: ModelConfig = ModelConfig()
    """Weights to start from."""

    optimizer_config: OptimizerConfig = OptimizerConfig(lr=2e-5)
    """How the weights are updated. One batch is one optimizer step."""

    placement: SFTPlacementConfig = SFTPlacementConfig()
    """GPUs that the model gets."""

    strategy: Literal["fsdp", "fsdp2", "deepspeed"] = "fsdp2"
    """How the model is spread over ranks. `fsdp` and `fsdp2` are one."""

    fsdp_config: FSDPConfig = FSDPConfig()
    """Sharding under FSDP."""

    use_dropout: bool = False
    """Train with the dropout that the model's configuration names, such as `attention_dropout`; off in evaluation. What
    is dropped follows from `seed`, the optimizer step, the rank and the cut into micro-batches. Refused for a model
    without any."""

    deepspeed_config: DeepSpeedConfig = DeepSpeedConfig()
    """Sharding under DeepSpeed."""

    sequence_parallel_size: int = field(default=1, validator=positive)
    """Consecutive ranks that share sequences (Ulysses, arXiv:2309.14509): each computes a stretch of every packed row,
    and in attention some of the heads. Divides the number of ranks and of attention heads. 1: none."""

    context_parallel_size: int = field(default=1, validator=positive)
    """Ranks that share sequences, each of which attends from its own tokens to gathered keys and values: for sequences
    longer than a GPU holds. Divides the number of ranks. 1: none."""

    tensor_parallel_size: int = field(default=1, validator=positive)
    """Consecutive ranks that each hold a part of every large matrix and compute on the same rows (arXiv:1909.08053).
    Divides the number of ranks, of attention heads, and of key and value heads. Under DeepSpeed: by AutoTP's layers. 1:
    matrices are whole."""

    expert_parallel_size: int = field(default=1, validator=positive)
    """Consecutive ranks that hold different experts of a mixture of experts (GShard, arXiv:2006.16668): tokens travel
    to them and back. Divides the number of ranks and of experts; under FSDP, with `fsdp_size = -1` and
    `tensor_parallel_size = 1`. 1: every rank computes all experts for its tokens."""

    faults: FaultsConfig = FaultsConfig(on_non_finite="abort")
    """Interruptions and stalls. With `on_non_finite = "skip"`, updates with a non-finite gradient are skipped, up to
    `optimizer_config.max_skipped_updates`; with `"abort"`, one ends the run."""

    train_datasets: tuple[str, ...] = field(default=(), validator=_sources, metadata=IDENTITY)
    """Sources of training rows: parquet, json or jsonl files (`~` is the home folder), or datasets of Hugging Face as
    `name` or `name:split`."""

    train_dataset_weights: tuple[float, ...] | None = field(default=None, validator=_weights)
    """Share of each source in an epoch, relative to each other; an epoch has as many rows as all sources together, and
    a source that is used up begins again. None: every row once in an epoch."""

    eval_datasets: tuple[str, ...] = field(default=(), validator=_sources, metadata=IDENTITY)
    """Sources of rows to evaluate on, each reported under its name. Empty: no evaluation."""

    eval_dataset_names: tuple[str, ...] | None = field(default=None, validator=_sources, metadata=FREE)
    """A name for each of `eval_datasets` in metrics. None: that of the file, or of the dataset."""

    bad_rows: Literal["stop", "skip"] = "stop"
    """Policy for rows that cannot be learned from. stop: end the run with the row's number and the reason; skip: leave
    the row out and count it."""

    max_length: int | None = field(default=None, validator=positive)
    """Longest row, in tokens. None: the positions of the model."""

    too_long: Literal["skip", "truncate"] = "skip"
    """Policy for rows longer than `max_length`. skip: left out and counted; truncate: cut off at `max_length` and
    counted, which a reward model does not allow: its score is read at the end."""

    tokenized_path: str | None = field(default=None, metadata=FREE)
    """Folder that tokenized rows are written to, and read from while training: data may be larger than memory, and a
    later run on the same files with the same tokenizer, template and columns does not tokenize it again. None: they are
    held in memory."""

    sampler: Literal["random", "sequential"] = "random"
    """Order of the rows: shuffled with `seed` in every epoch, or as they stand in the sources."""

    epoch_tail: Literal["drop", "carry", "short"] = "drop"
    """Policy for the rows that do not fill the last batch of an epoch. drop: they are left out of that epoch and
    counted, different ones in each epoch if shuffled; carry: the batch is filled from the next epoch; short: they form
    a smaller batch with its own optimizer step."""

    num_epochs: int = field(default=1, validator=non_negative, metadata=FREE)
    """Passes over the training rows. 0: evaluate and stop. It may be raised on resume; if the learning rate decays over
    the run, `resume_with_changes` is needed."""

    num_steps: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop after this many optimizer steps. None: `num_epochs` decides."""

    max_training_samples: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop before training on more rows than this, repetitions counted. None: no such limit."""

    num_dummy_steps: int = field(default=0, validator=non_negative, metadata=FREE)
    """Take this many steps on synthetic rows of `max_length` tokens instead of training, then end: a run that does not
    fit in memory fails within minutes. No data is read; nothing is evaluated, resumed or kept. Metrics go to
    `full_length` in the run's folder. 0: train as usual."""

    batch_size: int = field(default=4, validator=positive)
    """Rows (for a reward model: pairs) per optimizer step, over all ranks."""

    micro_train_batch_size_per_gpu: int = field(default=2, validator=positive)
    """Rows (for a reward model: pairs) in one forward and backward pass on one GPU; results differ by rounding only."""

    max_tokens_per_microbatch: int = field(default=-1, validator=positive_or_minus_one("no bound in tokens"))
    """Maximum number of tokens in one pass on one GPU, instead of a fixed number of rows; a longer row or pair is a
    micro-batch by itself. -1: micro-batches are counted in rows."""

    use_sequence_packing: bool = True
    """Lay the rows of a micro-batch end to end without padding, each attending to itself alone; the result is the same
    up to rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for computation. auto: cuda where there is a GPU, cpu otherwise."""

    bf16: bool = True
    """Compute in bfloat16 where the device is cuda; see `compute_dtype`."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of forward and backward; master weights are float32. None: bfloat16 where `bf16` is on and the device is
    cuda, float32 otherwise."""

    flash_attn: bool = True
    """Use FlashAttention where the device is cuda; see `attention`."""

    attention: Literal["sdpa", "flash_attention_2", "eager"] | None = None
    """Implementation of attention. None: flash_attention_2 where `flash_attn` is on, the device is cuda and the package
    flash-attn is installed; sdpa otherwise: torch's own attention, which on CUDA uses the FlashAttention kernels that
    torch ships."""

    use_liger_kernel: bool | None = None
    """Compute norms, gated feed-forward layers and rotary embeddings of the model by the fused kernels of Liger Kernel
    (arXiv:2410.10989), on CUDA. A module whose results differ from its kernel's keeps its own code. None: on where the
    device is cuda and the package liger-kernel is installed. Equal up to rounding."""

    gradient_checkpointing: bool = field(default=True, metadata=FREE)
    """Keep only the layers' inputs and compute the rest again in backward, on cuda; see `recompute_activations`."""

    recompute_activations: bool | None = field(default=None, metadata=FREE)
    """Whether gradient checkpointing is used. None: `gradient_checkpointing` where the device is cuda; off on a CPU."""

    offload_activations: bool = field(default=False, metadata=FREE)
    """Keep the layers' inputs in host memory until backward, if activations are recomputed: GPU memory then grows less
    with the tokens of a micro-batch. On a CPU they are in host memory already."""

    tokenizer_path: str | None = field(default=None, metadata=IDENTITY)
    """Hugging Face name or folder of a tokenizer other than the one beside the model, for learner, engines and exports.
    None: the model's own."""

    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer, which is written in Python."""

    chat_template: ChatTemplateConfig = ChatTemplateConfig()
    """A chat template in place of the tokenizer's; the trained model is stored with it."""

    chat_template_kwargs: Mapping[str, Any] = FrozenDict()
    """Variables for the chat template, such as `enable_thinking`."""

    tools_key: str = "tools"
    """Column of the tools that the template shows, as a list of JSON schemas or its JSON text; optional per row."""

    system_key: str = "system"
    """Column of a system message that is put before a chat that has none; optional per row."""

    seed: int = field(default=42, validator=non_negative, metadata=IDENTITY)
    """Seed of every random choice."""

    deterministic: bool = False
    """Deterministic kernels: two runs on the same machine give the same bits."""

    eval_before_train: bool = field(default=False, metadata=FREE)
    """Evaluate once before the first step."""

    eval_interval: Interval = field(default=0, validator=interval, metadata=FREE)
    """Optimizer steps between evaluations, or epochs ("1 epoch"), or time ("30m"), or a list; one more follows the last
    step. -1 or 0: none while training."""

    ckpt_path: str | None = field(default=None, metadata=FREE)
    """Folder of the checkpoints. None: `checkpoints` in the run's folder."""

    ckpt_interval: Interval = field(default=0, validator=interval, metadata=FREE)
    """Optimizer steps between checkpoints, or epochs, or time, or a list, as in `eval_interval`. -1 or 0: none."""

    max_ckpts_to_keep: int = field(default=-1, validator=positive_or_minus_one("all"), metadata=FREE)
    """Checkpoints kept; older ones are deleted once a newer one is complete. -1: all."""

    resume_from: str = field(default="latest", metadata=FREE)
    """Checkpoint to resume from. latest: the newest checkpoint of this run, if there is one; empty: start from scratch;
    otherwise the folder of a checkpoint (`.../global_step_N`)."""

    resume_with_changes: bool = field(default=False, metadata=FREE)
    """Resume from a checkpoint although fields that change numbers differ; the differences are printed."""

    recover_mode: Literal["disabled", "auto", "fault", "resume"] | None = field(default=None, metadata=FREE)
    """Start and restart of a run, in AReaL's words. disabled: starts from scratch, is not restarted; auto: starts from
    the newest good checkpoint if there is one, and is restarted after a failure; fault: starts from scratch, and is
    restarted from the newest good checkpoint; resume: starts from a checkpoint that must exist, is not restarted. None:
    `resume_from` decides."""

    recover_retries: int = field(default=3, validator=non_negative, metadata=FREE)
    """Maximum number of restarts of a failed run, in the modes that restart it."""

    hf_save_interval: Interval = field(default=0, validator=interval, metadata=FREE)
    """Optimizer steps between exports of the model in Hugging Face format, or epochs, or time, or a list. -1 or 0:
    only the trained model, in the run's folder."""

    export_path: str | None = field(default=None, metadata=FREE)
    """Folder of the exports. None: `exports` in the run's folder."""

    run_path: str | None = field(default=None, metadata=FREE)
    """The run's own folder: configuration, metrics, trained model. None: `runs/<run_name>`."""

    log_path: str | None = field(default=None, metadata=FREE)
    """Folder of the logs of processes on Ray. None: `logs` in the run's folder."""

    alarms: tuple[AlarmConfig, ...] = field(default=(), metadata=FREE)
    """Conditions on metrics, each with an action, such as early stopping on `eval/all/loss`. Written as `[[alarms]]`;
    see docs/alarms.md."""

    project_name: str = field(default="skyrl_sft", metadata=FREE)
    """Name under which trackers group runs."""

    run_name: str = field(default="skyrl_sft_run", metadata=FREE)
    """Name of this run for trackers, and of its folder."""

    logger: Tracker | tuple[Tracker, ...] = field(default="console", metadata=FREE)
    """Trackers of metrics besides the run's folder: one name, or a list."""

    trackers: TrackersConfig = TrackersConfig()
    """Settings of trackers other than the console."""

    profile_steps: tuple[int, ...] = field(default=(), validator=all_positive, metadata=FREE)
    """Training steps that are profiled: their timeline for `skyrl timeline RUN`, and a trace by torch.profiler of every
    optimizer step of each rank in `profile/step_<n>` of the run's folder."""

    record_memory: bool = field(default=False, metadata=FREE)
    """With `profile_steps`: write what each optimizer step allocates beside its trace, as a table of operators by
    memory and, on CUDA, a snapshot of every allocation for pytorch.org/memory_viz."""

    @property
    def rows_of_an_item(self) -> int:
        """Rows of a batch that one item of the data becomes."""
        return 1

    @property
    def compiles(self) -> bool:
        """Whether parts of an update are compiled."""
        return False

    @property
    def trainer(self) -> TrainerConfig:
        """The tree as a `TrainerConfig`, which learners, checkpoints and sessions are built from."""
        return _trainer_of(self)


@frozen
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning (`kind = "sft"`): learns from the likelihood of the assistant's messages."""

    kind: Literal["sft"] = field(default="sft", metadata=IDENTITY)
    """Kind of run, which decides the tree that a file is read into."""

    train_on_what: TrainOnWhat = "last_assistant_message"
    """Messages that are learned, with the text by which the template ends them."""

    use_torch_compile: bool = False
    """Compile parts of an update by `torch.compile`: on CUDA the decoder layers, each kind of layer once for all
    lengths, in place of `use_liger_kernel`; on a CPU log-probabilities and entropy from logits, which takes g++ or
    another C++ compiler. The first updates wait for the compiler, which keeps its results between runs. Equal up to
    rounding."""

    messages_key: str = "messages"
    """Column of the chat: a list of messages with `role` and `content`, or its JSON text. Rows without it may have
    another of the forms in `docs/sft.md`."""

    @property
    def compiles(self) -> bool:
        """Whether parts of an update are compiled."""
        return self.use_torch_compile


@frozen
class RewardModelConfig(SupervisedConfig):
    """A reward model from preferences (`kind = "reward_model"`): Bradley-Terry, one number at the end of a chat."""

    kind: Literal["reward_model"] = field(default="reward_model", metadata=IDENTITY)
    """Kind of run, which decides the tree that a file is read into."""

    chosen_key: str = "chosen"
    """Column of the better chat, or of the better answer where there is a `prompt_key`."""

    rejected_key: str = "rejected"
    """Column of the worse one."""

    prompt_key: str = "prompt"
    """Column of the chat, or of the user's text, before both answers. A row without it has whole chats."""

    margin_key: str = "margin"
    """Column of a number, 0 or more: the margin by which the better chat should score higher (Llama 2,
    arXiv:2307.09288, eq. 2). Optional per row."""

    @property
    def rows_of_an_item(self) -> int:
        """A pair is two rows."""
        return 2


def _trainer_of(run: SupervisedConfig) -> TrainerConfig:
    """The same run as a `TrainerConfig`: one batch is one mini-batch of one optimizer step."""
    rows, resume = run.micro_train_batch_size_per_gpu * run.rows_of_an_item, run.resume_from
    named = resume not in ("", "latest")
    learner: dict[str, Any] = {name: getattr(run, name) for name in _OF_A_LEARNER}
    return TrainerConfig(
        **{name: getattr(run, name) for name in _OF_A_TRAINER},
        policy=PolicyConfig(**learner, record_memory=run.record_memory, use_torch_compile=run.compiles),
        critic=CriticConfig(**learner),
        algorithm=AlgorithmConfig(temperature=1.0, use_kl_loss=False, value_head_prefix=SCORE),
        placement=_placement_of(run.placement),
        train_batch_size=run.batch_size,
        policy_mini_batch_size=run.batch_size,
        critic_mini_batch_size=run.batch_size,
        micro_train_batch_size_per_gpu=rows,
        micro_forward_batch_size_per_gpu=rows,
        use_sample_packing=run.use_sequence_packing,
        longest_row=run.max_length,
        resume_mode="from_path" if named else "latest" if resume else "none",
        resume_path=resume if named else None,
        ckpt_path=run.ckpt_path or "",
        export_path=run.export_path or "",
        log_path=run.log_path or "",
    )


def _placement_of(own: SFTPlacementConfig) -> PlacementConfig:
    return PlacementConfig(
        colocate_all=False,
        colocate_policy_ref=False,
        policy_num_nodes=own.num_nodes,
        policy_num_gpus_per_node=own.num_gpus_per_node,
        executor=own.executor,
        ray_address=own.ray_address,
        start_timeout_seconds=own.start_timeout_seconds,
        call_timeout_seconds=own.call_timeout_seconds,
        heartbeat_timeout_seconds=own.heartbeat_timeout_seconds,
    )

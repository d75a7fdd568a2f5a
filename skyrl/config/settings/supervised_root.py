"""Runs that learn from existing rows: supervised fine-tuning and reward models; preferences are in
`preference_root.py`.

`kind = "sft"` and `kind = "reward_model"` at the top of a file choose these roots. They share the RL tree's tables for
models, optimizers and sharding, and use the names of SkyRL's `SFTConfig` for fields with the same meaning.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.settings.distillation import SFTDistillationConfig
from skyrl.config.settings.faults import FaultsConfig
from skyrl.config.settings.generator import ChatTemplateConfig
from skyrl.config.settings.learners import LearnerConfig, OptimizerConfig
from skyrl.config.settings.placement import SFTPlacementConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.samplers import SamplerConfig
from skyrl.tree import FREE, IDENTITY, FrozenDict, field, frozen
from skyrl.tree.validators import non_negative, positive, rule_of_one_field

SCORE = "score"
"""Name of a reward model's head, which is the one that transformers gives it."""

_OWN_NAMES = {"use_sample_packing": "use_sequence_packing", "resume_mode": "resume_from", "resume_path": "resume_from"}
"""Fields of `RunBasics` that are derived from fields of other names."""

TrainOnWhat = Literal["last_assistant_message", "all_assistant_messages", "all_tokens"]
"""Part of a chat that is learned."""

_sources = rule_of_one_field(all, "names that are not empty")
_weights = rule_of_one_field(lambda value: all(weight > 0 for weight in value), "positive numbers")


@frozen
class SupervisedConfig(RunConfig, RunBasics, LearnerConfig):
    """Common settings of supervised fine-tuning and reward models: those of every run, those of the one model, which
    learns, and the data. One batch is one mini-batch of one optimizer step.
    """

    optimizer_config: OptimizerConfig = OptimizerConfig(lr=2e-5)
    """How the weights are updated. One batch is one optimizer step."""

    placement: SFTPlacementConfig = SFTPlacementConfig()
    """GPUs that the model gets."""

    faults: FaultsConfig = FaultsConfig(on_non_finite="abort")
    """Interruptions and stalls. With `on_non_finite = "skip"`, updates with a non-finite gradient are skipped, up to
    `optimizer_config.max_skipped_updates`; with `"abort"`, one ends the run."""

    train_datasets: tuple[str, ...] = field(default=(), validator=_sources, metadata=IDENTITY)
    """Sources of training rows: parquet, arrow, json or jsonl files (`~` is the home folder), or datasets of Hugging
    Face as `name` or `name:split`."""

    streaming: bool = False
    """Read training rows while the run trains on them, for sources larger than memory and disk: nothing is read in
    advance but `shuffle_buffer_size` rows. The run ends by `num_steps` or `max_training_samples`; rows that are bad or
    too long are left out when they are reached. False: all rows are read before the first step."""

    shuffle_buffer_size: int = field(default=10_000, validator=positive)
    """Number of streamed rows that are shuffled together. The files of a source are read in random order, too."""

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

    curriculum: SamplerConfig = SamplerConfig()
    """How the rows of a batch are drawn, where not simply in the order of `sampler`."""

    epoch_tail: Literal["drop", "carry", "short"] = "drop"
    """Policy for the rows that do not fill the last batch of an epoch. drop: they are left out of that epoch and
    counted, different ones in each epoch if shuffled; carry: the batch is filled from the next epoch; short: they form
    a smaller batch with its own optimizer step."""

    num_epochs: int = field(default=1, validator=non_negative, metadata=FREE)
    """Passes over the training rows. 0: evaluate and stop. It may be raised on resume; if the learning rate decays over
    the run, `resume_with_changes` is needed."""

    num_steps: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop after this many optimizer steps, or after `num_epochs`, whichever comes first. None: `num_epochs`
    decides."""

    max_training_samples: int | None = field(default=None, validator=positive, metadata=FREE)
    """Stop before training on more rows than this, repetitions counted. None: no such limit."""

    batch_size: int = field(default=4, validator=positive)
    """Rows (for a reward model: pairs) per optimizer step, over all ranks."""

    use_sequence_packing: bool = True
    """Lay the rows of a micro-batch end to end without padding, each attending to itself alone; the result is the same
    up to rounding."""

    chat_template: ChatTemplateConfig = ChatTemplateConfig()
    """A chat template in place of the tokenizer's; the trained model is stored with it."""

    chat_template_kwargs: Mapping[str, Any] = FrozenDict()
    """Variables for the chat template, such as `enable_thinking`."""

    tools_key: str = "tools"
    """Column of the tools that the template shows, as a list of JSON schemas or its JSON text; optional per row."""

    system_key: str = "system"
    """Column of a system message that is put before a chat that has none; optional per row."""

    resume_from: str = field(default="latest", metadata=FREE)
    """Checkpoint to resume from. latest: the newest checkpoint of this run, if there is one; empty: start from scratch;
    otherwise the folder of a checkpoint (`.../global_step_N`)."""

    record_memory: bool = field(default=False, metadata=FREE)
    """With `profile_steps`: write what each optimizer step allocates beside its trace, as a table of operators by
    memory and, on CUDA, a snapshot of every allocation for pytorch.org/memory_viz."""

    @property
    def trainer(self) -> Self:
        """The table with the settings that every kind of run has: the root itself."""
        return self

    def path_of(self, field: str) -> str:
        """Dotted path of a field in the user's own file, also of a field that has another name in `RunBasics`."""
        return _OWN_NAMES.get(field, field)

    @property
    def use_sample_packing(self) -> bool:
        """Whether the rows of a micro-batch lie end to end."""
        return self.use_sequence_packing

    @property
    def longest_row(self) -> int | None:
        """Tokens of the longest row. None: the positions of the model."""
        return self.max_length

    @property
    def micro_forward_batch_size_per_gpu(self) -> int:
        """Rows in one forward pass without gradients on one GPU."""
        return self.micro_train_batch_size_per_gpu * self.rows_of_an_item

    @property
    def resume_mode(self) -> Literal["none", "latest", "from_path"]:
        """Checkpoint to resume from: none, the newest one of the run, or `resume_path`."""
        return "none" if not self.resume_from else "latest" if self.resume_from == "latest" else "from_path"

    @property
    def resume_path(self) -> str | None:
        """Folder of the checkpoint to resume from, if `resume_from` names one."""
        return self.resume_from if self.resume_mode == "from_path" else None


@frozen
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning (`kind = "sft"`): learns from the likelihood of the assistant's messages."""

    kind: Literal["sft"] = field(default="sft", metadata=IDENTITY)
    """Kind of run, which decides the tree that a file is read into."""

    train_on_what: TrainOnWhat = "last_assistant_message"
    """Part of a chat that is learned. Assistant messages: with the text by which the template ends them; all_tokens:
    everything up to the end of the last of them, as TRL does by default; of a row of prompt and completion, only the
    completion."""

    use_torch_compile: bool = False
    """Compile parts of an update by `torch.compile`: on CUDA the decoder layers, each kind of layer once for all
    lengths, in place of `use_liger_kernel`; on a CPU log-probabilities and entropy from logits, which takes g++ or
    another C++ compiler. The first updates wait for the compiler, which keeps its results between runs. Equal up to
    rounding."""

    distillation: SFTDistillationConfig = SFTDistillationConfig()
    """Learning from a teacher, beside the rows' own tokens or alone."""

    messages_key: str = "messages"
    """Column of the chat: a list of messages with `role` and `content`, or its JSON text. Rows without it may have
    another of the forms in `docs/sft.md`."""


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
        """Rows of a batch that one item of the data becomes: both chats of a pair."""
        return 2

    @property
    def answer_keys(self) -> tuple[str, ...]:
        """Columns of the answers of a row."""
        return self.chosen_key, self.rejected_key

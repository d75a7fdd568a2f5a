"""Data: the prompts that the run trains on and is evaluated on."""

from collections.abc import Iterator
from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.settings.samplers import CurriculumConfig
from skyrl.errors import Problem
from skyrl.tree import FREE, IDENTITY, field, frozen
from skyrl.tree.validators import all_positive, not_empty, positive


@frozen
class DataConfig(BaseConfig):
    """Sources of prompts.

    A source is a parquet, arrow, json or jsonl file (`~` is the home folder), a folder that Hugging Face `datasets`
    reads, or the name of a dataset on its hub. The last two may end in `:split` or `:configuration:split`; the default
    split is `train`.
    """

    train_data: tuple[str, ...] = field(default=("~/data/gsm8k/train.parquet",), metadata=IDENTITY)
    """Sources of training prompts."""

    shuffle: bool = True
    """Take the training prompts in a different order in every epoch, derived from `trainer.seed`. False: in the order
    of `train_data`, the same in every epoch."""

    streaming: bool = False
    """Read training prompts while the run trains on them, for sources larger than memory and disk: nothing is read in
    advance but `shuffle_buffer_size` rows. The run ends by `trainer.max_training_steps` or
    `trainer.max_training_prompts`; prompts that are too long are left out when they are reached. False: all prompts are
    read before the first step."""

    shuffle_buffer_size: int = field(default=10_000, validator=positive)
    """Number of streamed rows that are shuffled together. The files of a source are read in random order, too."""

    train_weights: tuple[float, ...] | None = field(default=None, validator=all_positive)
    """Share of each source of `train_data` in an epoch, relative to each other; an epoch has as many prompts as all
    sources together, and a source that is used up begins again. None, or one source: every prompt once in an
    epoch."""

    val_data: tuple[str, ...] = field(default=("~/data/gsm8k/validation.parquet",), metadata=IDENTITY)
    """Sources of evaluation prompts, read in order and reported by data source. Empty: no evaluation."""

    tokenized_path: str | None = field(default=None, metadata=FREE)
    """Folder that tokenized prompts are written to, and read from while training: data may be larger than memory, and a
    later run on the same files with the same tokenizer, template and columns does not tokenize it again. None: they are
    held in memory."""

    prompt_column: str = field(default="prompt", validator=not_empty)
    """Column of the prompt: a chat, which is a list of messages with `role` and `content`. A column with a name other
    than `prompt` may also hold a text, which becomes the user's message."""

    answer_column: str | None = field(default=None, validator=not_empty)
    """Column that becomes the ground truth of rows without a `reward_spec`; for GSM8K's answers, the text after the
    last `####`. None: rows bring their `reward_spec`, or their task needs none."""

    bad_rows: Literal["stop", "skip"] = "stop"
    """Policy for rows that are not a valid prompt, or that lack what their reward function needs. stop: end the run
    with the row's number and the reason; skip: leave the row out and count it."""

    epoch_tail: Literal["drop", "carry", "short"] = "drop"
    """Policy for the prompts that do not fill the last batch of an epoch. drop: they are left out of that epoch and
    counted, different ones in each epoch if shuffled; carry: the batch is filled from the next epoch; short: they form
    a smaller batch, in synchronous training only."""

    curriculum: CurriculumConfig = CurriculumConfig()
    """How the prompts of a batch are drawn, where not simply every prompt once in an epoch."""

    def own_problems(self) -> Iterator[Problem]:
        """Every training source has a weight, or none has; sources mixed by weight need `shuffle`, and loaded rows."""
        if self.streaming and self.train_weights is not None:
            yield Problem(
                path="train_weights",
                message="streamed sources are read one after the other, mixed by the shuffle buffer alone",
                hint="leave train_weights out, or set streaming to false",
            )
        if self.train_weights is not None and len(self.train_weights) > 1 and not self.shuffle:
            yield Problem(
                path="shuffle",
                message="train_weights mixes the sources at random places",
                hint="leave train_weights out, or set shuffle to true",
            )
        weights, sources = self.train_weights, self.train_data
        if weights is not None and len(weights) != len(sources):
            yield Problem(
                path="train_weights",
                message=f"{len(weights)} weights for {len(sources)} sources in train_data",
                hint="give one for each, in the same order, or leave them out",
            )

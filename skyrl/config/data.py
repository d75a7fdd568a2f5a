"""Which prompts the run trains on and is evaluated on."""

from skyrl.tree import IDENTITY, field, frozen


@frozen
class DataConfig:
    """Sources of prompts.

    A source is a parquet, json or jsonl file (`~` is the home folder), or a Hugging Face dataset as `name` (its train
    split) or `name:split`. Sources are concatenated in the order given.
    """

    train_data: tuple[str, ...] = field(default=("~/data/gsm8k/train.parquet",), metadata=IDENTITY)
    """Sources of training prompts, shuffled with `trainer.seed` in every epoch."""

    val_data: tuple[str, ...] = field(default=("~/data/gsm8k/validation.parquet",), metadata=IDENTITY)
    """Sources of evaluation prompts, read in order and reported by data source. Empty: no evaluation."""

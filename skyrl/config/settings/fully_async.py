"""Asynchronous training: samples are drawn while the policy learns, within a bound on how old they may get."""

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, field, frozen
from skyrl.tree.code_names import named_code
from skyrl.tree.types import Seconds
from skyrl.tree.validators import non_negative, positive


@frozen
class FullyAsyncConfig(BaseConfig):
    """Sampling the next batches while this one is trained on (AReaL, arXiv:2505.24298)."""

    enabled: bool = False
    """Sample and train at the same time. False: in turns."""

    max_staleness_steps: int = field(default=4, validator=non_negative)
    """Bound on staleness: a group started by weights of version i trains weights of at most version i + this. 0: on
    policy, where engines wait for the longest answer of every batch; 1: one step off."""

    num_parallel_generation_workers: int = field(default=768, validator=positive)
    """Maximum number of groups sampled at the same time."""

    queue_size: int | None = field(default=None, validator=positive)
    """Maximum number of groups started and not yet trained on; at least `trainer.train_batch_size`. None: as many as
    `max_staleness_steps` allows."""

    interrupt_generation: bool = True
    """Let new weights interrupt samples that are being drawn: they stop between two tokens and continue under the new
    weights. False: they are completed first. Every token records the version of the weights that drew it."""

    clear_kv_cache_on_weight_sync: bool = True
    """Let an interrupted sample continue from keys and values recomputed by the new weights. False: it continues from
    those of the old weights, which is faster, but samples from a mixture of policies; engines then share no prefixes of
    prompts."""

    mask_older_tokens: bool = False
    """Train only on the newest version's tokens of a sample that several versions of the weights drew. False: train on
    all tokens, which a correction can account for."""

    steps_per_sync: int = field(default=1, validator=positive)
    """Training steps between new weights for the engines; at most `max_staleness_steps + 1`."""

    accept: str | None = field(default=None, converter=named_code)
    """Import path of a function that decides whether a `TrajectoryGroup` may be trained on (`my_pkg.groups:accept`,
    `groups.py:accept`); a rejected group is replaced by another prompt's. None: all are accepted."""

    stall_timeout_seconds: Seconds = field(default=3600.0, validator=positive, metadata=FREE)
    """Maximum seconds without a usable group while the trainer waits for a batch; after that the run ends and names the
    groups and calls that it waited for."""

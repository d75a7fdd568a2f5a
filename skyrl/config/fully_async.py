"""Asynchronous training: samples are drawn while the policy learns, within a bound on how old they may get."""

from skyrl.config.entry import BaseConfig
from skyrl.tree import FREE, field, frozen
from skyrl.tree.validators import non_negative, positive


@frozen
class FullyAsyncConfig(BaseConfig):
    """Sampling the next batches while this one is trained on (AReaL, arXiv:2505.24298)."""

    enabled: bool = False
    """Sample and train at the same time. False: in turns."""

    max_staleness_steps: int = field(default=4, validator=non_negative)
    """Bound on staleness: a group started by weights of version i trains weights of version i + this at the latest. 0:
    on policy; 1: one step off; without a bound, engines would wait for the longest answer of every batch."""

    num_parallel_generation_workers: int = field(default=768, validator=positive)
    """Groups sampled at the same time, at most."""

    queue_size: int | None = field(default=None, validator=positive)
    """Largest number of groups started and not yet trained on; at least `trainer.train_batch_size`. None: as many as
    `max_staleness_steps` allows."""

    interrupt_generation: bool = True
    """Let new weights interrupt samples that are being drawn: they stop between two tokens and continue under the new
    weights. False: they are completed first. Every token records the version of the weights that drew it."""

    clear_kv_cache_on_weight_sync: bool = True
    """Let an interrupted sample continue from keys and values computed anew by the new weights. False: from those it
    has, which is faster, but samples from a mixture of policies; engines then share no prefixes of prompts."""

    mask_older_tokens: bool = False
    """Train only on the newest version's tokens of a sample that several versions of the weights drew. False: on all,
    which a correction can account for."""

    steps_per_sync: int = field(default=1, validator=positive)
    """Training steps between new weights for the engines; at most `max_staleness_steps + 1`."""

    accept: str | None = None
    """Import path of a function that says of a `TrajectoryGroup` whether it may be trained on (`my_pkg.groups:accept`,
    `groups.py:accept`); another prompt's group takes the place of one that may not. None: all may."""

    stall_timeout_seconds: float = field(default=3600.0, validator=positive, metadata=FREE)
    """Seconds without a usable group, while the trainer waits for a batch, after which the run ends and names the
    groups and calls it waited for."""

"""The training service, `skyrl serve-training`: its address, its limits, and how often it stores its state."""

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, field, frozen
from skyrl.tree.types import Seconds
from skyrl.tree.validators import port_or_free, positive


@frozen
class TrainingServiceConfig(BaseConfig):
    """Address, limits and times of the training service. `skyrl run` does not read this table."""

    host: str = field(default="127.0.0.1", metadata=FREE)
    """Address to listen on. Without tokens of clients (`skyrl serve-training --add-client`), only addresses of this
    machine are allowed."""

    port: int = field(default=8010, validator=port_or_free, metadata=FREE)
    """Port to listen on; 0 picks a free one."""

    train_all_weights: bool = False
    """Train all weights of one model at a time, in place of adapters of many."""

    max_models: int = field(default=64, validator=positive, metadata=FREE)
    """Maximum number of models at once, over all clients."""

    max_rank: int = field(default=64, validator=positive, metadata=FREE)
    """Largest rank of an adapter."""

    resident_models: int = field(default=32, validator=positive, metadata=FREE)
    """Number of models whose adapters, gradients and moments are in memory; the others, those used longest ago, rest on
    the disk until they are asked for again."""

    max_snapshots: int = field(default=16, validator=positive, metadata=FREE)
    """Maximum number of snapshots that the engines hold at once; the one used longest ago makes room, and is loaded
    from the disk when it is sampled from again. Of its snapshots without a name, a model keeps as many on the disk, the
    newest ones."""

    max_pass_tokens: int = field(default=65536, validator=positive, metadata=FREE)
    """Maximum number of tokens in a joint pass of several models; one request alone may have more."""

    max_datums: int = field(default=4096, validator=positive, metadata=FREE)
    """Maximum number of sequences in one request."""

    max_body_bytes: int = field(default=64 << 20, validator=positive, metadata=FREE)
    """Maximum size of a request's body in bytes, after decompression."""

    max_samples: int = field(default=256, validator=positive, metadata=FREE)
    """Maximum number of sampling requests that the engines work on at once; a further one is answered with 429, after
    which clients wait and send it again."""

    client_models: int = field(default=8, validator=positive, metadata=FREE)
    """Maximum number of models at once of one client."""

    client_queue_length: int = field(default=4_000_000, validator=positive, metadata=FREE)
    """Maximum number of tokens of one client in requests that are not finished; a further one is answered with 429. The
    request that a model executes next is always accepted."""

    client_bytes: int = field(default=100 << 30, validator=positive, metadata=FREE)
    """Maximum number of bytes of one client's checkpoints; a save beyond it fails."""

    session_seconds: Seconds = field(default=300.0, validator=positive, metadata=FREE)
    """Time without a heartbeat of the client after which a session ends, which unloads its models. Requests that wait
    as long for one before them, which never arrived, fail."""

    state_steps: int = field(default=20, validator=positive, metadata=FREE)
    """Number of optimizer steps, over all models, after which the state of all models is stored. After a crash, at most
    this many steps are computed again."""

    state_seconds: Seconds = field(default=60.0, validator=positive, metadata=FREE)
    """Time after which changes are stored, if there are fewer steps."""

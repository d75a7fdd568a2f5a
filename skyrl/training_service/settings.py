"""Settings of the training service: its address, its limits and how often it stores its state."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ServiceSettings:
    """Address, limits and times of a training service."""

    host: str = "127.0.0.1"
    """Address to listen on. Without tokens of clients, only addresses of this machine are allowed."""

    port: int = 8000
    """Port number; 0 selects a free port."""

    max_models: int = 8
    """Maximum number of models at once, over all clients."""

    max_rank: int = 64
    """Largest rank of an adapter."""

    max_samplers: int = 16
    """Maximum number of snapshots that the engines hold at once; the one used longest ago makes room, and is loaded
    from the disk when it is sampled from again."""

    max_pass_tokens: int = 65536
    """Maximum number of tokens in a joint pass of several models; one request alone may have more."""

    max_datums: int = 4096
    """Maximum number of sequences in one request."""

    max_body_bytes: int = 64 << 20
    """Maximum size of a request's body, after decompression."""

    max_samples: int = 256
    """Maximum number of sampling requests that the engines work on at once."""

    client_models: int = 8
    """Maximum number of models at once of one client."""

    client_tokens: int = 4_000_000
    """Maximum number of tokens of one client in requests that are not finished; more are answered with 429. The request
    that a model executes next is always accepted."""

    client_bytes: int = 100 << 30
    """Maximum number of bytes of one client's checkpoints; a save beyond it fails."""

    session_seconds: float = 300.0
    """Time without a heartbeat after which a session ends, which unloads its models."""

    state_steps: int = 20
    """Number of optimizer steps, over all models, after which the state of all models is stored. After a crash, at most
    this many steps are computed again."""

    state_seconds: float = 60.0
    """Time after which changes are stored, if there are fewer steps."""


@frozen(kw_only=True)
class ServedModel:
    """The base model of the service, as clients see it."""

    names: tuple[str, ...]
    """Names that clients may use for it; the first one is the name that answers give."""

    context: int
    """Maximum number of tokens of a sequence, prompt and samples included."""

    vocabulary: int
    """Number of tokens of the vocabulary."""

    tokenizer: str
    """Name or folder from which clients load the tokenizer."""

    architecture: str = ""

    full: bool = False
    """Whether all weights are trained, of one model at a time, in place of adapters."""

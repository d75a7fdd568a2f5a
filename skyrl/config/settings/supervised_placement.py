"""Processes of a supervised run."""

from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, field, frozen
from skyrl.tree.types import Seconds
from skyrl.tree.validators import positive


@frozen
class SFTPlacementConfig(BaseConfig):
    """The processes of the model that learns. On a machine without GPUs the counts are processes."""

    num_nodes: int = field(default=1, validator=positive)
    """Nodes of the model."""

    num_gpus_per_node: int = field(default=1, validator=positive)
    """GPUs on each of them."""

    executor: Literal["auto", "in_process", "ray"] = field(default="auto", metadata=FREE)
    """in_process: in the process of the command, where one is enough; ray: Ray actors. auto: ray where there are
    several processes."""

    ray_address: str | None = field(default=None, metadata=FREE)
    """Ray cluster that the run joins, as `host:port`; `auto` is one that runs on this machine. None: the run starts one
    of its own here and ends it. Read when the executor is ray."""

    start_timeout_seconds: Seconds = field(default=600.0, validator=positive, metadata=FREE)
    """Maximum seconds until all processes have started and loaded their models. Read when the executor is ray."""

    call_timeout_seconds: Seconds = field(default=3600.0, validator=positive, metadata=FREE)
    """Maximum seconds for one call of a process, such as one update. Read when the executor is ray."""

    heartbeat_timeout_seconds: Seconds = field(default=60.0, validator=positive, metadata=FREE)
    """The run ends if a process sends no heartbeat for this many seconds. Read when the executor is ray."""

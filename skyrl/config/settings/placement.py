"""Placement: the GPUs that each model gets, and the executor that starts the processes."""

from typing import Any, Literal

from attrs import Attribute

from skyrl.config.foundation.entry import BaseConfig
from skyrl.errors import ConfigError, Problem
from skyrl.planning.allocation import AllocationError, read_allocation
from skyrl.tree import FREE, field, frozen
from skyrl.tree.types import Seconds
from skyrl.tree.validators import positive


def _readable(instance: object, attribute: "Attribute[Any]", value: str | None) -> None:
    """Validates an allocation string. Raises `ConfigError` with the reason if it cannot be parsed."""
    try:
        if value is not None:
            read_allocation(value)
    except AllocationError as error:
        hint = "write it as in vllm:d4t2+fsdp:d8; docs/planning.md has the grammar"
        problem = Problem(path=attribute.name, message=str(error), hint=hint)
        raise ConfigError([problem], title="PlacementConfig cannot be built") from None


@frozen
class ProcessesConfig(BaseConfig):
    """How the processes of a run are started and watched."""

    executor: Literal["auto", "in_process", "ray"] = field(default="auto", metadata=FREE)
    """in_process: everything runs in the process of the command, so one process per model must be enough; ray: Ray
    actors. auto: in_process where one is enough, ray otherwise."""

    ray_address: str | None = field(default=None, metadata=FREE)
    """Ray cluster that the run joins, as `host:port`; `auto` is one that runs on this machine. None: the run starts one
    of its own here and ends it. Read when the executor is ray."""

    start_timeout_seconds: Seconds = field(default=600.0, validator=positive, metadata=FREE)
    """Maximum seconds until all processes have started and loaded their models; after that the run ends and names those
    that are missing. Read when the executor is ray."""

    call_timeout_seconds: Seconds = field(default=3600.0, validator=positive, metadata=FREE)
    """Maximum seconds for one call of a process: one batch of samples, one update, one transfer of weights. Read when
    the executor is ray."""

    heartbeat_timeout_seconds: Seconds = field(default=60.0, validator=positive, metadata=FREE)
    """The run ends if a process sends no heartbeat for this many seconds. A busy process sends heartbeats, a stopped
    one does not. A process that is still starting has `start_timeout_seconds`. Read when the executor is ray."""


@frozen
class PlacementConfig(ProcessesConfig):
    """Nodes and GPUs of each model. On a machine without GPUs the counts are processes. They may change on resume."""

    colocate_all: bool = True
    """Training and inference take turns on the same GPUs: policy and engines must then have the same number of GPUs. A
    run in one process moves nothing where its GPU holds all of it in half of its memory. False: engines have GPUs of
    their own."""

    colocate_policy_ref: bool = True
    """Let policy and reference (and critic and teacher) share GPUs without `colocate_all`, so that their counts must
    agree. False: each has its own."""

    policy_num_nodes: int = field(default=1, validator=positive, metadata=FREE)
    """Nodes of the policy."""

    policy_num_gpus_per_node: int = field(default=1, validator=positive, metadata=FREE)
    """GPUs of the policy on each of its nodes."""

    critic_num_nodes: int = field(default=1, validator=positive, metadata=FREE)
    """Nodes of the critic, if there is one."""

    critic_num_gpus_per_node: int = field(default=1, validator=positive, metadata=FREE)
    """GPUs of the critic on each of its nodes."""

    ref_num_nodes: int = field(default=1, validator=positive, metadata=FREE)
    """Nodes of the reference, if there is one."""

    ref_num_gpus_per_node: int = field(default=1, validator=positive, metadata=FREE)
    """GPUs of the reference on each of its nodes."""

    teacher_num_nodes: int = field(default=1, validator=positive, metadata=FREE)
    """Nodes of the teacher, if there is one."""

    teacher_num_gpus_per_node: int = field(default=1, validator=positive, metadata=FREE)
    """GPUs of the teacher on each of its nodes."""

    gpu_kind: Literal["H100-80", "H200-141", "A100-40", "A100-80", "L40S"] | None = field(default=None, metadata=FREE)
    """Kind of every GPU of the run, with its memory in gigabytes. `skyrl plan` and the check of a configuration then
    report whether each phase fits; nothing that a run computes depends on it. None: sizes are counted, not judged."""

    allocation: str | None = field(default=None, validator=_readable, metadata=FREE)
    """GPUs and degrees of parallelism of engines and models in one string, as AReaL writes it, in place of the fields
    for them here, of `strategy`, of the models' parallel sizes and of the engines' number and sizes:
    `vllm:d4t2+fsdp:d8` gives each its own GPUs, `vllm:d4t2|fsdp:d8` lets them take turns. Machines have 8 GPUs. A field
    that is also set must agree. See docs/planning.md. None: the fields decide."""


@frozen
class SFTPlacementConfig(ProcessesConfig):
    """Processes of a supervised run, which has one model. On a machine without GPUs the counts are processes."""

    num_nodes: int = field(default=1, validator=positive)
    """Nodes of the model."""

    num_gpus_per_node: int = field(default=1, validator=positive)
    """GPUs on each of them."""

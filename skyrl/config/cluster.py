"""Where `skyrl launch` starts runs: the machines of one site, in a file of its own (docs/launching.md).

It describes a cluster, not a training run: the same file serves every run, and no value in it changes what is learned.
It is therefore not a table of the run's tree, and not stored with checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import evolve

from skyrl.config.foundation.entry import BaseConfig
from skyrl.errors import ConfigError, Problem
from skyrl.tree import FrozenDict, field, frozen
from skyrl.tree.arguments import read_argument
from skyrl.tree.builder import ReadContext, TreeBuilder
from skyrl.tree.files import read_file
from skyrl.tree.masking import is_secret_name
from skyrl.tree.types import Gigabytes, Seconds
from skyrl.tree.validators import non_negative, positive, rule_of_one_field

_is_word = rule_of_one_field(
    lambda value: re.fullmatch(r"[\w.,:@%+=/&|!*()\[\]-]+", value, re.ASCII) is not None,
    "a name in Slurm: letters, digits and .,:@%+=/&|!*()[]-_ without spaces",
)
_is_interface = rule_of_one_field(
    lambda value: re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", value) is not None, "the name of a network interface"
)
_are_variables = rule_of_one_field(
    lambda value: all(
        re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and text.isprintable() for name, text in value.items()
    ),
    "a table of environment variables: names of letters, digits and _, and texts of one line",
)
_are_options = rule_of_one_field(
    lambda value: all(re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", option) and option.isprintable() for option in value),
    "a list of options, each in one word, such as --exclusive or --gres=gpu:h100:8",
)
_are_mounts = rule_of_one_field(
    lambda value: all(re.fullmatch(r"/[^:,]*(:/[^:,]*(:r[ow])?)?", mount) and mount.isprintable() for mount in value),
    "a list of mounts, each as /folder, /folder:/inside or /folder:/inside:ro",
)
_is_text = rule_of_one_field(str.isprintable, "text of one line")
_are_lines = rule_of_one_field(lambda value: all(map(str.isprintable, value)), "a list of lines")


@frozen
class ContainerConfig(BaseConfig):
    """The container that every process of a Slurm job runs in."""

    type: Literal["none", "apptainer", "pyxis"] = "none"
    """apptainer: `apptainer exec` on each node; pyxis: the options `--container-*` that the Pyxis plugin gives to srun.
    none: the processes run on the nodes as they are."""

    image: str = field(default="", validator=_is_text)
    """Image: a file, or an address that the container software knows, such as `docker://team/image:1`."""

    mounts: tuple[str, ...] = field(default=(), validator=_are_mounts)
    """Folders of the node inside the container, as `/folder:/inside:ro`; a folder alone keeps its name. The folder that
    the command runs in, and that of the launch, are always there."""

    python: str = field(default="python", validator=_is_text)
    """Python inside the container, with skyrl installed."""

    def own_problems(self) -> Iterator[Problem]:
        if self.type != "none" and not self.image:
            yield Problem(path="image", message="no image for the container", hint="set one, or set type = none")
        if self.type == "none" and self.image:
            yield Problem(path="type", message="is none, but an image is given", hint="set it to apptainer or pyxis")


@frozen
class SlurmConfig(BaseConfig):
    """A Slurm job. Options that are not set are left to the cluster."""

    partition: str | None = field(default=None, validator=_is_word)
    """Partition. None: the default of the cluster."""

    account: str | None = field(default=None, validator=_is_word)
    """Account that the job is charged to. None: the default of the user."""

    qos: str | None = field(default=None, validator=_is_word)
    """Quality of service. None: the default of the user."""

    reservation: str | None = field(default=None, validator=_is_word)
    """Reservation that the job runs in. None: no reservation."""

    constraint: str | None = field(default=None, validator=_is_word)
    """Features that the nodes must have, such as `h100&nvlink`. None: any nodes."""

    time: Seconds | None = field(default=None, validator=positive)
    """Time limit of the job, rounded up to minutes. None: that of the partition."""

    nodes: int | None = field(default=None, validator=positive)
    """Nodes of the job. None: as few as hold the run."""

    gpus_per_node: int | None = field(default=None, validator=positive)
    """GPUs of each node; slots for processes where `trainer.device` is cpu. None: as many as the run needs."""

    gpu_type: str | None = field(default=None, validator=_is_word)
    """Type of the GPUs, as in `--gres=gpu:TYPE:8`. None: any."""

    cpus_per_gpu: int = field(default=8, validator=positive)
    """CPU cores for each GPU or slot. A node gives as many cores as its GPUs together ask for."""

    memory_per_gpu: Gigabytes | None = field(default=None, validator=positive)
    """Host memory for each GPU or slot, in GB; rounded up to MiB for each node. None: the default of the partition."""

    signal_before: Seconds = field(default=300.0, validator=positive)
    """Seconds before the time limit at which the run is asked to save a checkpoint and to stop. Slurm checks about once
    a minute, so the signal may come a minute early or late."""

    max_requeues: int = field(default=100, validator=non_negative)
    """Times that a job that saved and stopped (exit code 75) goes back to the queue by itself. 0: never. A job that
    lost a node or was preempted is requeued by Slurm and not counted."""

    network_interface: str | None = field(default=None, validator=_is_interface)
    """Network interface, such as `ib0`, whose address Ray uses on each node. None: the address that the node's own name
    or its first interface has."""

    container: ContainerConfig = ContainerConfig()
    """The container that the processes run in."""

    sbatch_options: tuple[str, ...] = field(default=(), validator=_are_options)
    """Further options of sbatch, such as `--exclusive`. They come last and take precedence."""

    srun_options: tuple[str, ...] = field(default=(), validator=_are_options)
    """Further options of srun, such as `--mpi=none`."""

    def own_problems(self) -> Iterator[Problem]:
        if self.time is not None and self.time < self.signal_before + 120:
            message = f"{self.time:g} s leave no time to train before the signal at {self.signal_before:g} s"
            yield Problem(path="time", message=message, hint="allow more time, or lower signal_before")
        yield from self.container.problems_at("container")


@frozen
class RayJobsConfig(BaseConfig):
    """A Ray cluster that runs already."""

    address: str = field(
        default="http://127.0.0.1:8265",
        validator=rule_of_one_field(
            lambda value: re.fullmatch(r"https?://[^\s@]+", value) is not None, "the http address of Ray's dashboard"
        ),
    )
    """Address of its dashboard, where jobs are submitted. Its token, if it asks for one, is in RAY_AUTH_TOKEN or the
    file that RAY_AUTH_TOKEN_PATH names."""


@frozen
class ClusterConfig(BaseConfig):
    """How runs are started on the machines of one site; read by `skyrl launch` and `skyrl sweep`."""

    folder: str = field(default="launches", validator=_is_text)
    """Folder that holds a folder for each launch, with its configuration, script, logs and state. For more than one
    machine it must be on a disk that all of them mount under the same path."""

    python: str | None = field(default=None, validator=_is_text)
    """Python that starts the run, outside of a container. None: the one of this command."""

    variables: Mapping[str, str] = field(default=FrozenDict(), validator=_are_variables)
    """Environment variables of the run. Keys and tokens do not belong here, since they would be written to disk: export
    them before the command, whose environment Slurm and local runs inherit."""

    prologue: tuple[str, ...] = field(default=(), validator=_are_lines)
    """Lines of bash that run before the run, such as `module load cuda` or `source venv/bin/activate`. Not read by
    `ray`, whose machines are set up already."""

    slurm: SlurmConfig = SlurmConfig()
    """Read by `skyrl launch slurm`."""

    ray: RayJobsConfig = RayJobsConfig()
    """Read by `skyrl launch ray`."""

    def own_problems(self) -> Iterator[Problem]:
        for name in self.variables:
            if is_secret_name(name.lower()):
                message = "looks like a secret, and would be written to disk"
                yield Problem(path=f"variables.{name}", message=message, hint=f"export {name} before the command")
        yield from self.slurm.problems_at("slurm")


def load_cluster(
    file: str | None, overrides: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> ClusterConfig:
    """The cluster that a TOML, YAML or JSON file and PATH=VALUE overrides describe; the default cluster without either.

    Raises `ConfigError` with every problem.
    """
    builder: TreeBuilder[Any] = TreeBuilder(ClusterConfig(), ReadContext(environ=environ, is_open=True))
    if file is not None:
        builder.assign_all(read_file(file))
    for number, word in enumerate(overrides, start=1):
        builder.assign(read_argument(word, number))
    cluster: ClusterConfig = builder.build()
    problems = [evolve(problem, severity="error") for problem in builder.problems] or [*cluster.own_problems()]
    if problems:
        raise ConfigError(problems, title="This cluster cannot be used")
    return cluster

"""A run prepared for launching: checked here, stored as a file that does not change until the run starts, and given
machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import evolve

from skyrl.config.cluster import ClusterConfig
from skyrl.config.derive.sizes import GPUS_OF_A_MACHINE
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import kind_of
from skyrl.config.loading.load import chosen_root, compose, load
from skyrl.config.loading.standalone_file import kept_text
from skyrl.errors import ConfigError, UserError, render
from skyrl.launchers.job import Job, Machines, Target
from skyrl.launchers.local import local_script
from skyrl.launchers.ray import RayLauncher
from skyrl.launchers.slurm import script_of
from skyrl.planning.layout import ClusterNode, NoRoom, assign, layout
from skyrl.storage.atomic import write_file
from skyrl.tree import get_at
from skyrl.tree.rules import Check

RUN_FILE = "run.toml"
_SAVING_SECONDS = 60.0
"""Number of seconds by which Slurm's signal may be late."""


class Prepared:
    """A run for one target. Raises `ConfigError` and `UserError` if it cannot run there."""

    def __init__(
        self,
        target: Target,
        files: Sequence[str],
        overrides: Sequence[str],
        cluster: ClusterConfig,
        *,
        environ: Mapping[str, str],
        strict: bool = False,
        also: Sequence[Check[Any]] = (),
    ) -> None:
        """`also` are further checks of the run, such as those of its folders."""
        self._target, self._cluster = target, cluster
        device = kind_of(chosen_root(files, overrides)).path("device")
        self.is_taken_for_cuda = False
        if target != "local":
            with suppress(ConfigError):  # a tree that cannot be read is refused below
                written = load(files, overrides, environ=environ).config
                self.is_taken_for_cuda = bool(get_at(written, device) == "auto")
        device_overrides = [f"{device}=cuda"] if self.is_taken_for_cuda else []
        composed = compose(files, [*overrides, *device_overrides], strict=strict, environ=environ, also=lambda _: also)
        self.run: Any = composed.config
        """The configuration, resolved as far as this machine can tell."""
        self._warnings = composed.warnings
        self.text = kept_text(composed.written, composed.origins)
        """Text of the launch's configuration file."""
        self.machines = machines_of(self.run, cluster if target == "slurm" else ClusterConfig())
        grace, before = float(self._value_at("faults.grace_period_seconds")), cluster.slurm.signal_before
        if target == "slurm" and before < grace + _SAVING_SECONDS:
            raise UserError(
                f"slurm.signal_before = {before:g} s is too short for {self._path('faults.grace_period_seconds')} = "
                f"{grace:g} s: Slurm's signal may come {_SAVING_SECONDS:g} s late, so set it to "
                f"{grace + _SAVING_SECONDS:g} or more"
            )

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self._value_at("run_name"))

    @property
    def remarks(self) -> Iterator[str]:
        """Lines to print before the start."""
        if self._warnings:
            yield render(self._warnings, "Warnings")
        if self.is_taken_for_cuda:
            yield f"{self._path('device')} = auto: taken as cuda, since the run uses other machines than this one."
        if self._target == "slurm" and not self._resumes():
            yield "This run does not resume, so it is never requeued: it would start from scratch."

    def job(self, name: str, folder: Path, after: tuple[str, ...] = ()) -> Job:
        """The job; writes the configuration into its folder. Raises `UserError`."""
        try:
            write_file(folder / RUN_FILE, self.text)
        except OSError as error:
            raise UserError(f"{folder / RUN_FILE} cannot be written: {error.strerror}") from None
        return self._job(name, folder, after)

    def shown(self, name: str, after: tuple[str, ...], python: str) -> str:
        """The script that would be run, with the folder that would be made."""
        job = self._job(name, (Path(self._cluster.folder) / name).absolute(), after)
        if self._target == "local":
            return local_script(job, self._cluster, python)
        if self._target == "ray":
            return RayLauncher(self._cluster, python).command(job) + "\n"
        return script_of(job, self.cluster, python)

    @property
    def cluster(self) -> ClusterConfig:
        """The cluster; requeues are turned off for a run that does not resume."""
        if self._resumes():
            return self._cluster
        return evolve(self._cluster, slurm=evolve(self._cluster.slurm, max_requeues=0))

    def _job(self, name: str, folder: Path, after: tuple[str, ...]) -> Job:
        return Job(name=name, folder=folder, cwd=Path.cwd(), machines=self.machines, after=after)

    def _resumes(self) -> bool:
        """Whether the same command resumes from the last checkpoint."""
        return bool(self.run.trainer.resume_mode == "latest")

    def _path(self, field: str) -> str:
        return kind_of(self.run).path(field)

    def _value_at(self, field: str) -> Any:
        return get_at(self.run, self._path(field))


def machines_of(run: RunConfig, cluster: ClusterConfig) -> Machines:
    """Machines of one size for a resolved run: as the cluster's configuration says, else the fewest that hold it.

    Raises `UserError` if a machine, or their number, is too small.
    """
    slurm, kind = cluster.slurm, kind_of(run)
    laid = layout(kind.sizes(run))
    machine = slurm.gpus_per_node or max(GPUS_OF_A_MACHINE, *(pool.gpus_per_node for pool in laid.pools), 1)
    nodes = [ClusterNode(id=str(number), gpus=machine) for number in range(sum(pool.nodes for pool in laid.pools))]
    try:
        used_nodes = {node for nodes_of_pool in assign(laid, nodes).values() for node in nodes_of_pool}
    except NoRoom as error:
        message = f"{error.pool.name} needs {error.pool.gpus_per_node} GPUs on one node, and a node has {machine}"
        raise UserError(f"{message}: see gpus_per_node of the cluster") from None
    needed = max(1, len(used_nodes))
    per_node = slurm.gpus_per_node or (machine if needed > 1 else max(1, laid.gpus))
    if slurm.nodes is not None and slurm.nodes < needed:
        raise UserError(f"slurm.nodes = {slurm.nodes}, and this run needs {needed} of {per_node} GPUs or slots each")
    return Machines(
        nodes=slurm.nodes or needed,
        per_node=per_node,
        device=get_at(run, kind.path("device")),
        on_ray=get_at(run, kind.path("placement.executor")) == "ray",
        address_field=kind.path("placement.ray_address"),
    )

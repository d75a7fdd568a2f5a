"""Builds a description of a cluster (docs/launching.md) from those settings of a foreign file that concern machines."""

from __future__ import annotations

from typing import Any

from skyrl.config.cluster import ClusterConfig
from skyrl.config.loading.standalone_file import put
from skyrl.tree.arguments import split_path
from skyrl.tree.builder import ReadContext, TreeBuilder
from skyrl.tree.masking import is_secret_name
from skyrl.tree.origins import Assignment, Origin
from skyrl.tree.types import GIGABYTES

NAME = "cluster.toml"
"""The file in reports, which name its fields as `cluster.toml:slurm.time`."""

_LARGEST = ("slurm.cpus_per_gpu", "slurm.memory_per_gpu")
"""Fields whose largest value over all processes is used."""

_VARIABLES = "variables."


class ClusterFile:
    """A draft of `cluster.toml`, to which several foreign settings may contribute to one field."""

    def __init__(self, where: str) -> None:
        """`where` names the foreign file in messages."""
        self._where = where
        self._values: dict[tuple[str, ...], Any] = {}

    def write(self, source: str, path: str, value: object) -> str:
        """Write a value to a path of the cluster's description. Returns the reason if that fails, else empty text."""
        names = _names(path)
        if path.startswith(_VARIABLES) and is_secret_name(names[-1].lower()):
            return f"looks like a secret, and would be written to disk: export {names[-1]} before the launch"
        merged = self._merged(path, names, value)
        if merged is None:
            return f"is {self._values[names]!r} for other processes, but all processes of a run share one {path}"
        builder: TreeBuilder[Any] = TreeBuilder(ClusterConfig(), ReadContext())
        origin = Origin(kind="file", where=f"{self._where}: {source}")
        builder.assign(Assignment(path=names, value=merged, origin=origin))
        builder.build()
        if builder.problems:
            return f"{path}: {builder.problems[0].message}"
        self._values[names] = merged
        return ""

    def tables(self) -> dict[str, Any]:
        """The content of the TOML file as nested plain data."""
        tables: dict[str, Any] = {}
        for names, value in self._values.items():
            put(tables, names, value)
        return tables

    def _merged(self, path: str, names: tuple[str, ...], value: Any) -> Any:
        """The value merged with what other settings wrote to the path; None if they contradict each other."""
        earlier = self._values.get(names)
        if earlier is None or earlier == value:
            return value
        if path in _LARGEST:
            return max(earlier, value, key=_size)
        if isinstance(earlier, list):
            return [*earlier, *(item for item in value if item not in earlier)]
        return None


def _size(value: int | str) -> float:
    """A number, or a size with its unit in gigabytes."""
    return (GIGABYTES.read(value) or 0.0) if isinstance(value, str) else value


def _names(path: str) -> tuple[str, ...]:
    """Names of a path. Names of variables may contain any character."""
    if path.startswith(_VARIABLES):
        return ("variables", path.removeprefix(_VARIABLES))
    return split_path(path)

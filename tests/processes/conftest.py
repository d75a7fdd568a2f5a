"""One cluster for all the tests that are content with one; when it ends, nothing may be left of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.processes.handles import Deadlines
from skyrl.processes.orphans import RUN, tagged
from skyrl.processes.ray.processes import RayProcesses
from tests.processes.clusters import layout, own_folder

ROLES = {"counter": 1, "broken": 1, "engine": 1, "ahead": 1, "late": 1, "early": 1, "said": 1} | dict.fromkeys(
    ("stays", "vanishes", "crashes", "dies", "again", "freezes", "loses", "misses", "spawns", "unmade", "slow"), 2
)


class SharedCluster:
    """Started when it is needed, ended when a test wants this process for another cluster."""

    heartbeat = 15.0

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.folder = Path()
        self._processes: RayProcesses | None = None

    def processes(self) -> RayProcesses:
        """The cluster, with seats for every role of `ROLES`."""
        if self._processes is None:
            self._processes = RayProcesses(
                layout(**ROLES),
                deadlines=Deadlines(start=120, call=60, heartbeat=self.heartbeat),
                address=None,
                logs=self.logs,
                device="cpu",
                environment={"SOME_SETTING": "7"},
            )
            self.folder = own_folder()
        return self._processes

    def end(self) -> None:
        """Ends it, and looks for leftovers."""
        if self._processes is not None:
            assert tagged(RUN, self.folder.name, self.folder)
            self._processes.close()
            self._processes.close()  # the second time does nothing
            self._processes = None
            assert tagged(RUN, self.folder.name, self.folder) == []
            assert not self.folder.exists()
            assert not list(Path("/dev/shm").glob(f"*{self.folder.name}*"))


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    shared = SharedCluster(tmp_path_factory.mktemp("logs"))
    yield shared
    shared.end()

"""Folders at a known place that another user has made first: nothing is read from them or written to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.processes.naming.names import Entry
from skyrl.processes.naming.names_on_disk import NamesOnDisk
from skyrl.processes.private_folder import make_own_folder
from skyrl.weight_sync.transports import DeltaTransport, FolderTransport, WeightSource

STRANGER = 4711


@pytest.fixture
def owned_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Gives a folder, or all below it, another owner, as `os.stat` shows it. Files may be made in it all the same."""
    owners: dict[str, int] = {}
    stat = os.stat

    def shown(path: str | Path, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        status = stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        return os.stat_result((*status[:4], owners.get(str(path), status.st_uid), *status[5:]))

    monkeypatch.setattr(os, "stat", shown)
    return lambda folder, owner: owners.update({str(folder): owner})


class _Weights:
    async def shapes(self, *, adapter: bool = False) -> dict[str, tuple[int, ...]]:
        return {}


def _send(transport: FolderTransport | DeltaTransport) -> None:
    asyncio.run(transport.send(cast(WeightSource, _Weights()), cast(InferenceEngineClient, None), 1))


USES: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "a name is published": (ProcessError, lambda folder: NamesOnDisk(folder).add("judge", Entry("a", "a"), 10)),
    "a name is renewed": (ProcessError, lambda folder: NamesOnDisk(folder).renew("judge", Entry("a", "a"), 10)),
    "a name is withdrawn": (ProcessError, lambda folder: NamesOnDisk(folder).remove("judge", "a")),
    "a name is read": (ProcessError, lambda folder: NamesOnDisk(folder).get("judge")),
    "names are listed": (ProcessError, lambda folder: NamesOnDisk(folder).find("")),
    "weights": (WeightSyncError, lambda folder: _send(FolderTransport(folder, dtype="float32"))),
    "changed weights": (WeightSyncError, lambda folder: _send(DeltaTransport(folder, dtype="float32"))),
    "an adapter": (
        WeightSyncError,
        lambda folder: _send(FolderTransport(folder, dtype="float32", lora=SkyRLLoraConfig())),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_folder_of_another_user_is_refused(use: str, tmp_path: Path, owned_by: Callable[[Path, int], None]) -> None:
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / "theirs").touch()
    owned_by(tmp_path, STRANGER)
    error, work = USES[use]
    with pytest.raises(error, match="belongs to the user with id 4711.*name a folder of your own"):
        work(tmp_path)
    assert [file.name for file in tmp_path.rglob("*")] == ["delta", "theirs"]


def test_a_folder_of_this_user_or_of_root_is_used(tmp_path: Path, owned_by: Callable[[Path, int], None]) -> None:
    make_own_folder(tmp_path / "new" / "deep", 0o700)
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700
    owned_by(tmp_path, 0)
    make_own_folder(tmp_path)


def test_a_disk_that_shows_another_owner_for_what_this_user_makes_is_used(
    tmp_path: Path, owned_by: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "new")
    for path in (tmp_path, tmp_path / ".new"):
        owned_by(path, 65534)
    make_own_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []

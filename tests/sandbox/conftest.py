"""What the attacks on sandboxes share: a sandbox of each tier, and what a program may want."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from uuid import uuid4

import pytest

from skyrl.sandbox.sandbox import Sandbox
from tests.sandbox.attacks import HERE


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that only the user of the run may enter."""
    folder = tmp_path_factory.mktemp("closed")
    (folder / "open").mkdir(mode=0o755)
    (folder / "beside").write_text("secret")
    folder.chmod(0o700)
    return folder


@pytest.fixture(params=HERE, scope="module")
def sandbox(request: pytest.FixtureRequest, closed: Path) -> Iterator[Sandbox]:
    """A sandbox of each tier, whose programs may read a folder inside a closed one, named twice."""
    sandbox = Sandbox(request.param, readable=[closed / "open", closed / "open"])
    yield sandbox
    sandbox.close()


@pytest.fixture
def stands_for(tmp_path: Path, closed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What a program may want, by the word that stands for it. A server on loopback has a datagram socket of the same
    number, an abstract one of that name, and one on a file.
    """
    monkeypatch.setenv("SKYRL_SECRET", "1")
    private_file = tmp_path / "theirs"
    private_file.touch(mode=0o600)
    shared = Path(tempfile.mkdtemp())
    (shared / "guest").mkdir()
    for path in (shared, shared / "guest"):
        path.chmod(0o777)
    secret, everybodys = tmp_path / "secret", Path(tempfile.gettempdir()) / f"skyrl-{uuid4().hex}"
    secret.write_text("secret", encoding="utf-8")
    secret.chmod(0o600)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
    ):
        port: int = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        abstract.bind(f"\0skyrl-canary-{port}")
        abstract.listen()
        file.bind(f"{everybodys}.socket")
        Path(f"{everybodys}.socket").chmod(0o777)
        file.listen()
        Thread(target=_answer, args=(server,), daemon=True).start()
        yield {
            "CLOSED": str(closed),
            "SECRET": str(secret),
            "SOCKET": f"{everybodys}.socket",
            "CANARY": str(everybodys),
            "THEIRS": str(private_file),
            "SHARED": str(shared),
            "MINE": str(tmp_path / "mine"),
            "HOME": str(Path.home()),
            "PORT": str(port),
            "RUN": str(os.getpid()),
        }
    for left in (everybodys, Path(f"{everybodys}.socket"), Path("/dev/shm") / f"skyrl-{port}"):
        left.unlink(missing_ok=True)
    shutil.rmtree(shared)


def _answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nx")

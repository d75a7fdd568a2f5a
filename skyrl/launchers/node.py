"""One node of a Slurm job: the run on the first, and Ray on all of them if the run needs it.

The first node publishes the address of Ray's head in the launch's folder, under a name specific to this start of the
job. The others join it, and end when the name is gone: at the end of the run, or some seconds after the first node is
lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from skyrl.errors import ProcessError
from skyrl.launchers.supervised import handling, supervise
from skyrl.processes.logs import BOUNDS_OF_RAY
from skyrl.processes.naming.names import Published, wait_for
from skyrl.processes.naming.names_on_disk import NamesOnDisk

HEAD = "ray-head"
_NAMES = "names"
_TOKEN = "ray-token"
_START_SECONDS = 300.0
_LOOK_SECONDS = 2.0


@attrs.frozen(kw_only=True)
class JobNode:
    """The role of this node in a job."""

    folder: Path
    """Folder of the launch, or of a task of its array, on a disk that all nodes share."""

    rank: int = 0
    nodes: int = 1
    start: str = "0"
    """Identifier of this start of the job; a requeued job gets a new one."""

    name: str = ""
    """Name that the scheduler gave the node, if any."""

    stop_file: Path | None = None
    """File whose appearance asks the run to save and stop."""

    @classmethod
    def of(cls, folder: Path, stop_file: Path | None, environ: Mapping[str, str]) -> JobNode:
        """The node as described by Slurm's variables; without Slurm, the only node."""
        job, restarts = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_RESTART_COUNT", "0")
        return cls(
            folder=folder,
            stop_file=stop_file,
            rank=int(environ.get("SLURM_PROCID", "0")),
            nodes=int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NTASKS", "1")),
            start=f"{job}-{restarts}",
            name=environ.get("SLURMD_NODENAME", ""),
        )

    @property
    def names(self) -> NamesOnDisk:
        """Names that are published by this start of the job."""
        return NamesOnDisk(self.folder / _NAMES / self.start)


@attrs.frozen(kw_only=True)
class RayShare:
    """Resources that a node contributes to the Ray cluster of its job."""

    gpus: int = 0
    slots: int = 0
    interface: str = ""
    """Network interface whose address is used; if empty, the address of the node."""


def run_on_ray(
    command: Sequence[str], node: JobNode, share: RayShare, address_field: str, environ: Mapping[str, str]
) -> int:
    """Run the command on a Ray cluster of this job's nodes. Returns its exit code, and 0 on all nodes except the first.

    Raises `ProcessError` if Ray does not start, or its head does not appear in time.
    """
    holders = (folder / _TOKEN for folder in (node.folder, *node.folder.parents))
    token = next((holder for holder in holders if holder.exists()), None)
    if token is None:
        raise ProcessError(f"{node.folder} has no {_TOKEN}: it was not made by skyrl launch slurm")
    environ = {
        **BOUNDS_OF_RAY,
        **environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # the placement assigns the GPUs
    }
    own = _address(share.interface, node.name)
    if node.rank == 0:
        with socket.socket() as probe:  # the kernel picks a free port
            probe.bind(("", 0))
            address = f"{own}:{probe.getsockname()[1]}"
        scratch = _private_folder(Path(tempfile.gettempdir()) / f"skyrl-ray-{node.start}")
        with _ray(node, own, address, scratch, share, environ) as head:
            _wait_until_it_listens(address, head)
            with Published(node.names, HEAD, f"{address} {scratch}"):
                _wait_for_nodes(address, node.nodes, environ)
                return supervise([*command, f"{address_field}={address}"], node.folder, environ, node.stop_file)
    published = wait_for(node.names, HEAD, _START_SECONDS)
    address, _, folder = published.partition(" ")
    scratch = _private_folder(Path(folder))  # Ray uses the same path as on the head
    # Signals to stop are ignored, so that Ray stays on this node while the run on the first node saves. If Ray does not
    # end by itself, the scheduler kills it.
    ignoring = handling((signal.SIGTERM, signal.SIGINT), signal.SIG_IGN)
    with ignoring, _ray(node, own, address, scratch, share, environ) as worker:
        while node.names.get(HEAD) == published:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_LOOK_SECONDS)
                host = node.name or socket.gethostname()
                raise ProcessError(f"Ray ended on {host} with exit code {worker.returncode}: see {_log(node)}")
    return 0


def make_token(folder: Path) -> None:
    """Make the file with the token that authenticates every process of Ray, unless it exists."""
    if (folder / _TOKEN).exists():
        return
    with os.fdopen(os.open(folder / _TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


@contextlib.contextmanager
def _ray(
    node: JobNode, own: str, head: str, scratch: Path, share: RayShare, environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs Ray's processes on this node until the end of the block, and then removes `scratch`."""
    from skyrl.processes.ray.processes import OBJECT_STORE_BYTES

    port = head.rpartition(":")[2]
    inside = str(scratch / "ray")  # which Ray makes accessible to others
    as_head = ["--head", "--port", port, "--include-dashboard=false", "--temp-dir", inside]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(as_head if node.rank == 0 else ["--address", head]),
        *("--node-ip-address", own, "--num-cpus", "0", "--num-gpus", str(share.gpus)),
        *("--resources", f'{{"slot": {share.slots}}}', "--disable-usage-stats"),
        *("--object-store-memory", str(OBJECT_STORE_BYTES)),
    ]
    with _log(node).open("ab") as log:
        process = subprocess.Popen(command, env=dict(environ), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # Ray's remaining processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def _private_folder(folder: Path) -> Path:
    """Make a folder that only this user can access. Its path must be short: socket paths have at most 107 bytes."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise ProcessError(f"{folder}, which Ray would use, is another user's or open to others: remove it")
    return folder


def _log(node: JobNode) -> Path:
    """File with the output of Ray on this node."""
    return node.folder / f"ray-{node.start}-{node.rank}.txt"


def _wait_for_nodes(address: str, nodes: int, environ: Mapping[str, str]) -> None:
    """Wait until every node of the job has joined, because a run that does not fit on Ray is refused at once."""
    command = [sys.executable, "-m", "skyrl.processes.ray.nodes", address, str(nodes), str(_START_SECONDS)]
    result = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False)
    if result.returncode:
        raise ProcessError(f"Ray at {address}: {(result.stderr.strip().splitlines() or ['no answer'])[-1]}")


def _wait_until_it_listens(address: str, head: subprocess.Popen[bytes]) -> None:
    host, _, port = address.rpartition(":")
    waiting = threading.Event()
    for _ in range(int(_START_SECONDS / 0.5)):
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), 5).close()
            return
        if head.poll() is not None:
            raise ProcessError(f"Ray's head ended with exit code {head.returncode} before it listened on {address}")
        waiting.wait(0.5)
    raise ProcessError(f"Ray's head did not listen on {address} within {_START_SECONDS:g} s")


def _address(interface: str, name: str) -> str:
    """IPv4 address of this node. Raises `ProcessError` for an interface that has none."""
    if interface:
        listed = subprocess.run(
            ["ip", "-4", "-o", "addr", "show", "dev", interface], capture_output=True, text=True, check=False
        )
        words = listed.stdout.split()
        if "inet" not in words:
            raise ProcessError(f"The interface {interface} (slurm.network_interface) has no IPv4 address here")
        return words[words.index("inet") + 1].partition("/")[0]
    for known in (name, socket.gethostname()):
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(known) if known else ""
            if address and not address.startswith("127."):
                return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel picks the address
        return str(probe.getsockname()[0])
    return "127.0.0.1"

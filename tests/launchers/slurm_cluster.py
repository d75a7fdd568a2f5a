"""A real Slurm on this machine: one controller and four nodes of eight fake GPUs, all below one folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Path]:
    """Starts it, and ends it with the block; gives its `slurm.conf`, which SLURM_CONF has to name."""
    for name in ("run", "log", "spool", "gpus"):
        (folder / name).mkdir(parents=True)
    for gpu in range(8):
        (folder / "gpus" / f"gpu{gpu}").symlink_to("/dev/null")
    conf = folder / "slurm.conf"
    conf.write_text(_configuration(folder), encoding="utf-8")
    (folder / "gres.conf").write_text(
        f"AutoDetect=off\nNodeName=n[1-4] Name=gpu File={folder}/gpus/gpu[0-7]\n", encoding="utf-8"
    )
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "log" / "output.log").open("wb") as log:

        def start(*words: str) -> None:
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True))

        try:
            _start_munge(folder, start)
            start("slurmctld", "-D", "-f", str(conf))
            for node in NODES:
                start("slurmd", "-D", "-N", node, "-f", str(conf))
            _wait_until_idle(environment, folder)
            yield conf
        finally:
            subprocess.run(["scancel", "--user=root", "--full"], env=environment, check=False, capture_output=True)
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()


def _start_munge(folder: Path, start: object) -> None:
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))
    run, log = folder / "run", folder / "log"
    assert callable(start)
    start(
        "munged",
        "--foreground",
        "--force",
        f"--socket={run}/munge.sock",
        f"--key-file={key}",
        f"--pid-file={run}/munged.pid",
        f"--log-file={log}/munged.log",
        f"--seed-file={run}/munged.seed",
    )


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        result = subprocess.run(
            ["sinfo", "-h", "-o", "%D %T"], env=environment, capture_output=True, text=True, check=False
        )
        if result.stdout.split() == ["4", "idle"]:
            return
        time.sleep(0.2)
    raise AssertionError(f"Slurm did not start: {(folder / 'log' / 'output.log').read_text()[-2000:]}")


def _configuration(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    controller, *nodes = _free_ports(5)
    return f"""\
ClusterName=skyrl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
StateSaveLocation={folder}/spool/ctld
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
ReturnToService=0
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=30
GresTypes=gpu
DefMemPerCPU=100
{"".join(_node(name, port, host) for name, port in zip(NODES, nodes, strict=True))}\
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=1-0 State=UP
"""


def _node(name: str, port: int, host: str) -> str:
    return f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=4000 Gres=gpu:8\n"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]

"""The Ray cluster of a run: a private one on this machine, or one that is running already.

A private cluster listens only on loopback, requires a token that only this user can read, keeps all its files in one
private folder, and ends with the process that started it, however that process ends (`orphans.py`). A running cluster
is used as it is, and is left running.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ray
import ray._private.ray_constants as ray_constants
import ray._private.worker as ray_worker
from ray import ObjectRef, _raylet
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET

from skyrl.errors import ProcessError
from skyrl.processes.addresses import why_unreachable
from skyrl.processes.logs import BOUNDS_OF_RAY
from skyrl.processes.orphans import RUN, kill_tagged, make_private_folder, private_root, start_reaper, sweep

Device = Literal["cuda", "cpu"]

_ray: Any = _raylet  # its stub leaves out what concerns authentication

_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 20.0
_UNREACHABLE_SECONDS = 30.0
"""Seconds for which the head of a cluster may be silent, as while it restarts. Ray ends this process after 60."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # the placement assigns the GPUs
    # Ray would end this process and its actors a minute after the head's death, whatever they do; `loss_reason` sees it
    "RAY_gcs_rpc_server_reconnect_timeout_s": "100000",
}

_WITHOUT_REPORTS = {
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",  # never
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",
}
"""Settings that turn off the measurements that Ray's processes send to a dashboard: a private cluster has none."""


class Cluster:
    """A connection to a cluster. `folder` is the private folder of a cluster that ends with this object, and `lock` the
    open descriptor that keeps other processes from sweeping it.
    """

    def __init__(
        self, folder: Path | None = None, reaper: subprocess.Popen[bytes] | None = None, lock: int | None = None
    ) -> None:
        self.folder, self._reaper, self._lock = folder, reaper, lock
        self._unreachable_since: float | None = None

    @property
    def host(self) -> str:
        """Address at which the machines of the cluster reach this one."""
        return _LOOPBACK if self.folder is not None else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray

    def loss_reason(self) -> str | None:
        """Reason why Ray itself is gone, as the end of a sentence; None if it is not."""
        if self.folder is not None:
            return next(_ended_services(), None)
        address: str = ray.get_runtime_context().gcs_address
        host, _, port = address.rpartition(":")
        reason, now = why_unreachable(host.strip("[]"), int(port)), time.monotonic()
        self._unreachable_since = None if reason is None else self._unreachable_since or now
        if self._unreachable_since is None or now - self._unreachable_since < _UNREACHABLE_SECONDS:
            return None
        return f"the head of the Ray cluster at {address} cannot be reached for {_UNREACHABLE_SECONDS:g} s: {reason}"

    def close(self, *, lost: bool = False) -> None:
        """Disconnect, and end a private cluster with every process that it or its actors started. `lost`: Ray is gone;
        disconnecting would wait for it, and so would Ray's own handler at the end of this process.
        """
        try:
            if lost:
                atexit.unregister(ray_worker.shutdown)
            else:
                with contextlib.suppress(OSError, ConnectionError, RuntimeError):
                    ray.shutdown()
        finally:
            if self.folder is not None:
                kill_tagged(RUN, self.folder.name, self.folder)
                shutil.rmtree(self.folder, ignore_errors=True)
                _read_token_again()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            if self._reaper is not None:
                self._reaper.kill()
                self._reaper.wait()
                self._reaper = None


def _ended_services() -> Iterator[str]:
    """A sentence on each of Ray's own processes that this process started and that has ended."""
    node: Any = ray_worker._global_node
    for name in (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET):
        for info in node.all_processes.get(name, ()) if node is not None else ():
            code = info.process.poll()
            if code is not None:
                ending = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
                yield f"Ray's own process {name} (process {info.process.pid}) {ending}"


def start(slots: int, device: Device, object_store_bytes: int) -> Cluster:
    """Start a cluster on this machine with its GPUs, or with `slots` places for processes if `device` is "cpu".

    Call it from a thread that lasts as long as the cluster: the kernel ends Ray's processes with that thread. Raises
    `ProcessError`.
    """
    _refuse_a_second()
    root = private_root(tempfile.gettempdir())
    sweep(root)
    folder, lock = make_private_folder(root)
    cluster = Cluster(folder, start_reaper(RUN, folder.name, folder), lock)
    try:
        _init_private(
            folder, {"resources": {"slot": slots}, "num_gpus": 0} if device == "cpu" else {}, object_store_bytes
        )
    except BaseException as error:
        cluster.close()
        if isinstance(error, Exception):
            raise ProcessError(f"Ray did not start on this machine: {_error_line(error)}") from None
        raise
    return cluster


def attach(address: str, seconds: float, field: str = "trainer.placement.ray_address") -> Cluster:
    """Connect to the running cluster at `address` (host:port of its head, or `auto`), which the field `field` gives.

    Raises `ProcessError`.
    """
    host, _, port = address.rpartition(":")
    names_a_port = "/" not in address and host and port.isdecimal()  # `auto` and the like are looked up by Ray itself
    # Asked first, since Ray would try for minutes.
    reason = why_unreachable(host.strip("[]"), int(port), _CONNECT_SECONDS) if names_a_port else None
    if reason is not None:
        raise ProcessError(
            f"No connection to the Ray cluster at {address}: {reason}. Start the head first, or correct {field}"
        )
    _refuse_a_second()
    outcome: list[BaseException | None] = []
    thread = threading.Thread(target=_attach, args=(address, outcome), name="skyrl-attach", daemon=True)
    thread.start()
    thread.join(timeout=seconds)
    if not outcome or outcome[0] is not None:
        reason = _error_line(outcome[0]) if outcome and outcome[0] else f"no answer within {seconds:g} s"
        raise ProcessError(
            f"No connection to the Ray cluster at {address}: {reason}. The address must be host:port of a "
            f"running head ({field}). A cluster with token authentication accepts only clients that have its token: "
            "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        )
    if _ray.get_authentication_mode() != _ray.AuthenticationMode.TOKEN:
        print(
            f"warning: the Ray cluster at {address} requires no token: anyone who can reach it can run code on "
            "it and read its data (start it with RAY_AUTH_MODE=token)",
            file=sys.stderr,
        )
    return Cluster()


def _refuse_a_second() -> None:
    if ray.is_initialized():
        raise ProcessError(
            "This process is connected to a Ray cluster already: close that connection first (ray.shutdown())"
        )


def _init_private(folder: Path, resources: Mapping[str, Any], object_store_bytes: int) -> None:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    variables = {
        **_QUIET,
        **_WITHOUT_REPORTS,
        **{name: os.environ.get(name, bound) for name, bound in BOUNDS_OF_RAY.items()},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's own switch for a cluster of one machine, on loopback
        RUN: folder.name,
    }
    with (
        _environment(variables, without=("RAY_AUTH_TOKEN", "RAY_ADDRESS")),
        _signals(),
        # On loopback: Ray read the environment variable for it when it was imported.
        _replaced(ray_constants, ENABLE_RAY_CLUSTER=False),
        # No dashboard, autoscaler and log monitor, for which `ray.init` has no arguments: a private cluster has no
        # viewers and does not grow, and every rank has its own log.
        _replaced(Node, start_api_server=_drop, start_monitor=_drop, start_log_monitor=_drop),
    ):
        _read_token_again()
        _connect(
            address="local",
            num_cpus=0,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            _node_ip_address=_LOOPBACK,
            _temp_dir=str(folder / "ray"),  # Ray's default is open to every user
            **resources,
        )


def _attach(address: str, outcome: list[BaseException | None]) -> None:
    try:
        _read_token_again()
        _connect(address=address)
    except Exception as error:  # noqa: BLE001 - Ray raises a dozen kinds here; each is shown to the user
        outcome.append(error)
    else:
        outcome.append(None)


def _connect(**arguments: Any) -> None:
    # skyrl reports an actor's death, once and with its cause; Ray would print a page about it on this terminal.
    ray_worker.print_to_stdstream = _drop
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(log_to_driver=False, configure_logging=False, **arguments)


def _drop(*_: object, **__: object) -> None:
    """Replaces a function of Ray and does nothing."""


@contextlib.contextmanager
def _environment(variables: Mapping[str, str], without: tuple[str, ...]) -> Iterator[None]:
    """A block whose processes inherit these variables, and not those of `without`."""
    before = {name: os.environ.get(name) for name in (*variables, *without)}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _replaced(owner: object, **attributes: object) -> Iterator[None]:
    """A block in which a class or a module of Ray has other attributes."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which `ray.init` replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_token_again() -> None:
    """Make Ray read the authentication mode and token again. It reads them once per process, which may have been
    connected to another cluster before.
    """
    _ray.Config.initialize("")
    _ray.AuthenticationTokenLoader.instance().reset_cache()


def clock_difference(read_clock: Callable[[], ObjectRef[float]], tries: int) -> float:
    """Seconds that the clock which `read_clock` reads in another process is ahead of this one's, from the fastest of
    several requests; 0 if within the measurement error.
    """
    best = (float("inf"), 0.0)
    for _ in range(tries):
        before = time.time()
        remote_time = ray.get(read_clock(), timeout=60)
        after = time.time()
        best = min(best, (after - before, remote_time - (before + after) / 2))
    trip, ahead = best
    return ahead if abs(ahead) > trip / 2 else 0.0


def _error_line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__

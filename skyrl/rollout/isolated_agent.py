"""Runs the command of an untrusted agent in a sandbox whose only network is the policy's endpoint.

Each trajectory gets a new process tree and a new empty folder, which end with it. It can read the files that its
command and `readable` name.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from attrs import evolve

from skyrl.config.settings.environment import AgentConfig
from skyrl.errors import RewardError, TaskError, WorkerEnded
from skyrl.rollout.agent_calls import LONGEST_OUTPUT, AgentCall, Returned, environment_of, returned_by
from skyrl.sandbox.commands import located_command
from skyrl.sandbox.fork_client import Command
from skyrl.sandbox.fork_server import SERVICE_PORT
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from skyrl.sandbox.tiers import Tier, has_namespaces

_FOREVER = 10.0**6
_INSIDE = f"http://127.0.0.1:{SERVICE_PORT}"
_KEPT_VARIABLES = ("PATH", "LANG", "VIRTUAL_ENV", "PYTHONPATH")


class IsolatedAgent:
    """Runs one command, each time in a new sandbox and an empty folder. Its words that name existing files become
    absolute paths.
    """

    def __init__(self, config: AgentConfig, tier: Tier | Literal["auto"]) -> None:
        """Raises `TaskError` for missing files, and `UserError` if the machine lacks the tier or programs in the
        sandbox could not read the files.
        """
        located = located_command(config.command, config.readable, "environment.agent")
        self._arguments = located.arguments
        self._sandbox = _sandbox(tier, located.files)
        if not has_namespaces(self._sandbox.tier):
            raise TaskError(
                "environment.agent.isolate needs the sandbox tier namespace or bwrap, which this machine lacks: the "
                f"tier {self._sandbox.tier!r} gives a program no network of its own"
            )
        seconds = _FOREVER if config.timeout_seconds is None else config.timeout_seconds
        self._limits = ResourceLimits(
            seconds=seconds,
            cpu_seconds=int(seconds) + 1,
            memory_bytes=int(config.memory_gb * 1e9),
            file_bytes=256 << 20,
            folder_bytes=512 << 20,
            open_files=512,
            output_bytes=LONGEST_OUTPUT,
        )

    def __call__(self, call: AgentCall) -> Returned:
        """Play one trajectory. Raises `RewardError` for a program that prints too much, and `WorkerEnded` for one that
        does not end in time.
        """
        service = urlsplit(call.url)
        assert service.hostname is not None and service.port is not None, "the endpoint's address has both"
        command = Command(
            arguments=self._arguments,
            environment=environment_of(evolve(call, url=_INSIDE), _KEPT_VARIABLES),
            service=(service.hostname, service.port),
        )
        ran = self._sandbox.run_command(command, json.dumps(call.task, default=str).encode(), self._limits)
        if ran.ended == "output":
            raise RewardError(f"printed more than {LONGEST_OUTPUT} bytes")
        if ran.ended == "timeout":
            raise WorkerEnded("timeout", f"gave no answer within {self._limits.seconds:g} s and was ended")
        return returned_by(ran.code, ran.stdout, ran.stderr)


@cache
def _sandbox(tier: Tier | Literal["auto"], readable: tuple[Path, ...]) -> Sandbox:
    return Sandbox(tier, readable=readable)

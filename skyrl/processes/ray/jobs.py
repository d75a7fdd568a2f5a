"""Jobs of a Ray cluster that runs already, through its dashboard. Needs `ray[default]`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ray.job_submission import JobSubmissionClient

from skyrl.errors import ProcessError


class RayJobs:
    """A connection to the dashboard at `address` (http://host:8265). Every method raises `ProcessError`."""

    def __init__(self, address: str) -> None:
        self._address = address
        with self._reported():
            self._client: Any = JobSubmissionClient(address)

    def submit(self, command: str, name: str, variables: Mapping[str, str]) -> str:
        """Start a command on the cluster's head; returns the id of the job."""
        with self._reported():
            return str(
                self._client.submit_job(
                    entrypoint=command, submission_id=name, runtime_env={"env_vars": dict(variables)}
                )
            )

    def state(self, job: str) -> str:
        """State of the job: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
        with self._reported():
            return str(self._client.get_job_status(job).value)

    def logs(self, job: str) -> str:
        """Everything that the job has printed."""
        with self._reported():
            return str(self._client.get_job_logs(job))

    def stop(self, job: str) -> None:
        """Send SIGTERM to the job, and SIGKILL if it does not end."""
        with self._reported():
            self._client.stop_job(job)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ConnectionError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ProcessError(
                f"Ray's dashboard at {self._address}: {reason}. The cluster needs ray[default] and a dashboard (ray "
                "start --head); ray.address of the cluster names it, and RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH brings its token"
            ) from None

"""Settings of the whole process that code of a user may change, and that the numbers or the life of a run depend on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from skyrl.errors import RunError, SkyRLError
from skyrl.runs.inputs import notice

_READ: Mapping[str, Callable[[], object]] = {
    "torch.set_default_dtype": torch.get_default_dtype,
    "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "sys.setrecursionlimit": sys.getrecursionlimit,
}
"""What sets a setting -> what reads it. Settings of a thread, such as grad mode, do no harm in threads of rewards."""


class ProcessSettings:
    """The settings at the start of training. As a tracker, it reports after a step what has changed since, once."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Take the current settings for those of the run: models and engines have been made."""
        self._before = self._told = _now()
        self._recursion = sys.getrecursionlimit()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if (now := _now()) != self._told:
            self._told = now
            if changed := self._changes():
                notice(f"warning: {changed}: the numbers of the run may depend on it")

    def close(self) -> None:
        """Does nothing: no resource is held."""

    @contextmanager
    def named_in_failures(self) -> Iterator[None]:
        """Raises `RunError` for a failure that no exception of skyrl explains, if a setting has changed."""
        try:
            yield
        except SkyRLError:
            raise
        except Exception as error:
            changed = self._changes()
            sys.setrecursionlimit(max(sys.getrecursionlimit(), self._recursion))  # the way to the message takes frames
            if changed:
                raise RunError(f"{changed}. The run then failed: {type(error).__name__}: {error}") from error
            raise

    def _changes(self) -> str:
        now = _now()
        changed = [f"{name}: {was} before, {now[name]} now" for name, was in self._before.items() if now[name] != was]
        if not changed:
            return ""
        return f"code of this run (a reward, an environment?) changed its whole process ({', '.join(changed)})"


def _now() -> dict[str, object]:
    return {name: read() for name, read in _READ.items()}

"""Runs in processes of their own, which begin with everything imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.experiments.phases import Fault, command
from tests.forkserver import CONTEXT
from tests.nano_run import as_words, overrides

TINY: dict[str, Any] = {
    "trainer__deterministic": True,
    "trainer__epochs": 2,
    "trainer__max_training_steps": 12,
    "trainer__ckpt_interval": 2,
    "trainer__eval_interval": 4,
    "trainer__eval_before_train": False,
    "trainer__policy_mini_batch_size": 2,
    "trainer__micro_train_batch_size_per_gpu": 3,
    "environment__env_class": "tests.experiments.phases:in_ascii",
}
"""12 steps of two optimizer steps each, two micro-batches in each of those."""


class RunSession:
    """One start of the command."""

    def __init__(
        self,
        values: Mapping[str, Any],
        out: Path,
        fault: Fault | None = None,
        environ: Mapping[str, str] = {},
        files: Sequence[str] = (),
    ) -> None:
        """`values` are dotted paths of any kind of run, and what stands there, on top of `files`; `environ` are further
        variables.
        """
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        words = [*files, *as_words(values)]
        environment = {**environ, **(fault.in_environment() if fault else {})}
        self.process: ForkServerProcess = CONTEXT.Process(target=command, args=(words, environment, out))
        self.process.start()

    def ends(self, within: float = 1800.0) -> int:
        """The exit status; negative is the signal that ended it."""
        self.process.join(within)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"the run did not end within {within:g} s: {self.said}")
        return self.process.exitcode

    @property
    def said(self) -> str:
        """Everything on its standard output and error."""
        return (self.out / "said").read_text(encoding="utf-8")


def tiny(nano: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Paths and values of a small run."""
    return overrides(nano, out, **{**TINY, **changes})


def run(nano: Path, out: Path, fault: Fault | None = None, **changes: Any) -> tuple[int, str]:
    """One session to its end: exit status and what it said."""
    return run_of(tiny(nano, out, **changes), out, fault)


def run_of(values: Mapping[str, Any], out: Path, fault: Fault | None = None) -> tuple[int, str]:
    """The same of any kind of run."""
    session = RunSession(values, out, fault)
    return session.ends(), session.said

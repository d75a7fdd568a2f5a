"""The folder of a run: everything that a person wants to find afterwards, and the rule that one folder holds one run.

config.json           the resolved configuration, and its fingerprint
metrics.jsonl         one line for each step
trajectories.jsonl    sampled answers with their rewards
reward_curve.png
model/                the trained model in Hugging Face format
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import cattrs
from filelock import FileLock, Timeout

from skyrl.config import SkyRLTrainConfig
from skyrl.errors import ResumeError, UserError
from skyrl.tracking.curve import draw_reward_curve
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tree import differences, fingerprint, required


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, run: SkyRLTrainConfig) -> None:
        self.path = Path(required(run.trainer.run_path, "trainer.run_path")).expanduser()
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.trajectories = JsonLines(self.path / "trajectories.jsonl")
        self.model = self.path / "model"
        self._run = run
        self._lock = FileLock(self.path / ".lock")

    def open(self) -> None:
        """Make the folder and take it. Raises `UserError` if another process has it, `ResumeError` if another run
        does.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            owner = _read_text(self.path / ".owner")
            raise UserError(
                f"{self.path} is in use by a run that is going on ({owner}): choose another trainer.run_path"
            ) from None
        except OSError as error:
            raise UserError(f"the run folder {self.path} cannot be made: {error.strerror}") from None
        (self.path / ".owner").write_text(f"process {os.getpid()}", encoding="utf-8")
        self._refuse_another_run()

    def record_config(self) -> None:
        """Write `config.json`."""
        data = {"fingerprint": fingerprint(self._run), "config": cattrs.unstructure(self._run)}
        scratch = self.path / "config.json.tmp"
        scratch.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        scratch.replace(self.path / "config.json")

    def forget_after(self, step: int) -> None:
        """Drop what was recorded of later steps, which will happen again."""
        self.metrics.forget_after(step)
        self.trajectories.forget_after(step)

    def draw_curve(self) -> None:
        """Draw `reward_curve.png` from the metrics."""
        title = f"{self._run.trainer.project_name} / {self._run.trainer.run_name}"
        draw_reward_curve(self.metrics.read(), self.path / "reward_curve.png", title)

    def close(self) -> None:
        """Let the next process have it."""
        self._lock.release()

    def _refuse_another_run(self) -> None:
        text = _read_text(self.path / "config.json")
        if not text:
            return
        try:
            stored = json.loads(text)["config"]
        except (ValueError, KeyError) as error:
            raise ResumeError(
                f"{self.path / 'config.json'} is damaged ({error}): choose another trainer.run_path"
            ) from error
        refuse_changed(stored, self._run, str(self.path), "trainer.run_path")


def refuse_changed(stored: Any, run: SkyRLTrainConfig, where: str, field: str) -> None:
    """Raises `ResumeError` with the differences if `stored` describes another run than `run` in what determines its
    numbers.
    """
    try:
        before = cattrs.structure(stored, type(run))
    except ValueError as error:
        raise ResumeError(
            f"{where} was written by a version whose configuration this one cannot read: {error}"
        ) from error
    changed = differences(before, run, roles=("identity", "numerics"))
    if not changed:
        return
    rows = "\n".join(f"  {path}: {_short(old)} there, {_short(new)} here" for path, (old, new) in changed.items())
    raise ResumeError(
        f"{where} belongs to a run with another configuration:\n{rows}\n"
        f"To continue that run, set these back. To start a new one beside it, choose another {field}, for example:\n"
        f"  {_folders_beside(run)}"
    )


def _folders_beside(run: SkyRLTrainConfig) -> str:
    """Arguments that move the run folder, and what is kept inside or outside of it, to names that are free."""
    own = required(run.trainer.run_path, "trainer.run_path").rstrip("/")
    number = next(count for count in itertools.count(2) if not Path(f"{own}-{count}").expanduser().exists())
    paths = {"run_path": own, "ckpt_path": run.trainer.ckpt_path, "export_path": run.trainer.export_path}
    moved = {
        name: f"{own}-{number}{path.removeprefix(own)}" if path.startswith(own) else f"{path.rstrip('/')}-{number}"
        for name, path in paths.items()
    }
    return " ".join(f"trainer.{name}={path}" for name, path in moved.items())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."

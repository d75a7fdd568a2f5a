"""Rehearses the configuration of a large run: every phase, on this machine, with a miniature of its model.

The configuration itself is checked unchanged: sizes, placement, memory, folders. Then a folded run (see
`skyrl.tools.scale_down`) trains in a separate process: data and templates, generation, environments and rewards,
scoring, update, weight transfer, evaluation, checkpoints; it is killed, resumed, and its model exported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from skyrl.config import SkyRLTrainConfig, compose
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.every_kind import evaluates
from skyrl.config.derive.rl_models import has_critic, has_reference, has_served_teacher, has_teacher
from skyrl.config.loading.standalone_file import kept_text
from skyrl.data.sources import BadRow, iterate_rows
from skyrl.errors import ConfigError, SkyRLError
from skyrl.experiments.folder_checks import folders_can_be_written
from skyrl.models.saving.shrinking import shrink
from skyrl.processes.logs import tail
from skyrl.tools.scale_down import folded, folded_lines
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tree.access import default_at

State = Literal["passed", "folded", "not tried", "failed"]

STEPS = 2
"""Training steps of the folded run before the part in which it is killed and resumed."""

EVALUATED = 8
"""Number of rows of each evaluation source that the folded run reads."""

KILLED_AT = 3
"""Step after whose checkpoint the folded run is killed."""

LAST_STEP = 4

TAIL = 12
"""Number of lines of a failed run's output that are shown."""


@frozen
class Finding:
    """One line of a rehearsal's table."""

    phase: str
    state: State
    text: str


@frozen(kw_only=True)
class Rehearsal:
    """A rehearsal of one configuration, given both as words of a command line and as the resulting run."""

    files: Sequence[str]
    words: Sequence[str]
    run: SkyRLTrainConfig
    folder: Path
    timeout: float = 900.0
    """Largest duration of one folded run, in seconds."""

    def findings(self) -> Iterator[Finding]:
        """Yield each finding as soon as it is known. If a phase fails, phases that depend on it are skipped."""
        yield from self._folder_findings()
        yield from self._service_findings()
        try:
            changes, findings = self._small()
            yield from findings
            file, findings = self._folded_file(changes)
            yield from findings
        except SkyRLError as error:
            yield Finding("folding", "failed", str(error))
            return
        yield from self._run_findings(file)

    def _folder_findings(self) -> Iterator[Finding]:
        """Findings on the run's configured folders; a folder on a disk that this machine lacks cannot be tried."""
        trainer = self.run.trainer
        named = (trainer.run_path, trainer.ckpt_path, trainer.export_path, trainer.log_path)
        paths = sorted({str(Path(path).expanduser().absolute()) for path in named if path and "://" not in path})
        elsewhere = [path for path in paths if not Path(*Path(path).parts[:2]).is_dir()]
        for path in elsewhere:
            yield Finding("folders", "not tried", f"{path}: this machine has no {Path(*Path(path).parts[:2])}")
        if elsewhere:
            return
        problems = list(folders_can_be_written(self.run))
        for problem in problems:
            yield Finding("folders", "failed", f"{problem.path}: {problem.message}")
        if not problems:
            yield Finding("folders", "passed", "the run's folders are writable")

    def _service_findings(self) -> Iterator[Finding]:
        """Findings on parts of the run that only the cluster has, which are not tried."""
        run = self.run
        trackers = run.trainer.logger
        for tracker in (trackers,) if isinstance(trackers, str) else trackers:
            if tracker != "console":
                yield Finding("trackers", "not tried", tracker)
        if run.trainer.device == "cuda":
            yield Finding("GPUs", "not tried", f"CUDA kernels, memory and {run.trainer.strategy} on several ranks")
        engine = run.generator.inference_engine
        if not backend_of(engine).is_embedded:
            text = f"{engine.backend}, and weight transfer by {engine.weight_sync_backend}"
            yield Finding("engines", "not tried", text)

    def _small(self) -> tuple[dict[str, Any], list[Finding]]:
        """Changes that fold the run, with miniature models and few evaluation rows, and findings that describe them."""
        run, changes = self.run, dict(folded(self.run))
        path = run.trainer.policy.model.path or ""
        findings = [Finding("model", "folded", f"{path}: {shrink(path, self.folder / 'model')}")]
        changes["trainer.policy.model.path"] = str(self.folder / "model")
        if has_critic(run):
            shrink(run.trainer.critic.model.path or path, self.folder / "critic", seed=1)
            changes["trainer.critic.model.path"] = str(self.folder / "critic")
        if has_reference(run):
            changes["trainer.ref.model.path"] = str(self.folder / "model")
        if has_teacher(run):
            changes |= self._small_teachers(path)
        if has_served_teacher(run):
            changes |= {"trainer.teacher.endpoint.url": None, "trainer.teacher.endpoint.sources": {}}
            findings.append(Finding("served teachers", "not tried", "a small one in the run takes their place"))
        if evaluates(run.trainer):
            files = [self.folder / f"evaluation-{number}.jsonl" for number in range(len(run.data.val_data))]
            for file, source in zip(files, run.data.val_data, strict=True):
                rows = islice((row for row in iterate_rows(source) if not isinstance(row, BadRow)), EVALUATED)
                file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
            changes["data.val_data"] = tuple(map(str, files))
            findings.append(Finding("data", "folded", f"{EVALUATED} rows of each evaluation source"))
        findings += [Finding("layout", "folded", line) for line in folded_lines(run, changes)]
        return changes | self._places(), findings

    def _small_teachers(self, policy: str) -> dict[str, object]:
        """Changes that put miniatures in place of the teachers; one of the policy's in place of served ones."""
        teacher, small = self.run.trainer.teacher, dict[str, str]()
        for number, path in enumerate(teacher.local_paths or (policy,)):
            small[path] = str(self.folder / f"teacher-{number}")
            shrink(path, Path(small[path]), seed=2 + number)
        served = teacher.endpoint.url or teacher.endpoint.sources
        default = small.get(teacher.model.path or "") or (next(iter(small.values())) if served else None)
        sources = {source: small[path] for source, path in teacher.sources.items()}
        return {"trainer.teacher.model.path": default, "trainer.teacher.sources": sources}

    def _places(self) -> dict[str, Any]:
        """Folders of the folded run, and a short schedule with a checkpoint and an evaluation after each step."""
        run = self.folder / "run"
        places = {
            "trainer.run_path": str(run),
            "trainer.ckpt_path": str(run / "checkpoints"),
            "trainer.export_path": str(run / "exports"),
            "trainer.log_path": str(run / "logs"),
            "trainer.ckpt_interval": "1",
            "trainer.epochs": LAST_STEP,
            "trainer.resume_mode": "latest",
            "trainer.resume_path": None,
            "trainer.recover_mode": default_at(SkyRLTrainConfig, "trainer.recover_mode"),  # resume_mode decides
        }
        return places | ({"trainer.eval_interval": "1"} if evaluates(self.run.trainer) else {})

    def _folded_file(self, changes: dict[str, Any]) -> tuple[Path, list[Finding]]:
        """Write the folded run to a file. A setting that is invalid for one process on a CPU is reset to its default
        and reported. Raises `ConfigError` if resetting is not possible.
        """
        findings: list[Finding] = []
        while True:
            try:
                settings = (
                    f"{path}={value if isinstance(value, str) else json.dumps(value)}"
                    for path, value in changes.items()
                )
                composed = compose(self.files, [*self.words, *settings], environ=os.environ)
            except ConfigError as error:
                path, message = error.problems[0].path, error.problems[0].message
                if path in changes:
                    raise
                try:
                    changes[path] = default_at(SkyRLTrainConfig, path)
                except (AttributeError, KeyError, ValueError):  # it is no field
                    raise error from None
                findings.append(Finding("folding", "not tried", f"{path}: {message}"))
            else:
                file = self.folder / "folded.toml"
                file.write_text(kept_text(composed.written, composed.origins), encoding="utf-8")
                return file, findings

    def _run_findings(self, file: Path) -> Iterator[Finding]:
        """Train, kill, resume and export the folded run."""
        failure = self._run(file, STEPS)
        if failure is not None:
            yield Finding("training", "failed", failure)
            return
        yield from _metric_findings(self.folder / "run" / "metrics.jsonl")
        failure = self._killed(file) or self._run(file, LAST_STEP)
        if failure is None:
            steps = [step for step, _ in _records(self.folder / "run" / "metrics.jsonl")]
            expected = list(range(1, LAST_STEP + 1))
            failure = None if steps == expected else f"the metrics have steps {steps}, expected {expected}"
        text = f"killed after step {KILLED_AT}, resumed to step {LAST_STEP}"
        yield Finding("resume", "failed" if failure else "passed", failure or text)
        if failure is None:
            process = self._start("export", str(self.folder / "run"), "--to", str(self.folder / "exported"))
            failure = self._wait_for_exit(process)
            text = failure or "a model folder in Hugging Face format"
            yield Finding("export", "failed" if failure else "passed", text)

    def _run(self, file: Path, steps: int) -> str | None:
        """Train the folded run up to step `steps`. Returns the reason of a failure, or None."""
        return self._wait_for_exit(self._start("run", str(file), f"trainer.max_training_steps={steps}"))

    def _start(self, *words: str) -> subprocess.Popen[str]:
        with (self.folder / "output.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "skyrl.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )

    def _wait_for_exit(self, process: subprocess.Popen[str]) -> str | None:
        try:
            code = process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"still running after {self.timeout:.0f} s; its last output:\n{self._output_tail()}"
        except BaseException:
            _kill(process)
            raise
        return None if code == 0 else self._output_tail()

    def _output_tail(self) -> str:
        return "\n".join([line for line in tail(self.folder / "output.log") if line.strip()][-TAIL:])

    def _killed(self, file: Path) -> str | None:
        """Kill the run once the checkpoint of step `KILLED_AT` exists. Returns the reason of a failure, or None."""
        process = self._start("run", str(file), f"trainer.max_training_steps={LAST_STEP + 2}")
        saved = self.folder / "run" / "checkpoints" / f"global_step_{KILLED_AT}"
        until = time.monotonic() + self.timeout
        while not saved.is_dir() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        ended = process.poll()
        _kill(process)
        if saved.is_dir() and ended in (None, 0):
            return None
        return f"there is no checkpoint of step {KILLED_AT}; the run's last output:\n{self._output_tail()}"


def _metric_findings(metrics: Path) -> Iterator[Finding]:
    """Findings of a successful run, from its metrics."""
    records = _records(metrics)
    phases = "generation, environment, scoring, update, weight transfer"
    yield Finding("training", "passed", f"{len(dict(records))} steps: {phases}")
    failures = sum(int(record.get("rollout/failures", 0)) for _, record in records)
    if failures:
        yield Finding("environment", "failed", f"{failures} trajectory attempts failed in the environment")
    else:
        yield Finding("environment", "passed", "every trajectory got a reward")
    if any(name.startswith("eval/") for _, record in records for name in record):
        yield Finding("evaluation", "passed", "its prompts were answered and scored")
    yield Finding("checkpoints", "passed", "one after each step")


def _records(metrics: Path) -> list[tuple[int, dict[str, Any]]]:
    """Training step and metrics of each record that belongs to a step."""
    records = [record for record in JsonLines(metrics).read() if record.get("step")]
    return [(int(record["step"]), dict(record)) for record in records]


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

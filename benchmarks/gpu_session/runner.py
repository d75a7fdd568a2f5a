"""Runs stages, each in a process of its own with a limit, and keeps what they measured in one file each.

A stage's file is written when it starts and after each of its measurements, so that nothing is lost with a connection
or at a limit. States: `running` until its process ends; then `done`, `failed` (a measurement or the process failed) or
`limit`; `left_out` if it did not start.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from benchmarks.gpu_session.device import name_and_driver
from benchmarks.gpu_session.stages import GpuStage, Job, parts_of
from skyrl.processes.orphans import kill_tagged

ROOT = Path(__file__).parents[2]
MARK = "SKYRL_GPU_STAGE"
"""Variable that all processes of a stage carry, so that those of Ray end with it."""

PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "ray",
    "trl",
    "deepspeed",
    "megatron-core",
    "flash-attn",
    "liger-kernel",
    "triton",
)
"""Packages whose versions are kept."""

LOG_LINES = 30
PATIENCE_ON_CPU = 3
"""Factor of the limits in a rehearsal, whose cores may be shared."""

Record = dict[str, Any]


@frozen(kw_only=True)
class GpuSession:
    """Where and how the stages of one command run."""

    out: Path
    work: Path
    device: str
    seconds: float
    """Time for everything."""

    commit: str
    language_model: Path | None = None
    changes: tuple[str, ...] = ()
    """Fields of skyrl's configuration for all stages, as `path=value`."""

    wait: Callable[[subprocess.Popen[bytes], float], int] = subprocess.Popen[bytes].wait
    """Waits for a stage's process so many seconds. Returns its exit code, or raises `subprocess.TimeoutExpired`."""

    def run(self, stages: Sequence[tuple[GpuStage, str]]) -> list[Record]:
        """Runs what is not yet done, in order; returns all records."""
        start = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        records = []
        for stage, shape in stages:
            record = self._run(stage, shape, self.seconds - (time.monotonic() - start))
            records.append(record)
            print(line_of(record), flush=True)
        return records

    def _run(self, stage: GpuStage, shape: str, left: float) -> Record:
        file = self.out / f"{title(stage.name, shape, self.changes)}.json"
        record = self._known(file)
        if record.get("state") == "done":
            return record
        if not record:
            file.unlink(missing_ok=True)
        reason = stage.why_not(self.device, self.language_model) or (None if left >= 10 else "no time was left")
        if reason is not None:
            if not record.get("parts"):
                record = {"stage": stage.name, "shape": shape, "changes": list(self.changes), "parts": {}}
                record |= {"state": "left_out", "error": reason}
                write(file, record)
            return record
        limit = min(stage.limit if self.device == "cuda" else stage.limit * PATIENCE_ON_CPU, left)
        print(f"{file.stem}: at most {limit:.0f} s, {left:.0f} s are left", file=sys.stderr, flush=True)
        state, seconds = self._in_a_process(stage, shape, file, limit)
        record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"parts": {}, "failed": {}}
        record |= {"stage": stage.name, "shape": shape, "changes": list(self.changes), "state": state}
        record["seconds"] = round(seconds, 1)
        if state != "done":
            record["log"] = last_lines(file.with_suffix(".log"))
            complaint = next((text for text in reversed(record["log"]) if text.strip()), "the log is empty")
            record["error"] = f"took more than {limit:.0f} s" if state == "limit" else complaint[:300]
        write(file, record)
        return record

    def _known(self, file: Path) -> Record:
        """What an earlier run of the same commit has written; nothing if the code may have changed since."""
        if not file.exists() or self.commit.endswith("-dirty"):
            return {}
        record: Record = json.loads(file.read_text(encoding="utf-8"))
        return record if record.get("commit") == self.commit else {}

    def _in_a_process(self, stage: GpuStage, shape: str, file: Path, limit: float) -> tuple[str, float]:
        """State and seconds of the stage. At the end, no process of it is left."""
        command = [sys.executable, "-m", "benchmarks.gpu_session", "stage", stage.name]
        command += ["--function", f"{stage.package}.{stage.function}", "--shape", shape]
        command += ["--device", self.device, "--file", str(file), "--work", str(self.work), "--commit", self.commit]
        command += ["--limit", f"{limit:.1f}"]
        command += ["--language-model", str(self.language_model)] if self.language_model else []
        command += ["--set", *self.changes] if self.changes else []
        mark = f"{os.getpid()}-{file.stem}"
        start = time.monotonic()
        with file.with_suffix(".log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {MARK: mark},
            )
            try:
                state = "done" if self.wait(process, limit) == 0 else "failed"
            except subprocess.TimeoutExpired:
                state = "limit"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kill_tagged(MARK, mark)
        return state, time.monotonic() - start


def title(stage: str, shape: str, changes: Sequence[str] = ()) -> str:
    """Name of a stage's files, of letters, digits and `._-`: `learner-0.5b.use_torch_compile-true`."""
    pairs = (change.partition("=") for change in changes)
    changed = (f"{path.rpartition('.')[2]}-{value}" for path, _, value in pairs)
    return re.sub(r"[^A-Za-z0-9._-]", "_", ".".join([f"{stage}-{shape}" if shape else stage, *changed]))


def line_of(record: Record) -> str:
    """One line about a record: what it measured, or why it did not."""
    parts = ", ".join(f"{name} {brief(part)}" for name, part in record.get("parts", {}).items())
    failed = "; ".join(f"{name}: {reason}" for name, reason in record.get("failed", {}).items())
    words = [record["state"], f"{record['seconds']:.0f} s" if "seconds" in record else "", parts]
    words += [f"FAILED {failed}"] if failed else [record["error"]] if record.get("error") else []
    return f"{title(record['stage'], record['shape'], record.get('changes', ()))}: " + " | ".join(filter(None, words))


def brief(part: Record) -> str:
    """The first numbers of a measurement."""
    rate = [f"{part['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in part else []
    return " ".join([f"{part['seconds']:.3f} s" if "seconds" in part else part.get("summary", ""), *rate]).strip()


def last_lines(log: Path) -> list[str]:
    """The end of a log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line[:500] for line in text.splitlines()[-LOG_LINES:]]


def write(file: Path, record: Record) -> None:
    """Replaces the file in one step."""
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    scratch.replace(file)


def commit_of(root: Path) -> str:
    """Commit that is checked out, or `unknown` outside of a repository."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_stage(name: str, function: str, job: Job, file: Path, commit: str, limit: float) -> int:
    """Measures the parts of a stage that the file does not have yet, in this process; 1 if one failed.

    Two seconds before the limit, the stacks of all threads go to the log.
    """
    faulthandler.dump_traceback_later(max(limit - 2, 1))
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if "device" not in record:
        record = {"stage": name, "commit": commit, "parts": {}, **circumstances(job.device)}
    record |= {"shape": job.shape_name, "state": "running", "failed": {}}
    for key in ("error", "log"):
        record.pop(key, None)
    write(file, record)
    job.work.mkdir(parents=True, exist_ok=True)
    for part, measure in parts_of(function, job):
        if part in record["parts"]:
            continue
        start = time.monotonic()
        print(f"-- {part}", flush=True)
        with fresh_memory():
            try:
                record["parts"][part] = measure() | {"measured_in": round(time.monotonic() - start, 1)}
            except Exception as error:  # noqa: BLE001 - a measurement that fails is a result, and the others go on
                traceback.print_exc()
                record["failed"][part] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        write(file, record)
    return 1 if record["failed"] else 0


def circumstances(device: str) -> Record:
    """Date, device and versions."""
    name, driver = name_and_driver(device)
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    return {"date": now, "device": name, "driver": driver, "versions": dict(versions())}


def versions() -> Iterator[tuple[str, str]]:
    """Packages that are installed and their versions."""
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)


@contextlib.contextmanager
def fresh_memory() -> Iterator[None]:
    """Releases what a measurement held on the GPU, before the next one."""
    try:
        yield
    finally:
        gc.collect()
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            sys.modules["torch"].cuda.empty_cache()
            sys.modules["torch"].cuda.reset_peak_memory_stats()

"""The folder of a run, with everything that the run leaves for its users.

    config.json           the resolved configuration, and its fingerprint
    metrics.jsonl         one line for each step
    progress.json         what the run is doing; replaced every second
    timeline.jsonl        phases and calls of the steps of trainer.profile_steps: `skyrl.tracking.timeline`
    profile/              traces of the updates of these steps, by torch.profiler
    engines/              engines as `skyrl engines` lists them, and requests to add and drain some
    alarms.jsonl          alarms that were raised, one line for each
    sessions.jsonl        starts of the run, one line for each: the step, how the session before ended, changed settings
    trajectories.jsonl    sampled answers with their rewards, for people
    tokens/               log-probabilities, advantages and more for each of their tokens: `skyrl.tracking.token_file`
    recording/            every step exactly, if trainer.recording is on: `skyrl.tracking.recording`
    reward_curve.png
    trackers/             state of the run at tracking services: ids, last steps (docs/tracking.md)
    sandbox.json          the sandbox tier in force, if something ran in sandboxes
    model/                the trained model in Hugging Face format
    adapter/              with LoRA: the adapter alone, as PEFT stores it; model/ has it merged
    logs/                 one file for each process other than the command's own

A record of a step is written before the step's checkpoint, so that a run that resumes can cut both files back to it.
"""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from skyrl.storage.atomic import write_file
from skyrl.storage.disk import flush
from skyrl.tracking.curve import draw_reward_curve
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.recording import FOLDER, Recording
from skyrl.tracking.run_progress import GONE, SESSIONS, now_in
from skyrl.tracking.sample_files import SampleFiles
from skyrl.tracking.timeline import FILE as TIMELINE
from skyrl.tracking.token_file import FOLDER as TOKENS
from skyrl.tracking.token_file import TokenFiles
from skyrl.tree.dump import short_json

_WRITTEN = (TOKENS, FOLDER, "trackers")
"""Folders whose files are made durable with each checkpoint, beside the files of the run's folder itself."""


class RunFolder:
    """Paths of the files in a run's folder, and the operations on all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.timeline = JsonLines(path / TIMELINE)
        self.alarms = JsonLines(path / "alarms.jsonl")
        self.sessions = JsonLines(path / SESSIONS)
        self.samples = SampleFiles(JsonLines(path / "trajectories.jsonl"), TokenFiles(path / TOKENS))
        self.profile = path / "profile"
        self.curve = path / "reward_curve.png"
        self.model = path / "model"
        self.adapter = path / "adapter"
        self._flushed: dict[Path, tuple[int, int]] = {}

    def recording(self, *, compress: bool = False) -> Recording:
        """The recording, which may not exist; `compress` applies to what is written."""
        return Recording(self.path / FOLDER, compress=compress)

    def forget_after(self, step: int, *, recorded: bool = True) -> list[int]:
        """Delete the records of later steps, which will be taken again, and with `recorded` false also the record of
        `step`. Returns the steps that have lost samples, as after a power failure, or have damaged ones.
        """
        for lines in (self.metrics, self.alarms, self.timeline):
            lines.forget_after(step if recorded else step - 1)
        self.recording().forget_after(step)
        return self.samples.forget_after(step)

    def record_start(self, step: int, changes: Mapping[str, tuple[object, object]]) -> None:
        """Write into `sessions.jsonl` that a session starts from `step`, with the values of settings that `changes` has
        changed. Called before the session writes anything else, by the process that holds the run's lock.
        """
        before = now_in(self.path)
        record: dict[str, object] = {"step": step, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        if before is not None:
            reached = max((line["step"] for line in self.metrics.read()), default=0)
            record["before"] = {"state": GONE if before.state == "running" else before.state, "step": reached}
        record["changes"] = {path: [short_json(was), short_json(now)] for path, (was, now) in changes.items()}
        self.sessions.append(record)

    def lacking_steps(self, step: int) -> list[int]:
        """Steps up to `step` whose metrics were lost, as after a power failure, or damaged.

        The metrics of a run begin with the step after the checkpoint that it started from.
        """
        if not (self.path / "metrics.jsonl").exists():
            return []
        result = {record["step"] for record in self.metrics.read()}
        return [item for item in range(max(min(result, default=1), 1), step + 1) if item not in result]

    def flush(self) -> None:
        """Make durable what was written since the last call. Raises `OSError`."""
        folders = [folder for folder in (self.path, *map(self.path.joinpath, _WRITTEN)) if folder.is_dir()]
        for folder in folders:
            for file in folder.iterdir():
                with suppress(FileNotFoundError):  # a scratch file that has got its final name meanwhile
                    status = file.stat()
                    state = status.st_mtime_ns, status.st_size
                    if stat.S_ISREG(status.st_mode) and self._flushed.get(file) != state:
                        flush(file)
                        self._flushed[file] = state
            flush(folder)

    def record_sandbox(self, in_force: Mapping[str, object]) -> None:
        """Write `sandbox.json`, the sandbox that isolated the policy's programs."""
        write_file(self.path / "sandbox.json", json.dumps(in_force, indent=2) + "\n", durable=False)

    def draw_curve(self, title: str) -> None:
        """Draw `reward_curve.png` from the metrics."""
        draw_reward_curve(self.metrics.read(), self.curve, title)

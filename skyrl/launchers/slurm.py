"""Slurm jobs, controlled with Slurm's commands: sbatch, squeue, scontrol, scancel; and the script of a job.

Every value of the configuration is quoted in the script as one bash word, or is in a line that Slurm reads and bash
does not. The only text that bash runs unquoted is `prologue`, which is meant for that.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import evolve

from skyrl.config.cluster import ClusterConfig, SlurmConfig
from skyrl.errors import ProcessError, UserError
from skyrl.launchers.job import LOGS, RECORD, STOP, TASKS, Job, Launch, forget_report
from skyrl.launchers.node import make_token
from skyrl.planning.layout import ranges
from skyrl.storage.atomic import write_file

Command = Callable[[Sequence[str]], str]
"""Runs a command of Slurm and returns its output. Raises `ProcessError`."""

_SECONDS = 60.0
_WORDS = {
    "PENDING": "waiting",
    "CONFIGURING": "starting",
    "RUNNING": "running",
    "COMPLETING": "ending",
    "COMPLETED": "finished",
    "CANCELLED": "stopped",
    "REQUEUED": "waiting",
    "TIMEOUT": "failed (time limit)",
    "OUT_OF_MEMORY": "failed (out of memory)",
    "NODE_FAIL": "failed (a node was lost)",
}


def slurm_command(words: Sequence[str]) -> str:
    """Output of a command of Slurm. Raises `UserError` if Slurm is missing, `ProcessError` if it refuses."""
    try:
        result = subprocess.run(list(words), capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        raise UserError(f"{words[0]} is not installed here: run this on a login node of the Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise ProcessError(f"{words[0]} gave no answer within {_SECONDS:g} s: is slurmctld running?") from None
    if result.returncode:
        text = result.stderr.strip() or result.stdout.strip()
        lines = (line.strip().removeprefix(f"{words[0]}: ").removeprefix("error: ") for line in text.splitlines())
        message = "; ".join(line for line in lines if line)
        raise ProcessError(f"{words[0]}: {message or f'exit code {result.returncode}'}")
    return result.stdout


class SlurmLauncher:
    """Starts runs as jobs of the Slurm cluster that this machine belongs to."""

    def __init__(self, cluster: ClusterConfig, python: str, command: Command = slurm_command) -> None:
        self._cluster, self._python, self._command = cluster, python, command

    def start(self, job: Job) -> Launch:
        """Write the script into the launch's folder and submit it. Raises `UserError` and `ProcessError`."""
        job = evolve(job, after=tuple(map(self._number, job.after)))
        script = job.folder / SCRIPT
        write_file(script, script_of(job, self._cluster, self._python))
        if job.machines.on_ray:
            make_token(job.folder)
        (job.folder / STOP).unlink(missing_ok=True)
        tasks = job.array.tasks if job.array else ()
        for folder in (job.folder, *(job.folder / TASKS / str(task) for task in tasks)):
            forget_report(folder)
        number = self._command(["sbatch", "--parsable", str(script)]).strip().partition(";")[0]
        return job.started("slurm", number, tasks=tasks)

    def state(self, launch: Launch) -> str:
        """The state according to Slurm; for a job that Slurm has forgotten, the last report of the run."""
        try:
            rows = self._command(["squeue", "-h", "-o", "%T|%r", "-j", launch.id]).split("\n")
        except ProcessError as error:
            if "Invalid job id" not in str(error):
                raise
            rows = []
        queued = [row.partition("|") for row in rows if "|" in row]
        if queued:
            return ", ".join(sorted({_word(state, reason) for state, _, reason in queued}))
        try:
            states = re.findall(r"\bJobState=(\w+)", self._command(["scontrol", "show", "job", "-o", launch.id]))
        except ProcessError:
            states = []
        words = {_WORDS.get(state, f"failed ({state.lower()})") for state in states}
        words = words or {launch.state(task).get("state", "") for task in launch.tasks or (None,)} - {""}
        return ", ".join(sorted(words)) or "unknown: Slurm has forgotten this job, and it reported nothing"

    def stop(self, launch: Launch, *, now: bool) -> str:
        """Ask the run to save and end. A waiting job, or any job if `now`, is cancelled."""
        state = self.state(launch)
        launch.ask_to_stop()
        if now or not state.startswith(("running", "starting", "ending")) or launch.tasks:
            self._command(["scancel", launch.id])
            return f"{launch.name} (job {launch.id}) was cancelled."
        self._command(["scancel", "--batch", "--signal=USR1", launch.id])
        return f"{launch.name} (job {launch.id}) is saving a checkpoint and will then end."

    def _number(self, after: str) -> str:
        """Number of the Slurm job that `after` names: itself, or the folder of a launch. Raises `UserError`."""
        if re.fullmatch(r"[0-9]+", after):
            return after
        folder = Path(after)
        if not (folder / RECORD).exists():
            raise UserError(f"--after {after}: neither the number of a Slurm job nor the folder of a launch")
        launch = Launch.read(folder)
        if launch.target != "slurm":
            raise UserError(f"--after {after}: that launch is not a Slurm job (its target is {launch.target})")
        return launch.id


def _word(state: str, reason: str) -> str:
    word = _WORDS.get(state, state.lower())
    return f"{word} ({reason})" if word == "waiting" and reason not in ("", "None") else word


SCRIPT = "job.sbatch"

_BODY = """\
# SIGUSR1 comes before the time limit and from `skyrl launch stop`. A file tells the run, since a signal that goes
# through Slurm would reach Ray's processes, too.
on_signal() {
    echo "$(date -u +%FT%TZ) asked to save and stop"
    touch "$ask"
}
trap on_signal USR1
ended_by_slurm=no # which sends SIGTERM to the run itself, and decides whether the job starts again
trap 'ended_by_slurm=yes' TERM

# The exit code goes through a file: bash loses it where a signal interrupts `wait` just as the step ends.
(
    trap : TERM # a signal to the whole job ends srun first; unlike an ignored one, srun does not inherit it
    srun "${srun_options[@]}" "${container[@]}" "${python[@]}" -m skyrl.cli launch node "${node_options[@]}" \\
        -- run "${run_words[@]}" && code=0 || code=$?
    echo "$code" > "$ended"
) &
step=$!
while kill -0 "$step" 2> /dev/null; do
    wait "$step" || true # a signal interrupts the wait, not the step
done
code=$(cat "$ended" 2> /dev/null || echo 137) # no file: the step's shell was killed
"""

_REQUEUE = """\
# 75: the run saved a checkpoint and stopped.
if [ "$code" -eq 75 ] && [ "$ended_by_slurm" = no ] && [ ! -e "$launch/{stop}" ]; then
    again=$(cat "$folder/requeues" 2> /dev/null || echo 0)
    if [ "$again" -lt {most} ]; then
        echo $((again + 1)) > "$folder/requeues"
        echo "$(date -u +%FT%TZ) back to the queue ($((again + 1)) of at most {most})"
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
"""

_END = """\
[ -e "$launch/{stop}" ] && [ "$code" -eq 75 ] && code=0 # it was stopped on purpose
exit "$code"
"""


def script_of(job: Job, cluster: ClusterConfig, python: str) -> str:
    """The whole script. `python` is the interpreter outside of a container. Raises `UserError` for an unusable path."""
    for text in (job.name, str(job.folder), str(job.cwd)):
        if not text.isprintable():
            raise UserError(f"{text!r}: Slurm accepts no name with a line break or other control character")
    header = "\n".join(f"#SBATCH {option}" for option in _header(job, cluster.slurm))
    parts = [
        f"#!/bin/bash\n{header}\n\n# shellcheck disable=SC2016,SC2317\nset -euo pipefail",
        "\n".join(_places(job)),
        "\n".join(_variables(cluster)),
        "\n".join(_arrays(job, cluster, python)),
        _BODY.rstrip(),
        _REQUEUE.format(stop=STOP, most=cluster.slurm.max_requeues).rstrip() if cluster.slurm.max_requeues else "",
        _END.format(stop=STOP).rstrip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(job: Job, slurm: SlurmConfig) -> Iterator[str]:
    """Options of sbatch, one per line."""
    machines = job.machines
    yield f"--job-name={_quoted(job.name)}"
    yield from (
        f"--{name}={_quoted(value)}"
        for name in ("partition", "account", "qos", "reservation", "constraint")
        if (value := getattr(slurm, name)) is not None
    )
    yield f"--nodes={machines.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={slurm.cpus_per_gpu * machines.per_node}"
    if machines.device == "cuda":
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        yield f"--gres=gpu:{kind}{machines.per_node}"
    if slurm.memory_per_gpu is not None:
        yield f"--mem={math.ceil(slurm.memory_per_gpu * machines.per_node * 1e9 / 2**20)}M"
    if slurm.time is not None:
        yield f"--time={math.ceil(slurm.time / 60)}"
    yield f"--signal=B:USR1@{round(slurm.signal_before)}"
    yield "--requeue" if slurm.max_requeues else "--no-requeue"
    yield "--open-mode=append"
    logs = str(job.folder / LOGS).replace("%", "%%")  # which begins a placeholder
    yield f"--output={_quoted(f'{logs}/%A_%a.log' if job.array else f'{logs}/%j.log')}"
    yield f"--chdir={_quoted(str(job.cwd))}"
    if job.array:
        yield f"--array={ranges(sorted(job.array.tasks), ',')}%{job.array.at_once}"
    if job.after:
        yield f"--dependency={','.join(f'afterok:{number}' for number in job.after)}"
        yield "--kill-on-invalid-dep=yes"
    for option in slurm.sbatch_options:
        name, equals, value = option.partition("=")
        yield f"{name}={_quoted(value)}" if equals else name


def _places(job: Job) -> Iterator[str]:
    yield f"launch={shlex.quote(str(job.folder))}"
    yield f'folder="$launch/{TASKS}/$SLURM_ARRAY_TASK_ID"' if job.array else 'folder="$launch"'
    yield 'attempt="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"'
    yield 'ask="$folder/ask-$attempt"'
    yield 'ended="$folder/ended-$attempt"'
    yield f"cd {shlex.quote(str(job.cwd))}"


def _variables(cluster: ClusterConfig) -> Iterator[str]:
    yield "export PYTHONUNBUFFERED=1"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in cluster.variables.items())
    if cluster.prologue:
        yield ""
        yield "# prologue"
        yield "set +u"  # the scripts of environment modules and conda read unset variables
        yield from cluster.prologue
        yield "set -u"


def _arrays(job: Job, cluster: ClusterConfig, python: str) -> Iterator[str]:
    """Bash arrays with the words of the command that starts the nodes."""
    slurm, machines = cluster.slurm, job.machines
    srun = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--cpus-per-task={slurm.cpus_per_gpu * machines.per_node}"]
    container, srun_container = _container(job, slurm)
    inside = slurm.container.type != "none"
    yield f"srun_options=({shlex.join([*srun, *srun_container, *slurm.srun_options])})"
    yield f"container=({shlex.join(container)})"
    yield f"python=({shlex.quote(slurm.container.python if inside else python)})"
    ray = ["--ray", f"--{'gpus' if machines.device == 'cuda' else 'slots'}", str(machines.per_node)]
    ray += ["--address-field", machines.address_field]
    ray += ["--interface", slurm.network_interface] if slurm.network_interface else []
    yield f'node_options=(--folder "$folder" --ask "$ask"{" " + shlex.join(ray) if machines.on_ray else ""})'
    yield f'run_words=("$folder/run.toml"{" " + shlex.join(job.words) if job.words else ""})'


def _container(job: Job, slurm: SlurmConfig) -> tuple[list[str], list[str]]:
    """Words before the command that enter the container, and options of srun for it."""
    box = slurm.container
    folders = (*dict.fromkeys((str(job.cwd), str(job.folder))), *box.mounts)
    mounts = [folder if ":" in folder else f"{folder}:{folder}" for folder in folders]
    if box.type == "apptainer":
        gpus = ["--nv"] if job.machines.device == "cuda" else []
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", *gpus, "--pwd", str(job.cwd), *binds, box.image], []
    if box.type == "pyxis":
        options = [f"--container-image={box.image}", f"--container-mounts={','.join(mounts)}"]
        return [], [*options, f"--container-workdir={job.cwd}"]
    return [], []


def _quoted(text: str) -> str:
    """A value in a line that sbatch reads, in double quotes unless it is a plain word."""
    if text and all(letter.isalnum() or letter in "._-/%+@:,=[]" for letter in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

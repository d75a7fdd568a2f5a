"""The script of a Slurm job.

Every value of the configuration is quoted as one bash word, or is in a line that Slurm reads and bash does not. The
only text that bash runs unquoted is `prologue`, which is meant for that.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from skyrl.config.cluster import ClusterConfig, SlurmConfig
from skyrl.errors import UserError
from skyrl.launchers.job import LOGS, STOP, TASKS, Job

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
    yield f"--output={_quoted(_pattern(job.folder / LOGS, '%A_%a.log' if job.array else '%j.log'))}"
    yield f"--chdir={_quoted(str(job.cwd))}"
    if job.array:
        yield f"--array={_ranges(job.array.tasks)}%{job.array.at_once}"
    if job.after:
        yield f"--dependency={','.join(f'afterok:{number}' for number in job.after)}"
        yield "--kill-on-invalid-dep=yes"
    yield from map(_option, slurm.sbatch_options)


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
    yield f"srun_options=({_words(*srun, *srun_container, *slurm.srun_options)})"
    yield f"container=({_words(*container)})"
    yield f"python=({_words(slurm.container.python if inside else python)})"
    ray = ["--ray", f"--{'gpus' if machines.device == 'cuda' else 'slots'}", str(machines.per_node)]
    ray += ["--address-field", machines.address_field]
    ray += ["--interface", slurm.network_interface] if slurm.network_interface else []
    yield f'node_options=(--folder "$folder" --ask "$ask"{" " + _words(*ray) if machines.on_ray else ""})'
    yield f'run_words=("$folder/run.toml"{" " + _words(*job.words) if job.words else ""})'


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


def _words(*words: str) -> str:
    return shlex.join(words)


def _quoted(text: str) -> str:
    """A value in a line that sbatch reads, in double quotes unless it is a plain word."""
    if text and all(letter.isalnum() or letter in "._-/%+@:,=[]" for letter in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _option(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={_quoted(value)}" if equals else name


def _pattern(folder: Path, name: str) -> str:
    """A file name for Slurm, with `%` escaped, which begins a placeholder."""
    return f"{str(folder).replace('%', '%%')}/{name}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """The numbers as ranges, such as `0-3,7` for (0, 1, 2, 3, 7)."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)

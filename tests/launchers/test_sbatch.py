"""The script of a Slurm job: what Slurm reads of it, what bash makes of it, and that no text becomes a command."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.errors import ConfigError, UserError
from skyrl.launchers.job import STOP, Array, Machines
from skyrl.launchers.slurm import script_of
from tests.launchers.jobs import Stubs, cluster, job, options

NASTY = """a "b' $(touch pwned) `touch pwned` ; touch pwned # \\ %j"""

OF_THE_CLUSTER = {
    "slurm.partition=gpu": "--partition=gpu",
    "slurm.account=lab": "--account=lab",
    "slurm.qos=high": "--qos=high",
    "slurm.reservation=ours": "--reservation=ours",
    "slurm.constraint=h100&nvlink": '--constraint="h100&nvlink"',
    "slurm.time=3h": "--time=180",
    "slurm.gpu_type=h100": "--gres=gpu:h100:2",
    "slurm.cpus_per_gpu=3": "--cpus-per-task=6",
    "slurm.memory_per_gpu=1GiB": "--mem=2048M",
    "slurm.signal_before=120": "--signal=B:USR1@120",
    "slurm.max_requeues=0": "--no-requeue",
    'slurm.sbatch_options=["--comment=two words"]': '--comment="two words"',
}
_APPTAINER = ("slurm.container.type=apptainer", "slurm.container.image=a.sif")
_PYXIS = ("slurm.container.type=pyxis", "slurm.container.image=a+b")
IN_BASH = {
    _APPTAINER: "container=(apptainer exec --nv --pwd ",
    _PYXIS: " --container-image=a+b ",
    (*_PYXIS, 'slurm.container.mounts=["/data"]'): ",/data:/data ",
    (*_PYXIS, "slurm.container.python=python3"): "python=(python3)",
    ('slurm.srun_options=["--mpi=none"]',): " --mpi=none)",
    ("slurm.network_interface=ib0",): " --interface ib0)",
    ("variables.LEVEL=1",): "export LEVEL=1",
    ('prologue=["module load cuda"]',): "\nmodule load cuda\n",
}
CUDA = Machines(nodes=2, per_node=2, device="cuda", on_ray=True)


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path / "stubs")


@pytest.mark.parametrize(("setting", "expected"), OF_THE_CLUSTER.items())
def test_slurm_reads_what_the_cluster_says(setting: str, expected: str, tmp_path: Path) -> None:
    task = job(tmp_path / "launch", machines=CUDA)
    assert expected not in options(script_of(task, cluster(), "python"))
    assert expected in options(script_of(task, cluster(setting), "python"))


@pytest.mark.parametrize(("settings", "expected"), IN_BASH.items())
def test_bash_reads_what_the_cluster_says(settings: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    task = job(tmp_path / "launch", machines=CUDA)
    assert expected not in script_of(task, cluster(), "python")
    assert expected in script_of(task, cluster(*settings), "python")


def test_a_run_on_a_cpu_takes_slots_and_no_gpus(tmp_path: Path) -> None:
    task = job(tmp_path / "launch", machines=Machines(per_node=2, on_ray=True))
    text = script_of(task, cluster(), "python")
    assert "--gres" not in text
    assert "--ray --slots 2 " in text


def test_an_array_has_a_folder_for_each_task(tmp_path: Path) -> None:
    task = job(tmp_path / "launch", array=Array(tasks=(0, 1, 2, 5), at_once=2))
    text = script_of(task, cluster(), "python")
    assert "--array=0-2,5%2" in options(text)
    assert 'folder="$launch/tasks/$SLURM_ARRAY_TASK_ID"' in text


def test_dependencies_are_waited_for(tmp_path: Path) -> None:
    directives = options(script_of(job(tmp_path / "launch", after=("3", "4")), cluster(), "python"))
    assert {"--dependency=afterok:3,afterok:4", "--kill-on-invalid-dep=yes"} <= set(directives)


def test_no_name_path_or_value_becomes_a_command(tmp_path: Path, stubs: Stubs) -> None:
    folder = tmp_path / NASTY.replace("/", "_") / "launch"
    task = job(folder, name=NASTY, words=(NASTY,))
    result = stubs.run(task, cluster(f"variables.A={NASTY}"))
    assert result.returncode == 0, result.stderr
    words = stubs.words("srun")
    assert words[words.index("--folder") + 1] == str(folder)
    assert words[-2:] == [f"{folder}/run.toml", NASTY]
    assert list(tmp_path.rglob("pwned")) == []


@pytest.mark.parametrize("field", ["name", "folder", "cwd"])
def test_a_name_with_a_line_break_is_refused(field: str, tmp_path: Path) -> None:
    text = "a\n#SBATCH --uid=root"
    changed: Any = {field: text if field == "name" else tmp_path / text}
    task = evolve(job(tmp_path / "launch"), **changed)
    with pytest.raises(UserError, match="control character"):
        script_of(task, cluster(), "python")


@pytest.mark.parametrize(
    "setting",
    [
        "slurm.partition=a b",
        "slurm.account=a\nb",
        'slurm.sbatch_options=["--a\\nb"]',
        'slurm.srun_options=["rm -rf"]',
        "slurm.network_interface=ib0; ls",
        "variables.A=one\ntwo",
        "variables.A-B=one",
        'slurm.container.mounts=["relative"]',
        "slurm.container.type=pyxis",
        "slurm.container.image=a",
        "slurm.time=5m",
        "variables.HF_TOKEN=abc",
    ],
)
def test_what_slurm_could_not_take_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError):
        cluster(setting)


def test_a_run_that_saved_and_stopped_goes_back_to_the_queue(tmp_path: Path, stubs: Stubs) -> None:
    stubs.run(job(tmp_path / "launch"), cluster(), code=75)
    assert stubs.words("scontrol") == ["requeue", "7"]


def test_it_goes_back_only_so_often(tmp_path: Path, stubs: Stubs) -> None:
    for _ in range(3):
        result = stubs.run(job(tmp_path / "launch"), cluster("slurm.max_requeues=2"), code=75)
    assert stubs.words("scontrol") == ["requeue", "7"] * 2
    assert result.returncode == 75


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_any_other_end_is_the_end(code: int, tmp_path: Path, stubs: Stubs) -> None:
    result = stubs.run(job(tmp_path / "launch"), cluster(), code=code)
    assert (result.returncode, stubs.words("scontrol")) == (code, [])


def test_a_run_that_was_stopped_on_purpose_does_not_go_back_and_has_not_failed(tmp_path: Path, stubs: Stubs) -> None:
    task = job(tmp_path / "launch")
    (task.folder / STOP).touch()
    result = stubs.run(task, cluster(), code=75)
    assert (result.returncode, stubs.words("scontrol")) == (0, [])


def test_a_job_that_slurm_ends_is_left_to_slurm(tmp_path: Path, stubs: Stubs) -> None:
    terminates = "eval trap : TERM; kill -TERM 0"  # every process of the job, as Slurm does
    runs = [stubs.run(job(tmp_path / f"launch-{i}"), cluster(), code=75, also=terminates) for i in range(20)]
    assert [run.returncode for run in runs] == [75] * 20  # bash may lose a code that meets a signal, not every time
    assert stubs.words("scontrol") == []


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shellcheck_has_nothing_to_say(device: str, tmp_path: Path) -> None:
    machines = Machines(nodes=2, per_node=4, device="cuda" if device == "cuda" else "cpu", on_ray=True)
    task = job(tmp_path / "launch", machines=machines, array=Array(tasks=(0,)), words=(NASTY,))
    text = script_of(task, cluster(f"variables.A={NASTY}"), "python")
    result = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert result.stdout == ""

"""What AReaL's files say about machines becomes the description of a cluster, which `skyrl launch` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config.cluster import ClusterConfig, load_cluster
from skyrl.interop.areal.convert import convert_areal, convert_keys
from skyrl.interop.report import Conversion, Line
from tests.interop.corpora import areal_files

SPEC = "actor.scheduling_spec[0]."
SECRETS = ("WANDB_API_KEY",)


def cluster_of(conversion: Conversion, folder: Path) -> ClusterConfig:
    """As the command writes it and `skyrl launch` reads it."""
    file = folder / "cluster.toml"
    file.write_text(tomli_w.dumps(conversion.cluster))
    return load_cluster(str(file) if conversion.cluster else None)


def line_of(keys: dict[str, Any], source: str) -> Line:
    return next(line for line in convert_keys(keys).lines if line.source == source)


def test_launchers_of_2025_are_shares_of_each_gpu(tmp_path: Path) -> None:
    keys = {
        "launcher.inference_server_cpus_per_gpu": 4,
        "launcher.trainer_cpus_per_gpu": 15,
        "launcher.inference_server_mem_per_gpu": 32768,
        "launcher.trainer_mem_per_gpu": 153600,
        "launcher.trainer_env_vars": "NCCL_DEBUG=WARN,XLA_FLAGS=--a=b",
        "launcher.inference_server_env_vars": "",
        "launcher.slurm.srun_additional_args": "--unbuffered --mpi pmi2 -K --chdir $PWD",
        "launcher.slurm.container_type": "apptainer",
        "launcher.slurm.mount": "/storage:/storage,/data",
        "launcher.slurm.trainer_image": "a.sif",
        "launcher.slurm.inference_server_image": "a.sif",
        "cluster.n_nodes": 2,
        "cluster.n_gpus_per_node": 4,
    }
    conversion = convert_keys(keys)
    cluster = cluster_of(conversion, tmp_path)
    slurm = cluster.slurm
    assert conversion.refused == ()
    assert slurm.cpus_per_gpu == 15
    assert slurm.memory_per_gpu == pytest.approx(150 * 2**30 / 1e9)
    assert (slurm.nodes, slurm.gpus_per_node) == (2, 4)
    assert cluster.variables == {"NCCL_DEBUG": "WARN", "XLA_FLAGS": "--a=b"}
    assert slurm.srun_options == ("--unbuffered", "--mpi=pmi2", "-K")
    assert (slurm.container.type, slurm.container.image) == ("apptainer", "a.sif")
    assert slurm.container.mounts == ("/storage:/storage", "/data")


def test_scheduling_spec_lists_are_converted(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "actor:\n  scheduling_spec:\n  - {cpu: 4, gpu: 1, mem: 32, port_count: 2, task_type: worker, image: a.sif,\n"
        "     cmd: python3 -m areal.infra.rpc.rpc_server, env_vars: {NCCL_NET: IB, AREAL_X: 1}, nodelist: 'n[1-4]',\n"
        "     exclude: n9, additional_bash_cmds: [module load cuda], container_type: apptainer}\n"
        "rollout: {scheduling_spec: '${actor.scheduling_spec}'}\n"
        "ref: {scheduling_spec: [{cpu: 16, env_vars: {NCCL_NET: IB}}]}\n"
    )
    conversion = convert_areal(str(file))
    cluster = cluster_of(conversion, tmp_path)
    assert conversion.refused == ()
    assert cluster.slurm.cpus_per_gpu == 16
    assert cluster.slurm.memory_per_gpu == pytest.approx(32 * 2**30 / 1e9)
    assert (cluster.variables, cluster.prologue) == ({"NCCL_NET": "IB"}, ("module load cuda",))
    assert cluster.slurm.sbatch_options == ("--nodelist=n[1-4]", "--exclude=n9")
    assert cluster.slurm.container.image == "a.sif"


@pytest.mark.parametrize(
    ("keys", "variable"),
    [
        ({"type": "nfs", "nfs_record_root": "/shared/names"}, "nfs:/shared/names"),
        ({"type": "etcd3", "etcd3_addr": "10.0.0.1:2379"}, "etcd:10.0.0.1:2379"),
        ({"type": "ray", "ray_actor_name": "kv"}, None),
        ({"type": "etcd3", "nfs_record_root": "/unused", "etcd3_addr": "h:1"}, "etcd:h:1"),
    ],
)
def test_name_resolve_converts_to_a_name_store(keys: dict[str, str], variable: str | None, tmp_path: Path) -> None:
    conversion = convert_keys({f"cluster.name_resolve.{name}": value for name, value in keys.items()})
    assert cluster_of(conversion, tmp_path).variables.get("SKYRL_NAMES") == variable
    assert conversion.refused == ()


@pytest.mark.parametrize("key", ["mode", "scheduler.type"])
@pytest.mark.parametrize("launcher", ["local", "ray", "slurm"])
def test_launchers_convert_to_launch_commands(key: str, launcher: str) -> None:
    line = line_of({key: launcher}, key)
    assert (line.outcome, line.targets) == ("renamed", (f"skyrl launch {launcher}",))


@pytest.mark.parametrize(
    ("key", "value", "path", "expected"),
    [
        ("functioncall_service_domain", "10.0.0.7:8002", "code_url", "http://10.0.0.7:8002/run"),
        ("functioncall_service_domain", "https://code.lab", "code_url", "https://code.lab/run"),
        ("reward_model_service_url", "http://h:9/score", "reward_model", {"url": "http://h:9/score"}),
        ("reward_model_path", "a/b", "reward_model", {"path": "a/b"}),
    ],
)
def test_reward_services_convert_to_environment_settings(key: str, value: str, path: str, expected: object) -> None:
    assert convert_keys({f"scheduler.{key}": value}).tables["environment"]["skyrl_gym"][path] == expected


@pytest.mark.parametrize(
    ("key", "value", "outcome", "reason"),
    [
        (SPEC + "env_vars.WANDB_API_KEY", "x", "refused", "export WANDB_API_KEY before the launch"),
        (SPEC + "env_vars.AREAL_PROXY_WARN_ONCE", "1", "needless", "read only by AReaL"),
        (SPEC + "cmd", "python mine.py", "not yet", "a custom command for each rank"),
        (SPEC + "cpu", 0, "refused", "slurm.cpus_per_gpu: 0 is not positive"),
        (SPEC + "mount", "/a:/a", "needless", "no container is used"),
        (SPEC + "srun_additional_args", "--x=$(id)", "refused", "only a shell can evaluate"),
        ("scheduler.type", "kubernetes", "not yet", "launchers other than local, ray, slurm"),
        ("mem_per_master_worker", 20000, "needless", "the trainer's process does this itself"),
        ("rollout.scheduling_spec", "${actor.scheduling_spec}", "needless", "all processes run in one job"),
        ("cluster.n_gpus_per_node", 0, "needless", "not a positive number"),
        ("scheduler.deploy_mode", "colocation", "needless", "derived from the backends"),
    ],
)
def test_one_machine_setting_converts_to_the_expected_outcome(key: str, value: Any, outcome: str, reason: str) -> None:
    keys = {key: value, "actor.scheduling_spec[0].gpu": 1}
    line = line_of(keys, key)
    assert (line.outcome, reason in line.reason) == (outcome, True), line


def test_roles_that_contradict_each_other_are_refused() -> None:
    keys = {SPEC + "env_vars.A": "1", "rollout.scheduling_spec[0].env_vars.A": "2"}
    line = line_of(keys, "rollout.scheduling_spec[0].env_vars.A")
    assert line.outcome == "refused"
    assert line.reason == "is '1' for other processes, but all processes of a run share one variables.A"


@pytest.mark.long
def test_what_examples_say_about_machines_is_converted(reference: Path, tmp_path: Path) -> None:
    names = ("launcher.", "scheduling_spec", "name_resolve", "scheduler.", "cpus_per_", "mem_per_", "n_gpus", "n_nodes")
    lines = 0
    for corpus in ("areal_yaml_keys.json", "areal_yaml_keys_2026_05.json"):
        for file in areal_files(reference, corpus):
            about = [line for line in file.conversion.lines if any(name in line.source for name in names)]
            lines += len(about)
            assert [line for line in about if line.is_refused and not line.source.endswith(SECRETS)] == []
            cluster_of(file.conversion, tmp_path)
    assert lines > 440

"""What a machine tells about itself."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from skyrl.processes.machine_facts import GpuFacts, facts_here, read_gpus


def test_versions_memory_and_paths_are_those_of_this_machine(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    facts = facts_here([str(tmp_path), gone], [str(tmp_path), gone])
    assert facts.versions["python"] == platform.python_version()
    assert {"torch", "ray", "transformers", "skyrl's code"} <= facts.versions.keys()
    assert 0 < facts.memory <= facts.total_memory
    assert (facts.lacking, facts.unwritable) == ([gone], [gone])


def test_what_nvidia_smi_prints_is_read() -> None:
    text = "0, NVIDIA H100 80GB HBM3, 0\n1, NVIDIA H100 80GB HBM3, [N/A]\n"
    name = "NVIDIA H100 80GB HBM3"
    assert list(read_gpus(text)) == [
        GpuFacts(index="0", name=name, uncorrected_errors=0),
        GpuFacts(index="1", name=name, uncorrected_errors=None),
    ]


@pytest.mark.parametrize(
    ("script", "gpus", "problem"),
    [
        ("echo '0, L40S, 2'", 1, ""),
        ("echo 'Unable to determine the device handle' >&2; exit 15", 0, "Unable to determine the device handle"),
    ],
)
def test_gpus_and_their_driver_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: int, problem: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    facts = facts_here([], [])
    assert (len(facts.gpus), facts.gpu_problem) == (gpus, problem)

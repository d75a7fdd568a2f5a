"""The import contracts of pyproject.toml hold, and each of them can be broken.

A contract that no import breaks says nothing. So each one is broken here on purpose, in a copy of the package, and has
to be the only one that complains.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from attrs import frozen

ROOT = Path(__file__).parents[1]
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
NAMES: dict[str, str] = {contract["id"]: contract["name"] for contract in OPTIONS["contracts"]}


@frozen
class Break:
    """A file that breaks one contract, and the code in it."""

    contract: str
    file: str
    code: str


BREAKS = {
    "an import upwards": Break("layers", "envs/planted.py", "import skyrl.cli"),
    "an import of a neighbour": Break("layers", "tracking/planted.py", "import skyrl.rollout"),
    "a package without a layer": Break("layers", "annex/__init__.py", ""),
    "a model that takes batches": Break("batch", "models/planted.py", "import skyrl.batch"),
    "torch in the configuration": Break("light", "config/settings/planted.py", "import torch"),
    "rich in a function of the tree": Break("light", "tree/planted.py", "def late():\n    import rich"),
    "the tree knows trajectories": Break("tree", "tree/planted.py", "import skyrl.trajectory"),
    "a learner starts actors": Break("ray", "learners/planted.py", "import ray"),
    "the endpoint judges": Break("endpoint", "endpoint/planted.py", "from skyrl.inference.pool import client"),
    "a learner samples": Break("learners", "learners/planted.py", "from skyrl.inference import engine"),
    "a setting loads files": Break("config", "config/settings/planted.py", "from skyrl.config import loading"),
    "a plan looks at results": Break("commands", "cli/planning/planted.py", "from skyrl.cli import results"),
    "an engine counts its like": Break("inference", "inference/vllm/planted.py", "from skyrl.inference import pool"),
    "one system converts another": Break("interop", "interop/trl/planted.py", "from skyrl.interop import areal"),
    "a strategy knows another": Break("workers", "learners/zero/planted.py", "from skyrl.learners import fsdp2"),
    "files know what cuts models": Break("models", "models/files/planted.py", "from skyrl.models import parallel"),
    "an environment knows them all": Break("envs", "envs/builtin/planted.py", "from skyrl.envs import registry"),
    "ray publishes names": Break("processes", "processes/ray/planted.py", "from skyrl.processes import naming"),
    "a protocol serves": Break("protocols", "endpoint/protocols/planted.py", "from skyrl.endpoint import http"),
    "a service makes trackers": Break("tracking", "tracking/services/planted.py", "from skyrl.tracking import factory"),
}


def broken_contracts(folder: Path) -> set[str]:
    """Names of the contracts that `lint-imports` finds broken in the copy of the project in `folder`."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    run = subprocess.run(
        [*command, "--no-logo", "--no-cache"],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)(?: \(.*\))?$", run.stdout, flags=re.MULTILINE))
    assert verdicts.keys() == set(NAMES.values()), run.stdout + run.stderr
    return {name for name, verdict in verdicts.items() if verdict == "BROKEN"}


def test_every_contract_holds() -> None:
    assert broken_contracts(ROOT) == set()


def test_every_contract_is_broken_once_below() -> None:
    assert {case.contract for case in BREAKS.values()} == NAMES.keys()


@pytest.mark.sampled(17)
@pytest.mark.parametrize("planted", BREAKS.values(), ids=BREAKS.keys())
def test_a_planted_import_breaks_its_contract_and_no_other(planted: Break, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "skyrl", tmp_path / "skyrl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "skyrl" / planted.file
    file.parent.mkdir(exist_ok=True)
    file.write_text(planted.code)
    assert broken_contracts(tmp_path) == {NAMES[planted.contract]}

"""Writes the settings of other systems with their defaults to `skyrl/interop/trees`, a file for each kind of run.

    make peer-trees                     every system, from its wheel
    make peer-trees PEERS="verl=0.9.1 areal=2.0.0:CHECKOUT"

A wheel is downloaded and unpacked, never installed. Each system has a module in `tests/interop/peers` that reads the
unpacked files in a process of its own: `python -m tests.interop.peers.verl FOLDER` prints one JSON object, kind of run
-> {"source": file, "defaults": {key: default}}. A checkout takes the place of a wheel for versions without one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TREES = ROOT / "skyrl" / "interop" / "trees"
PEERS = ROOT / "tests" / "interop" / "peers"
VERSIONS = {"skyrl": "0.4.0", "verl": "0.9.1", "areal": "1.0.4", "trl": "1.16.0"}
PYTHONS = {"skyrl": "3.12"}
"""Python for which a system's wheels are, where it is not the one that runs."""


def unpacked(system: str, version: str, folder: Path) -> Path:
    """Folder with the unpacked wheel of a version."""
    python = PYTHONS.get(system, f"{sys.version_info.major}.{sys.version_info.minor}")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*download, "--python-version", python, "--dest", folder, f"{system}=={version}"], check=True)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    return folder / "wheel"


def trees_of(system: str, folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Kind of run -> source and defaults, read in a process of its own."""
    reader = [sys.executable, "-m", f"tests.interop.peers.{system}", str(folder)]
    printed = subprocess.run(reader, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return json.loads(printed)  # type: ignore[no-any-return]  # what the reader prints


def write(system: str, version: str, folder: Path) -> None:
    for kind, tree in trees_of(system, folder).items():
        written = {"system": system, "version": version, "kind": kind, "source": tree["source"]}
        written["defaults"] = dict(sorted(tree["defaults"].items()))
        (TREES / f"{system}-{kind}-{version}.json").write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


def main(arguments: list[str]) -> None:
    for argument in arguments or [f"{system}={version}" for system, version in VERSIONS.items()]:
        system, _, location = argument.partition("=")
        version, _, checkout = location.partition(":")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(checkout) if checkout else unpacked(system, version, Path(scratch))
            write(system, version, folder)


if __name__ == "__main__":
    main(sys.argv[1:])

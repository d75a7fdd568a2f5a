"""Published scripts and files of SkyRL and AReaL, each converted once for all tests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.report import Conversion
from skyrl.interop.skyrl.scripts import convert_overrides
from skyrl.interop.trl import convert as trl
from skyrl.interop.verl import convert as verl

RECORDED = Path(__file__).parents[1] / "reference"
"""The corpora that the pages of docs/ count, whatever `--reference` names."""


@attrs.frozen(kw_only=True)
class Converted:
    """One file of a corpus."""

    name: str
    facts: dict[str, Any]
    """What the corpus says about it: a record of a script, or the flat keys of a file."""

    conversion: Conversion


@cache
def hydra_scripts(folder: Path) -> tuple[Converted, ...]:
    """SkyRL's scripts of the Hydra era."""
    return _scripts(json.loads((folder / "skyrl_overrides_hydra_era.json").read_text())["scripts"])


@cache
def scripts_of_2026(folder: Path, family: str) -> tuple[Converted, ...]:
    """SkyRL's scripts of August 2026; `family` is rl or sft."""
    scripts = json.loads((folder / "skyrl_overrides_2026_08.json").read_text())
    return _scripts([script for script in scripts if script["family"] == family])


@cache
def areal_files(folder: Path, name: str = "areal_yaml_keys_2026_05.json") -> tuple[Converted, ...]:
    """AReaL's experiment files, without tasks for SkyPilot and without rows with images."""
    files = json.loads((folder / name).read_text())
    return tuple(
        Converted(name=file, facts=keys, conversion=convert_keys(keys, file))
        for file, keys in files.items()
        if not file.endswith(".sky.yaml") and "/vlm" not in file
    )


@cache
def option_sets(system: str) -> tuple[Converted, ...]:
    """Settings of examples of verl or of TRL, as their scripts and programs give them."""
    known: dict[str, tuple[str, Callable[[Mapping[str, Any], str], Conversion]]] = {
        "verl": ("verl_options_2026_01.json", verl.convert_keys),
        "trl": ("trl_options_2026_07.json", trl.convert_keys),
    }
    file, convert = known[system]
    sets = json.loads((RECORDED / file).read_text())
    return tuple(Converted(name=name, facts=keys, conversion=convert(keys, name)) for name, keys in sets.items())


def total(files: Iterable[Converted]) -> Counter[str]:
    """Outcome -> how many settings had it."""
    return Counter(line.outcome for file in files for line in file.conversion.lines)


def _scripts(scripts: list[dict[str, Any]]) -> tuple[Converted, ...]:
    return tuple(
        Converted(
            name=script["script"],
            facts=script,
            conversion=convert_overrides(script["overrides"], script["script"], program=script.get("entrypoint") or ""),
        )
        for script in scripts
    )

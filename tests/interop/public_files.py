"""Converts every file of a system below a folder, and sorts them into lists with the reasons.

    python -m tests.interop.public_files skyrl FOLDER

clean: nothing is refused, and the check finds no error. refused: the settings and why. left: what the file is instead
of a run that skyrl converts, such as a server or rows with images. The folder is fetched, never stored here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from skyrl.errors import ConfigError
from skyrl.interop.areal.convert import convert_areal
from skyrl.interop.report import Conversion
from skyrl.interop.skyrl.scripts import convert_skyrl
from skyrl.interop.trl.convert import convert_trl
from skyrl.interop.verl.convert import convert_verl

SYSTEMS: dict[str, tuple[Callable[..., Conversion], tuple[str, ...]]] = {
    "skyrl": (convert_skyrl, (".sh",)),
    "areal": (convert_areal, (".yaml", ".sh")),
    "verl": (convert_verl, (".sh",)),
    "trl": (convert_trl, (".py", ".sh", ".yaml")),
}
"""System -> its converter, and the suffixes of its files."""


def main(system: str, folder: str) -> None:
    """Print the lists and their lengths."""
    convert, suffixes = SYSTEMS[system]
    lists: dict[str, list[str]] = {"clean": [], "refused": [], "left": []}
    for file in sorted(path for path in Path(folder).rglob("*") if path.suffix in suffixes):
        for name, reasons, kind in _sorted(convert, file):
            lists[kind].append("\n    ".join([name, *sorted(reasons)]))
    for kind, rows in lists.items():
        print(f"{kind}: {len(rows)}", *rows, sep="\n  ")


def _sorted(convert: Callable[..., Conversion], file: Path, **number: int) -> Iterator[tuple[str, set[str], str]]:
    """Name, reasons and list of a file, or of each of its runs."""
    name = " --command ".join([str(file), *map(str, number.values())])
    try:
        run = convert(str(file), **number)
    except ConfigError as error:
        runs = [problem.path.split()[-1] for problem in error.problems if problem.path.startswith("--command ")]
        for command_number in runs:
            yield from _sorted(convert, file, number=int(command_number))
        if not runs:
            yield name, {error.problems[0].message}, "left"
        return
    reasons = {f"{line.source}: {line.reason}" for line in run.refused}
    reasons |= {f"{problem.path}: {problem.message}" for problem in run.problems if problem.severity == "error"}
    yield name, reasons, "refused" if reasons else "clean"


if __name__ == "__main__":
    main(*sys.argv[1:])

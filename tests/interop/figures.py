"""Tables of docs/coming-from: what becomes of published scripts and files, and every reason for a refusal."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from skyrl.interop.report import Conversion
from tests.interop.corpora import (
    RECORDED,
    Converted,
    areal_files,
    hydra_scripts,
    option_sets,
    scripts_of_2026,
    total,
)

_SHELL = "values that are not in the script, but in its author's shell"

_UNEVEN = "batches that the GPUs cannot share evenly; SkyRL ends with an error, too, or leaves samples out"

REASONS = {
    r"implemented(?: it)? yet: (.+)": r"not implemented yet: \1",
    r"no such field of|did you mean trainer": "fields that the script's own code adds",
    r"one of its variables is empty|is set outside of the file|only a shell can evaluate": _SHELL,
    r"the run starts no engines, and no address": _SHELL,
    r"Hydra is not used": "settings of Hydra itself",
    r"^'(simple_baseline|no_op|loop)' is unknown": "an estimator that the script's own code registers",
    r"models in the same processes have the same": "a reference with other degrees of parallelism on the policy's GPUs",
    r"do not divide the policy's mini-batch|cannot be split evenly": _UNEVEN,
    r"one call of the engine has one turn": "several turns in one call of the engine (`batched`)",
}
"""Pattern of a message -> the reason as the page has it."""


@cache
def corpora() -> dict[str, tuple[Converted, ...]]:
    """Published files by where they come from."""
    return {
        "SkyRL's scripts of the Hydra era": hydra_scripts(RECORDED),
        "SkyRL's scripts of August 2026": scripts_of_2026(RECORDED, "rl"),
        "its SFT scripts of August 2026": scripts_of_2026(RECORDED, "sft"),
        "AReaL's examples of September 2025": areal_files(RECORDED, "areal_yaml_keys.json"),
        "AReaL's examples of May 2026": areal_files(RECORDED, "areal_yaml_keys_2026_05.json"),
        "verl's examples of January 2026": option_sets("verl"),
        "TRL's examples of July 2026": option_sets("trl"),
    }


def settings_table() -> str:
    """One row for each corpus: how many settings had each outcome."""
    head = "| files | how many | settings | kept or renamed | derived | need nothing | refused | in the result |"
    return "\n".join([head, "|---|" + "---:|" * 7, *(_row(name, files) for name, files in corpora().items())])


def _row(name: str, files: tuple[Converted, ...]) -> str:
    outcomes = total(files)
    refused = outcomes["refused"] + outcomes["not yet"]
    asking = outcomes.total() - outcomes["needless"]
    share = int(1000 * (asking - refused) / asking) / 10
    numbers = (
        len(files),
        outcomes.total(),
        outcomes["kept"] + outcomes["renamed"],
        outcomes["derived"],
        outcomes["needless"],
        refused,
    )
    return f"| {name} | " + " | ".join(map(str, numbers)) + f" | {share:g} % |"


def scripts_table() -> str:
    """How many of SkyRL's scripts are accepted, and how many are not for each reason."""
    scripts = (*corpora()["SkyRL's scripts of the Hydra era"], *corpora()["SkyRL's scripts of August 2026"])
    counts = Counter(reason for script in scripts for reason in reasons(script.conversion))
    accepted = sum(not reasons(script.conversion) for script in scripts)
    rows = [f"| {reason} | {count} |" for reason, count in sorted(counts.items(), key=lambda row: (-row[1], row[0]))]
    head = [
        "| what `check` says of SkyRL's scripts | scripts |",
        "|---|---:|",
        f"| accepted, as they are or converted | {accepted} |",
    ]
    return "\n".join([*head, *rows])


def reasons(conversion: Conversion) -> frozenset[str]:
    """Every reason why a script is not accepted as it is. Raises ValueError for one that the page does not give."""
    lines = (line.reason for line in conversion.refused)
    errors = (problem.message for problem in conversion.problems if problem.severity == "error")
    return frozenset(map(_reason, (*lines, *errors)))


def refusals_table() -> str:
    """Why settings of AReaL's files are refused."""
    files = [file for name, corpus in corpora().items() if name.startswith("AReaL") for file in corpus]
    counts = Counter(line.reason.partition(";")[0] for file in files for line in file.conversion.refused)
    rows = [f"| {reason} | {count} |" for reason, count in sorted(counts.items(), key=lambda row: (-row[1], row[0]))]
    return "\n".join(["| why settings of AReaL's files are refused | settings |", "|---|---:|", *rows])


def _reason(message: str) -> str:
    for pattern, reason in REASONS.items():
        if match := re.search(pattern, message):
            return match.expand(reason)
    raise ValueError(f"a reason that the page does not give: {message}")

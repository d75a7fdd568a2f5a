"""Reads every shell script below a folder, and compares with what Bash itself starts.

    python -m tests.interop.public_scripts FOLDER

Scripts run in the sandbox, without network, and with stubs for all programs. The folder is fetched, never stored here.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from skyrl.errors import ConfigError
from skyrl.interop.shell.scripts import Script, read_script
from skyrl.sandbox.sandbox import Sandbox
from tests.interop.stubs import differences, from_outside, received, scripts_below


def main(folder: str) -> int:
    """Print the figures. Returns 1 if a script was read as Bash does not read it."""
    counts: Counter[str] = Counter()
    sandbox = Sandbox()
    for name, text in scripts_below(Path(folder)).items():
        outcome, details = _compare(name, text, sandbox)
        counts[outcome] += 1
        if details:
            print(f"{outcome}: {name}", *(f"    {detail[:300]}" for detail in details[:3]), sep="\n")
    sandbox.close()
    print(f"{counts.total()} scripts: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return int(bool(counts["read otherwise"]))


def _compare(name: str, text: str, sandbox: Sandbox) -> tuple[str, list[str]]:
    try:
        script: Script = read_script(text, name)
    except ConfigError as error:
        return "refused", [problem.message for problem in error.problems]
    calls = received([(text, from_outside(script))], sandbox, seconds=10.0)
    if calls is None:
        return "do not end with stubs", [""]
    mismatches = differences(script, calls[0])
    return ("read otherwise", mismatches) if mismatches else ("read as Bash does", [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

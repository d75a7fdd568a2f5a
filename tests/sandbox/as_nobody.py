"""Run pytest as the user `nobody`: python -m tests.sandbox.as_nobody ARGUMENT...

Needs root. Python, its packages and this repository may be in folders that only root may enter: they are made readable
in mounts that only this process and its children see.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from skyrl.sandbox import confinement

NOBODY = 65534


def main() -> None:
    repository = str(Path(__file__).parents[2])
    prefixes = [sys.prefix, sys.base_prefix, repository]
    confinement.make_reachable([*prefixes, *(path for path in sys.path if path)])
    home = tempfile.mkdtemp(prefix="skyrl-nobody-")
    os.chown(home, NOBODY, NOBODY)
    os.chdir(repository)
    environ = {**os.environ, "HOME": home, "TMPDIR": home, "USER": "nobody", "LOGNAME": "nobody"}
    child = os.fork()
    if child == 0:
        confinement.become(NOBODY)
        os.execve(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]], environ)
    _, status = os.waitpid(child, 0)
    shutil.rmtree(home, ignore_errors=True)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()

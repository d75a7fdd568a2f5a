"""Runs shell scripts in which every program is a stub that notes its arguments, and compares them with what is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl.interop.shell.scripts import Script, ScriptCommand
from skyrl.interop.shell.unknown import UNKNOWN
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox

PROGRAM = r"""
import json, os, subprocess, sys
given = json.load(sys.stdin)
driver = ["command_not_found_handle() { printf '%s\\0' \"$#\" \"$@\" >&9; }; cd() { :; }; source() { :; }"]
os.mkdir("stubs")
for name in ("basename", "dirname", "seq"):
    os.symlink(f"/usr/bin/{name}", f"stubs/{name}")
with open("stubs/stub", "w") as file:
    file.write("#!/bin/bash\nprintf '%s\\0' $(($# + 1)) ${0##*/} \"$@\" >&9\n")
os.chmod("stubs/stub", 0o755)
with open("stubs/bash", "w") as file:
    file.write("#!/bin/bash\ncase $1 in -*c) exec /bin/bash \"$@\";; esac\n. stubs/stub\n")
os.chmod("stubs/bash", 0o755)
os.symlink("bash", "stubs/sh")
for name in ("python", "python3", "uv", "trl", "torchrun", "accelerate", "uvicorn"):
    os.symlink("stub", f"stubs/{name}")
for number, (script, environment) in enumerate(given):
    with open(f"{number}.sh", "w") as file:
        file.write(script)
    open(f"{number}.out", "w").close()
    lines = "".join(f"export {name}='${name}'; " for name in environment)
    inside = f"exec 9>>{number}.out; {lines} builtin source ./{number}.sh"
    driver.append(f"( {inside}; printf '1\\0END\\0' >&9 ) </dev/null >/dev/null 2>&1")
environment = {"PATH": os.path.abspath("stubs"), "HOME": "~"}
subprocess.run(["/bin/bash", "--noprofile", "--norc", "-c", "\n".join(driver)], env=environment)
found = []
for number in range(len(given)):
    words = open(f"{number}.out", "rb").read().decode("utf-8", "replace").split("\0")[:-1]
    calls = []
    while words:
        count = int(words[0])
        calls.append(words[1 : count + 1])
        words = words[count + 1 :]
    found.append(calls)
print(json.dumps(found))
"""
"""PATH has a folder with stubs alone, and the three programs whose output is read. What is not there goes to
`command_not_found_handle`, which is a stub, too."""


def received(
    scripts: Sequence[tuple[str, Sequence[str]]], sandbox: Sandbox, *, seconds: float = 300.0
) -> list[list[list[str]]] | None:
    """Name and arguments of every program that each script starts. Beside a script are the names of variables that it
    takes from outside; each has its own name with `$` as its value. None if they do not end.
    """
    limits = ResourceLimits(seconds=seconds, cpu_seconds=int(seconds), output_bytes=64 << 20)
    ran = sandbox.run(PROGRAM, json.dumps(scripts).encode(), limits)
    return json.loads(ran.stdout) if ran.ended == "exit" and ran.stdout else None


def from_outside(script: Script) -> list[str]:
    """Variables whose value the script takes from outside, and which it was not assumed to find unset."""
    sources = {source for command in script.commands for word in command.words for source in UNKNOWN.findall(word)}
    names = {match[1] for source in sources if (match := re.fullmatch(r"\$([A-Za-z_]\w*)", source))}
    return sorted(names - {name for name, _ in script.assumed})


def differences(script: Script, calls: Sequence[Sequence[str]]) -> list[str]:
    """What programs received and the reading has not, and what the reading has and none received, unless the script
    ended early, as under `set -e`.
    """
    ends, calls = ["END"] in calls, [call for call in calls if call != ["END"]]
    left = sorted(script.commands, key=lambda command: not command.is_certain)
    mismatches: list[str] = []
    for call in calls:
        text = "".join(f"\0{word}" for word in call)
        match = next((command for command in left if _expression(command).fullmatch(text)), None)
        if match is None:
            mismatches.append(f"not read: {list(call)}")
        elif match.is_certain:
            left.remove(match)
    missed = [
        command
        for command in left
        if command.is_certain and ends and "/" not in command.words[0]  # by its path: no stub
    ]
    return mismatches + [f"not received: line {command.line}: {command.texts}" for command in missed]


def _expression(command: ScriptCommand) -> re.Pattern[str]:
    return re.compile("".join(map(_of_word, command.words)), re.DOTALL)


def _of_word(word: str) -> str:
    if (full_match := UNKNOWN.fullmatch(word)) and not re.fullmatch(r"\$[A-Za-z_]\w*", full_match[1]):
        return "(?:\0.*)?"  # none, one or several words
    parts: list[str] = []
    position = 0
    for match in UNKNOWN.finditer(word):
        is_name = re.fullmatch(r"\$[A-Za-z_]\w*", match[1])
        parts += [re.escape(word[position : match.start()]), re.escape(match[1]) if is_name else ".*"]
        position = match.end()
    return "\0" + "".join([*parts, re.escape(word[position:])])


def scripts_below(folder: Path) -> Mapping[str, str]:
    """The text of every shell script below a folder."""
    endings = (".sh", ".bash", ".slurm", ".sbatch")
    paths = sorted(path for path in folder.rglob("*") if path.suffix in endings and path.is_file())
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace") for path in paths}

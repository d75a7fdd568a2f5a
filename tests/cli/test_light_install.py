"""An installation without extras: every command that needs one says how to install it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from skyrl.installation import install_command

PROGRAM = """
import contextlib, io, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = {"torch", "ray", "numpy", "transformers", "tokenizers", "safetensors", "pyarrow", "jinja2", "jsonschema",
           "filelock", "fsspec", "matplotlib", "peft", "rich", "tenacity", "xxhash", "datasets", "vllm", "deepspeed"}
sys.meta_path.insert(0, Blocked())
from skyrl.cli.main import main

results = []
for command in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(command)
        except SystemExit as end:
            results.append([end.code, said.getvalue()])
print(json.dumps(results))
"""


def test_every_command_names_the_extra_that_it_needs_and_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "global_step_1").mkdir()
    folder = str(tmp_path)
    commands = [
        ["ckpt", "list", folder],
        ["ckpt", "verify", folder],
        ["ckpt", "show", folder],
        ["ckpt", "diff", f"{folder}/global_step_1", f"{folder}/global_step_1"],
        ["export", folder],
        ["replay", folder, "--step", "1"],
        ["bisect", folder, folder],
        ["run", "trainer.policy.model.path=a/b"],
        ["doctor", "trainer.policy.model.path=a/b"],
        ["data", "show", "trainer.policy.model.path=a/b", "trainer.logger=console", "trainer.device=cpu"],
        ["templates", "check", folder],
        ["simulate", folder],
    ]
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    result = subprocess.run(program, capture_output=True, text=True, check=True, timeout=240)
    for command, (code, output) in zip(commands, json.loads(result.stdout.splitlines()[-1]), strict=True):
        assert "Traceback" not in output, (command, output)
        assert code == 2, (command, code, output)
        assert install_command("train") in output, (command, output)

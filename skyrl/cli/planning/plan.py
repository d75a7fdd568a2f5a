"""`skyrl plan`: which process would compute on which GPU, and how much work it would do, without starting anything.

`skyrl.tools.run_plan` computes the plan, as data for `--json`; `plan_table.py` formats it for terminals; `plan_fit.py`
proposes layouts.
"""

from __future__ import annotations

from pathlib import Path

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, TRUST, compose_rl, reads_code
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_either
from skyrl.errors import UserError


@click.command(cls=FieldsCommand, epilog=examples("skyrl plan run.toml", "skyrl plan run.toml --fit 8 --to fit.toml"))
@ARGUMENTS
@TRUST
@json_option
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs per machine [default: 8, or more if needed].")
@click.option(
    "--svg",
    "drawn",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw nodes, GPUs and phases to this SVG file.",
)
@click.option(
    "--fit", "gpus", type=click.IntRange(min=1), metavar="GPUS", help="Propose layouts on this many GPUs instead."
)
@click.option(
    "--answer-tokens",
    type=click.FloatRange(min=1),
    help="With --fit: mean length of an answer, in tokens [default: half the maximum].",
)
@click.option(
    "--to",
    "file",
    type=click.Path(path_type=Path),
    help="With --fit: write the first proposal to a TOML file, to pass after the run's own.",
)
@reads_code("classes")
def plan(
    arguments: tuple[str, ...],
    as_json: bool,
    gpus_per_node: int | None,
    drawn: Path | None,
    gpus: int | None,
    answer_tokens: float | None,
    file: Path | None,
) -> None:
    """Print the work of each GPU, and the memory that it needs.

    Nothing is started.
    """
    if gpus is not None:
        if drawn is not None:
            raise UserError("--svg draws one plan, but --fit proposes several: write one with --to, then draw it")
        from skyrl.cli.planning.plan_fit import fit, rendered, write_layer

        proposed = fit(arguments, gpus, answer_tokens)
        if file is not None:
            write_layer(proposed["proposals"][0], file)
        print_either(proposed, rendered(proposed), as_json=as_json)
        if file is not None:
            click.echo(f"Wrote {file}: skyrl plan {' '.join(arguments)} {file}", err=True)
        return
    if answer_tokens is not None or file is not None:
        raise UserError(f"{'--to' if file else '--answer-tokens'} needs --fit GPUS")

    from skyrl.cli.planning.plan_table import memory_lines, table
    from skyrl.tools.run_plan import plan_of

    refusal = "its models are on placement.num_nodes x num_gpus_per_node; there is nothing to lay out"
    planned = plan_of(compose_rl(arguments, refusal), gpus_per_node)
    if drawn is not None:
        from skyrl.storage.atomic import write_file
        from skyrl.tools.plan_picture import picture

        try:
            write_file(drawn, picture(planned))
        except OSError as error:
            raise UserError(f"{drawn} cannot be written: {error.strerror}") from error
    print_either(planned, "\n".join([table(planned), *memory_lines(planned)]), as_json=as_json)

"""`skyrl plan`: which process would compute on which GPU, and how much work it would do, without starting anything.

`plan_of` computes the plan, as data for `--json`; `plan_table.py` and `plan_memory.py` format it for terminals;
`plan_fit.py` proposes layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, TRUST, compose_rl, reads_code
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result

if TYPE_CHECKING:
    from skyrl.cli.planning.plan_table import Plan
    from skyrl.config import SkyRLTrainConfig


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
    from skyrl.errors import UserError

    if gpus is not None:
        if drawn is not None:
            raise UserError("--svg draws one plan, but --fit proposes several: write one with --to, then draw it")
        _propose(arguments, gpus, answer_tokens, file, as_json=as_json)
        return
    if answer_tokens is not None or file is not None:
        raise UserError(f"{'--to' if file else '--answer-tokens'} needs --fit GPUS")

    from skyrl.cli.planning.plan_memory import memory_lines
    from skyrl.cli.planning.plan_table import table

    run = compose_rl(
        arguments, "it has one model, on placement.num_nodes x num_gpus_per_node; there is nothing to lay out"
    )
    planned = plan_of(run, gpus_per_node)
    if drawn is not None:
        from skyrl.cli.planning.plan_picture import picture
        from skyrl.storage.atomic import write_file

        try:
            write_file(drawn, picture(planned))
        except OSError as error:
            raise UserError(f"{drawn} cannot be written: {error.strerror}") from error
    if as_json:
        print_result(planned)
    else:
        click.echo("\n".join([table(planned), *memory_lines(planned)]))


def _propose(
    arguments: tuple[str, ...], gpus: int, answer_tokens: float | None, file: Path | None, *, as_json: bool
) -> None:
    from skyrl.cli.planning.plan_fit import fit, rendered, write_layer

    proposed = fit(arguments, gpus, answer_tokens)
    if file is not None:
        write_layer(proposed["proposals"][0], file)
    if as_json:
        print_result(proposed)
    else:
        click.echo(rendered(proposed))
    if file is not None:
        click.echo(f"Wrote {file}: skyrl plan {' '.join(arguments)} {file}", err=True)


def plan_of(run: SkyRLTrainConfig, gpus_per_node: int | None = None) -> Plan:
    """The plan of a resolved tree that has passed `check`, on the fewest machines of one size that hold it.

    A slot is a GPU, or a place for one process on a CPU. Raises `UserError` if a machine of `gpus_per_node` GPUs is too
    small.
    """
    from skyrl.cli.planning.plan_memory import memory_of
    from skyrl.config.derive.sizes import on_ray, sizes_of
    from skyrl.errors import UserError
    from skyrl.planning.layout import ClusterNode, NoRoom, assign, layout, on_machines

    sizes = sizes_of(run, gpus_per_node)
    laid = layout(sizes)
    on_cuda = run.trainer.device == "cuda"
    usual = sizes.gpus_per_node if on_cuda and on_ray(run) else 1
    machine = gpus_per_node or max(usual, *(pool.gpus_per_node for pool in laid.pools))
    try:
        machines = assign(
            laid, [ClusterNode(id=str(number), gpus=machine) for number in range(sum(p.nodes for p in laid.pools))]
        )
    except NoRoom as error:
        message = f"{error.pool.name} needs {error.pool.gpus_per_node} on one node, but --gpus-per-node is {machine}"
        raise UserError(message) from None
    places = on_machines(laid, machines)
    prompts, samples = run.trainer.train_batch_size, run.generator.n_samples_per_prompt
    placements = [
        {
            "role": placed.role,
            "rank": placed.rank,
            "pool": placed.pool,
            "places": [[int(node), gpu] for node, gpu in places[placed]],
        }
        for placed in laid.placements
    ]
    return {
        "executor": "ray" if on_ray(run) else "in_process",
        "device": run.trainer.device,
        "gpus": laid.gpus if on_cuda else 0,
        "slots": laid.gpus,
        "nodes": len({node for nodes in machines.values() for node in nodes}),
        "gpus_per_node": machine if on_cuda else 0,
        "slots_per_node": machine,
        "actors": len(placements) if on_ray(run) else 0,
        "batch": {"prompts": prompts, "samples_per_prompt": samples, "samples": prompts * samples},
        "pools": [
            {
                "name": pool.name,
                "nodes": [int(node) for node in machines[pool.name]],
                "gpus_per_node": pool.gpus_per_node,
                "share": laid.share(pool.name),
            }
            for pool in laid.pools
        ],
        "models": [_model(run, model) for model in sizes.models],
        "engines": _engines(run),
        "seats": placements,
        "memory": memory_of(run),
    }


def _engines(run: SkyRLTrainConfig) -> dict[str, int] | None:
    from skyrl.config.derive.sizes import engines_of

    engines = engines_of(run)
    names = ("number", "gpus", "tensor", "pipeline", "data")
    return None if engines is None else {name: getattr(engines, name) for name in names}


def _model(run: SkyRLTrainConfig, model: Any) -> dict[str, Any]:
    """The sizes of a model, and the work of one of its ranks in one training step."""
    import attrs

    from skyrl.config.derive.sizes import data_parallel_of, degrees_of, grid_of, work_of

    trainer, work, degrees = run.trainer, work_of(run, model), degrees_of(run, model)
    dimensions = ("pipeline", "context", "sequence", "tensor", "expert")
    tokens = trainer.max_tokens_per_microbatch if trainer.max_tokens_per_microbatch > 0 else None
    return {
        "role": model,
        "ranks": grid_of(run, model).ranks,
        "data_parallel": data_parallel_of(run, model),
        "model_parallel": degrees.replica,
        **{f"{name}_parallel": getattr(degrees, name) for name in dimensions},
        **attrs.asdict(work),
        "gradient_accumulation": work.micro_batches,
        "micro_batch_size": trainer.micro_train_batch_size_per_gpu if work.optimizer_steps else 0,
        "scoring_micro_batch_size": trainer.micro_forward_batch_size_per_gpu,
        **(_BY_TOKENS if tokens else {}),
        "tokens_per_micro_batch": tokens,
    }


_BY_TOKENS = dict.fromkeys(
    ("micro_batches", "gradient_accumulation", "scoring_micro_batches", "micro_batch_size", "scoring_micro_batch_size")
)
"""Null for passes that are bounded by tokens: their number depends on the answers."""

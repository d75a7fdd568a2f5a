"""`skyrl eval` and `skyrl generate`: sample from a model, a run or a checkpoint, without training."""

from __future__ import annotations

import json
from pathlib import Path

import click

from skyrl.cli.command_line.arguments import CHANGES, STEP, TARGET, TRUST, split_words, warn
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_either
from skyrl.processes.torch_environment import set_torch_environment

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("eval", cls=FieldsCommand, epilog=examples("skyrl eval runs/mine generator.eval_n_samples_per_prompt=4"))
@TARGET
@CHANGES
@STEP
@TRUST
@click.option("--to", type=_FOLDER, help="Folder for the results [default: RUN/evaluations/step_N].")
@json_option
def evaluate(target: str, arguments: tuple[str, ...], step: int | None, to: Path | None, as_json: bool) -> None:
    """Evaluate a model on data.val_data.

    The result is scores and pass@k, with their 95 % confidence intervals. MODEL is a folder in Hugging Face format or a
    hub name, RUN the folder of a run, CHECKPOINT one of its checkpoints. Without FILE, a run is evaluated with its own
    configuration. generator.eval_sampling_params and generator.eval_n_samples_per_prompt set the sampling; seeds equal
    those of the run's own evaluation after the same step. Intervals are Wilson's for shares and bootstrapped for
    rewards; both treat a prompt's samples as one cluster.

    Without FILE, a preference run is evaluated on the pairs of its eval_datasets, beside its reference.
    """
    set_torch_environment()
    from skyrl.tools.evaluating import evaluate as run
    from skyrl.tools.evaluating import evaluate_pairs, failures, pair_run_of, pair_table, table
    from skyrl.tools.sampling_alone import prepared
    from skyrl.tools.sampling_target import find_target

    model = find_target(target, step)
    files, overrides = split_words(arguments)
    if not files and pair_run_of(model) is not None:
        evaluation, file = evaluate_pairs(model, overrides, to)
        print_either(evaluation, "\n".join([*pair_table(evaluation), f"results in {file}"]), as_json=as_json)
        return
    with prepared(model, files, overrides, rewarded=True, to=to, warn=warn) as (sampling, folder):
        results = run(model, sampling)
    lines = [*table(results), *failures(results), f"results and samples in {folder}"]
    print_either(results, "\n".join(lines), as_json=as_json)


@click.command(cls=FieldsCommand, epilog=examples("skyrl generate runs/mine --prompts data/validation.jsonl"))
@TARGET
@CHANGES
@click.option("--prompts", multiple=True, help="Source of prompts, instead of data.val_data; may be repeated.")
@STEP
@TRUST
@click.option("--to", type=_FOLDER, help="Folder for the answers [default: RUN/generations/step_N].")
@click.option(
    "--top-logprobs",
    metavar="K",
    type=click.IntRange(min=1),
    help="Also write the model's K likeliest tokens at each place, which kind = sft distills from.",
)
def generate(
    target: str,
    arguments: tuple[str, ...],
    prompts: tuple[str, ...],
    step: int | None,
    to: Path | None,
    top_logprobs: int | None,
) -> None:
    """Write a model's answers to prompts as JSON lines.

    There is no environment and no reward. MODEL, RUN, CHECKPOINT and FILE mean the same as in `skyrl eval`; sampling
    settings and seeds are the same, too. --top-logprobs writes distributions.parquet beside the answers, at temperature
    1: see docs/distillation.md.
    """
    set_torch_environment()
    from skyrl.tools.sampling_alone import prepared
    from skyrl.tools.sampling_target import find_target

    model = find_target(target, step)
    files, overrides = split_words(arguments)
    if prompts:
        overrides.append(f"data.val_data={json.dumps(prompts)}")
    with prepared(model, files, overrides, rewarded=False, to=to, warn=warn) as (sampling, folder):
        from skyrl.tools.generating import ANSWERS, DISTRIBUTIONS
        from skyrl.tools.generating import generate as run

        count = run(model, sampling, top_logprobs=top_logprobs or 0)
    click.echo(f"{count} answers in {folder / ANSWERS}")
    if top_logprobs:
        click.echo(f"their distributions in {folder / DISTRIBUTIONS}: train_datasets of kind = sft")

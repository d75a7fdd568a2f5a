"""`skyrl simulate`: estimates the throughput of a configuration and the age of its samples before GPUs are reserved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, TRUST, compose_rl
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.errors import UserError

if TYPE_CHECKING:
    from skyrl.config import SkyRLTrainConfig
    from skyrl.tools.simulation import Outcome, World


class _Duration(click.ParamType[Any]):
    """Option type `MEAN`, `MEAN,P90` or `MEAN,P90,LONGEST`, in seconds; LONGEST defaults to three times the larger."""

    name = "MEAN[,P90[,LONGEST]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from skyrl.tools.simulation import Seconds

        try:
            numbers = [float(part) for part in value.split(",")]
            mean = numbers[0]
            p90, *more = numbers[1:] or [mean]
            (longest,) = more or [3 * max(mean, p90)]
        except ValueError:
            form = "write the mean, 90th percentile and maximum in seconds, as in 20,45,90"
            self.fail(f"{value!r} is not a duration: {form}", param, ctx)
        if not all(0 <= number < float("inf") for number in numbers):
            self.fail(f"{value!r}: seconds must be zero or positive", param, ctx)
        if longest < max(mean, p90):
            self.fail(f"{value!r}: the longest, {longest:g}, is below the mean or its 90th percentile", param, ctx)
        return Seconds(mean=mean, p90=p90, longest=longest)


@click.command(cls=FieldsCommand, epilog=examples("skyrl simulate run.toml --like runs/mine"))
@ARGUMENTS
@TRUST
@click.option("--like", type=click.Path(path_type=Path), help="Take durations from this run's metrics.jsonl.")
@click.option("--answer-seconds", type=_Duration(), help="Time that an engine takes for an answer, all turns together.")
@click.option("--env-seconds", type=_Duration(), help="Time that an answer's environment takes once it runs.")
@click.option("--train-seconds", type=click.FloatRange(min=0), help="Time from a full batch to new weights.")
@click.option("--sync-seconds", type=click.FloatRange(min=0), help="Time until new weights reach the engines.")
@click.option(
    "--shared",
    type=click.FloatRange(min=0, max=1, max_open=True),
    help="Share of its speed that each side loses while engines sample and learners train at the same time: 0 on "
    "separate devices, 0.5 if they share all cores or GPUs evenly [default: 0].",
)
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Number of training steps.")
@click.option("--split", is_flag=True, help="Also simulate other splits of the GPUs between engines and learners.")
@click.option(
    "--failures-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    help="Failures that stop the run [default: the rate of Llama 3's training, scaled to the number of GPUs].",
)
@click.option(
    "--restart-seconds",
    type=click.FloatRange(min=0),
    help="Time from a failure until the run trains again; adds failures to the simulation.",
)
@click.option("--checkpoint-seconds", type=click.FloatRange(min=0), help="Time that training waits for a checkpoint.")
@json_option
def simulate(
    arguments: tuple[str, ...],
    steps: int,
    split: bool,
    failures_per_hour: float | None,
    restart_seconds: float | None,
    checkpoint_seconds: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate the scheduler in virtual time; nothing is computed.

    It estimates throughput, idle time and the age of samples.
    """
    from skyrl.tools.simulation import simulate as run
    from skyrl.tools.simulation import splits, summary

    config = compose_rl(arguments, "nothing is sampled, so there is no scheduler to simulate")
    world = world_of(config, steps, **options)
    outcome = run(world, steps)
    others: list[tuple[int, Outcome]] = []
    if split:
        engines, learners = _gpus(config)
        worlds = splits(world, engines, learners, max(1, (engines + learners) // 16))
        others = [(share, run(other, max(5, steps // 5))) for share, other in worlds]
    failing = _failing(config, outcome, failures_per_hour, restart_seconds, checkpoint_seconds)
    if as_json:
        dealt = [{"engine_gpus": share, **summary(item)} for share, item in others]
        more = ({"splits": dealt} if split else {}) | ({"failures": failing} if failing else {})
        print_result(summary(outcome) | more)
        return
    ages = ", ".join(f"{age}: {count}" for age, count in outcome.groups_by_age.items())
    click.echo(
        f"{outcome.steps} steps in {outcome.seconds:,.1f} s ({outcome.seconds / outcome.steps:.2f} s each)\n"
        f"{outcome.trajectories_per_second:,.2f} trajectories/s\n"
        f"idle: engines {outcome.engines_idle:.0%}, learners {outcome.learners_idle:.0%}\n"
        f"groups by age in versions: {ages}"
    )
    if failing:
        click.echo(f"one failure every {failing['hours_between_failures']:,.1f} h on {failing['gpus']:,} GPUs:")
        for interval, part in failing["share_trained"].items():
            name = "best: " if interval == str(failing["best_ckpt_interval"]) else ""
            rate = failing["trajectories_per_second"][interval]
            click.echo(f"  {name}ckpt_interval = {interval}: {part:.1%} of the time, {rate:,.2f} trajectories/s")
    for share, entry in sorted(others, key=lambda pair: -pair[1].trajectories_per_second)[:5]:
        click.echo(
            f"  {share:>5} GPUs for engines: {entry.trajectories_per_second:.2f} trajectories/s, engines idle "
            f"{entry.engines_idle:.0%}, learners {entry.learners_idle:.0%}"
        )


def world_of(config: SkyRLTrainConfig, steps: int, *, like: Path | None = None, **options: Any) -> World:
    """The world to simulate: the configuration with the given durations, or with those measured in the run `like`.
    Raises `UserError` if a duration is missing.
    """
    from skyrl.config.derive.sizes import engines_of
    from skyrl.experiments.factories import in_flight_policy, stream_limits
    from skyrl.tools.simulation import Seconds, World, measured
    from skyrl.tracking.jsonlines import JsonLines

    durations: dict[str, Any] = {"environment": Seconds(mean=0.0, p90=0.0, longest=0.0), "sync_seconds": 0.0}
    if like is not None:
        file = like / "metrics.jsonl"
        measurements = measured(JsonLines(file).read())
        if not measurements:
            raise UserError(f"--like {like}: {file} has fewer than two training steps to measure")
        durations |= measurements
    names = {"answer_seconds": "answer", "env_seconds": "environment"}
    durations |= {names.get(name, name): value for name, value in options.items() if value is not None}
    for name, option in (("answer", "--answer-seconds"), ("train_seconds", "--train-seconds")):
        if name not in durations:
            raise UserError(f"{option} is missing: pass it, or --like with a run to take the durations from")
    engines = engines_of(config)
    number = 1 if engines is None else engines.number
    asynchronous = config.trainer.fully_async
    limits = stream_limits(config, steps)
    if not asynchronous.enabled:  # synchronous training is the same as staleness 0
        from attrs import evolve

        limits = evolve(limits, staleness=0, queue=limits.batch, concurrency=limits.batch)
    return World(
        limits=limits,
        samples_per_prompt=config.generator.n_samples_per_prompt,
        slots=number * config.generator.inference_engine.max_num_seqs,
        environment_workers=config.environment.skyrl_gym.max_env_workers,
        interrupt=in_flight_policy(config) != "finish",
        seed=config.trainer.seed,
        **durations,
    )


def _failing(
    config: SkyRLTrainConfig, outcome: Outcome, per_hour: float | None, restart: float | None, checkpoint: float | None
) -> dict[str, Any] | None:
    """Throughput with failures, and the best checkpoint interval; None if not requested. Raises `UserError` if only one
    of the durations is given.
    """
    from skyrl.config.derive.sizes import sizes_of
    from skyrl.planning.failures import GPU_HOURS_BETWEEN_FAILURES, Interruptions
    from skyrl.planning.layout import layout

    if restart is None or checkpoint is None:
        if (per_hour, restart, checkpoint) == (None, None, None):
            return None
        raise UserError("simulating failures needs both --restart-seconds and --checkpoint-seconds")
    gpus = layout(sizes_of(config)).gpus
    between = 3600 / per_hour if per_hour else 3600 * GPU_HOURS_BETWEEN_FAILURES / gpus
    failures = Interruptions(between=between, restart=restart, checkpoint=checkpoint)
    step = outcome.seconds / outcome.steps
    best, now = failures.best_interval(step), config.trainer.ckpt_interval
    shares = {best: failures.share_trained(best * step)}
    if isinstance(now, int) and now > 0:
        shares[now] = failures.share_trained(now * step)
    return {
        "gpus": gpus,
        "hours_between_failures": between / 3600,
        "best_ckpt_interval": best,
        "share_trained": {str(interval): share for interval, share in shares.items()},
        "trajectories_per_second": {
            str(interval): share * outcome.trajectories_per_second for interval, share in shares.items()
        },
    }


def _gpus(config: SkyRLTrainConfig) -> tuple[int, int]:
    """GPUs of engines and of learners in the configured placement."""
    from skyrl.config.derive.sizes import engines_of, grid_of

    engines = engines_of(config)
    if engines is None or config.trainer.placement.colocate_all:
        raise UserError("--split needs engines on GPUs of their own: trainer.placement.colocate_all = false")
    return engines.gpus, grid_of(config, "policy").ranks

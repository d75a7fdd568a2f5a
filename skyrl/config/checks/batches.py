"""Checks of batch sizes: every rank of a model gets the same amount of work, or the run does not start.

The arithmetic is in `skyrl.planning.batches`; the functions here turn its verdicts into problems.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.derive.rl_models import RL_ROLES, has_critic
from skyrl.config.derive.sizes import Model, data_parallel_of, degrees_of, grid_of, models_of, trained_models
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import reads
from skyrl.errors import Problem
from skyrl.planning.batches import (
    Uneven,
    divisors,
    nearest,
    nearest_divisors,
    uneven_batch,
    uneven_micro_batch,
    uneven_mini_batch,
    uneven_ranks,
    uneven_scoring,
)


def mini_batch_units_agree(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A mini-batch size in samples, if written, equals the one derived from prompts."""
    for role in (name for name, role in RL_ROLES.items() if role.learns):
        prompts = getattr(run.trainer, f"{role}_mini_batch_size")
        samples = getattr(run.trainer, f"{role}_mini_batch_size_in_samples")
        derived = prompts * run.generator.n_samples_per_prompt
        if samples is not None and samples != derived:
            yield Problem(
                path=f"trainer.{role}_mini_batch_size_in_samples",
                message=f"{samples} is not {prompts} prompts x {run.generator.n_samples_per_prompt} = {derived}",
                hint="leave it out: it is derived",
            )


def synthetic_samples_stand_alone(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Synthetic samples replace sampled or recorded ones, and come without experts chosen by an engine."""
    trainer = run.trainer
    if not trainer.num_dummy_steps:
        return
    if trainer.rollouts_from is not None:
        message = "synthetic samples replace the recorded ones of trainer.rollouts_from"
        yield Problem(path="trainer.num_dummy_steps", message=message, hint="leave one of them out")
    for model in ("policy", "ref"):
        if getattr(trainer, model).moe_enable_routing_replay:
            name = f"trainer.{model}.moe_enable_routing_replay"
            message = f"synthetic samples have no recorded experts, which {name} needs"
            hint = f"set {name} = false for these steps, which take as much memory"
            yield Problem(path="trainer.num_dummy_steps", message=message, hint=hint)


def ranks_form_whole_groups(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Ranks that compute on the same rows, because they share sequences or layers, form groups of equal size."""
    for model in models_of(run):
        verdict = uneven_ranks(grid_of(run, model).ranks, degrees_of(run, model).replica)
        if verdict and reads(run.trainer, "megatron_config"):
            yield Problem(
                path=f"trainer.{model}.megatron_config",
                message=f"tensor x pipeline x context = {verdict.divisor} does not divide the "
                f"{RL_ROLES[model].title}'s {verdict.total} ranks",
                hint=f"nearest numbers of ranks that it divides: {_join_sizes(verdict.nearest)}",
            )
        elif verdict:
            yield _ranks_left_over(run, model, verdict)


def _ranks_left_over(run: SkyRLTrainConfig, model: Model, verdict: Uneven) -> Problem:
    """The problem of a size that does not divide the ranks, or of sizes whose product does not."""
    degrees = degrees_of(run, model)
    sizes = {name: getattr(degrees, name) for name in ("sequence", "context", "tensor")}
    above_one = {name: size for name, size in sizes.items() if size > 1}
    name, size = next(
        ((name, size) for name, size in above_one.items() if verdict.total % size), next(iter(above_one.items()))
    )
    others = verdict.divisor // size
    fitting = divisors(verdict.total if verdict.total % others else verdict.total // others)
    product = f"{' x '.join(above_one)} = {' x '.join(map(str, above_one.values()))} = " if others > 1 else ""
    return Problem(
        path=f"trainer.{model}.{name}_parallel_size",
        message=f"{product}{verdict.divisor} does not divide the {RL_ROLES[model].title}'s {verdict.total} ranks",
        hint=nearest_divisors(nearest(size, fitting)),
    )


def mini_batch_divides_batch(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Every optimizer step sees the same number of prompts."""
    yield from _mini_batches_divide_the_batch(run, "policy")


def critic_mini_batch_divides_batch(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Every optimizer step of the critic sees the same number of prompts."""
    if has_critic(run):
        yield from _mini_batches_divide_the_batch(run, "critic")


def mini_batch_divides_over_ranks(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Every data-parallel rank of a model that learns gets the same number of samples in every optimizer step."""
    for model in trained_models(run):
        batch, mini, ranks = run.trainer.train_batch_size, _mini_batch(run, model), data_parallel_of(run, model)
        samples = run.generator.n_samples_per_prompt
        if ranks is None or batch % mini:
            continue  # reported by another check
        if verdict := uneven_mini_batch(batch, mini, samples, ranks):
            others = nearest(ranks, divisors(verdict.total))
            yield Problem(
                path=f"trainer.{model}_mini_batch_size",
                message=f"{verdict.total} samples ({mini} prompts x {samples}) cannot be split evenly across the "
                f"{RL_ROLES[model].title}'s {ranks} data-parallel ranks",
                hint=f"nearest sizes that can: {_join_sizes(verdict.nearest)}"
                if verdict.nearest
                else f"no size that divides trainer.train_batch_size = {batch} can; nearest numbers of ranks that "
                f"can share it evenly: {_join_sizes(others)}",
            )


def micro_batch_divides_mini_batch(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Every micro-batch of a rank has the same number of samples, where they are counted in samples."""
    if run.trainer.max_tokens_per_microbatch != -1:
        return
    micro, samples = run.trainer.micro_train_batch_size_per_gpu, run.generator.n_samples_per_prompt
    rows = {model: _rows_of_a_rank(run, model) for model in trained_models(run)}
    for model, count in rows.items():
        if count is None:
            continue  # reported by another check
        if uneven := uneven_micro_batch(count, micro, also=filter(None, rows.values())):
            mini, ranks = _mini_batch(run, model), data_parallel_of(run, model)
            among = f" / {ranks} ranks" if ranks != 1 else ""
            yield Problem(
                path="trainer.micro_train_batch_size_per_gpu",
                message=f"{micro} samples do not divide the {RL_ROLES[model].title}'s mini-batch of {count}"
                f"{' on each rank' if among else ''} ({mini} prompts x {samples}{among})",
                hint=nearest_divisors(uneven.nearest),
            )
            return  # one field, one problem: the sizes in its remedy suit every model


def scoring_shares_are_equal(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Every data-parallel rank of a reference or a teacher gets the same number of the batch's samples.

    Models that learn need no such check: if every mini-batch divides evenly among the ranks, so does the batch.
    """
    batch, samples = run.trainer.train_batch_size, run.generator.n_samples_per_prompt
    for model in (model for model in models_of(run) if not RL_ROLES[model].learns):
        ranks = data_parallel_of(run, model)
        if ranks is None:
            continue  # reported by another check
        if verdict := uneven_scoring(batch, samples, ranks, mini=run.trainer.policy_mini_batch_size):
            yield Problem(
                path="trainer.train_batch_size",
                message=f"{verdict.total} samples ({batch} prompts x {samples}) cannot be split evenly across the "
                f"{RL_ROLES[model].title}'s {ranks} data-parallel ranks",
                hint="nearest sizes that can, and that trainer.policy_mini_batch_size divides: "
                f"{_join_sizes(verdict.nearest)}",
            )


def _mini_batches_divide_the_batch(run: SkyRLTrainConfig, model: Model) -> Iterator[Problem]:
    batch, mini = run.trainer.train_batch_size, _mini_batch(run, model)
    samples, ranks = run.generator.n_samples_per_prompt, data_parallel_of(run, model) or 1
    if verdict := uneven_batch(batch, mini, samples, ranks):
        yield Problem(
            path=f"trainer.{model}_mini_batch_size",
            message=f"{mini} prompts do not divide trainer.train_batch_size = {batch}",
            hint=nearest_divisors(verdict.nearest),
        )


def _mini_batch(run: SkyRLTrainConfig, model: Model) -> int:
    return int(getattr(run.trainer, f"{model}_mini_batch_size"))


def _rows_of_a_rank(run: SkyRLTrainConfig, model: Model) -> int | None:
    """Samples of one rank in one optimizer step, or None if they cannot be divided evenly."""
    rows, ranks = _mini_batch(run, model) * run.generator.n_samples_per_prompt, data_parallel_of(run, model)
    return None if ranks is None or rows % ranks else rows // ranks


def _join_sizes(sizes: tuple[int, ...]) -> str:
    return " and ".join(str(size) for size in sizes)

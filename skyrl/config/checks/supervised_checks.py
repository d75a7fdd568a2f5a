"""Checks of resolved supervised runs.

Whether parallel sizes divide the heads of the model is checked in `skyrl.experiments.model_checks`, which reads its
files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from skyrl.config.checks.every_kind import named_template_exists, processes_fit_cluster
from skyrl.config.derive.every_kind import evaluates
from skyrl.config.derive.model_tables import grids_of
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.settings.samplers import READS_REWARDS, READS_ROWS
from skyrl.config.settings.supervised_root import RewardModelConfig, SupervisedConfig
from skyrl.errors import Problem
from skyrl.planning.batches import divisors
from skyrl.planning.topology import Sizes


def training_has_rows(run: SupervisedConfig) -> Iterator[Problem]:
    """Training has at least one source, unless rows are synthetic."""
    if not run.train_datasets and not run.num_dummy_steps:
        yield Problem(path="train_datasets", message="the list is empty", hint="give at least one file of rows")


def evaluation_has_rows(run: SupervisedConfig) -> Iterator[Problem]:
    """If evaluation is on, it has sources."""
    if evaluates(run) and not run.eval_datasets:
        hint = "give a file, or set eval_before_train = false and eval_interval = 0"
        yield Problem(path="eval_datasets", message="evaluation is on but the list is empty", hint=hint)


def sources_have_weights(run: SupervisedConfig) -> Iterator[Problem]:
    """Each source has a weight."""
    weights = run.train_dataset_weights
    if weights is not None and len(weights) != len(run.train_datasets):
        message = f"{len(weights)} weights for {len(run.train_datasets)} train_datasets"
        yield Problem(path="train_dataset_weights", message=message, hint="give each source one, or leave them out")


def weighted_sources_are_shuffled(run: SupervisedConfig) -> Iterator[Problem]:
    """Rows drawn by weight have no order of their own, so they must be shuffled."""
    if run.train_dataset_weights is not None and run.sampler == "sequential":
        message = "sequential keeps the order of the rows, but train_dataset_weights draws them at random"
        yield Problem(path="sampler", message=message, hint="set it to random, or leave the weights out")


def streaming_has_an_end(run: SupervisedConfig) -> Iterator[Problem]:
    """Streamed rows are not counted, so that the run needs another end, and cannot be drawn out of turn."""
    if not run.streaming:
        return
    if run.num_steps is None and run.max_training_samples is None:
        message = "the number of streamed rows is not known in advance, so num_epochs ends no run"
        yield Problem(path="num_steps", message=message, hint="set it, or max_training_samples")
    loaded = "or set streaming to false"
    if run.train_dataset_weights is not None:
        message = "streamed sources are read one after the other, mixed by the shuffle buffer alone"
        yield Problem(path="train_dataset_weights", message=message, hint=f"leave the weights out, {loaded}")
    if run.curriculum.sampler != "permutation":
        message = "streamed rows come in the order in which they are read"
        yield Problem(path="curriculum.sampler", message=message, hint=f"leave it out, {loaded}")


def curriculum_can_draw(run: SupervisedConfig) -> Iterator[Problem]:
    """The sampler is known, needs no rewards, and can draw at every step."""
    following = [name for name in run.curriculum.names if name in READS_REWARDS]
    if following:
        message = f"{following[0]} depends on rewards, which rows of a supervised run do not have"
        yield Problem(path="curriculum.sampler", message=message, hint=f"choose one of {', '.join(READS_ROWS)}")
        return
    yield from run.curriculum.mixture_problems("curriculum", len(run.train_datasets))
    yield from run.curriculum.problems_at("curriculum")


def evaluation_names_are_distinct(run: SupervisedConfig) -> Iterator[Problem]:
    """Two evaluation sets with the same name would overwrite each other's metrics."""
    eval_names = run.eval_dataset_names
    if eval_names is not None and len(eval_names) != len(run.eval_datasets):
        message = f"{len(eval_names)} names for {len(run.eval_datasets)} eval_datasets"
        yield Problem(path="eval_dataset_names", message=message, hint="give each set one, or leave them out")
        return
    names = evaluation_names(run)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        path = "eval_datasets" if eval_names is None else "eval_dataset_names"
        hint = "name them in eval_dataset_names"
        yield Problem(path=path, message=f"several sets are called {', '.join(twice)} in metrics", hint=hint)


def batch_divides_over_ranks(run: SupervisedConfig) -> Iterator[Problem]:
    """Every rank, or group of ranks that share rows, gets the same number of rows of each batch."""
    ranks, together = MODEL.ranks(run), MODEL.degrees(run).replica
    replicas = max(ranks // together, 1)
    if run.batch_size % replicas:
        below, above = run.batch_size // replicas * replicas, -(-run.batch_size // replicas) * replicas
        nearest = " and ".join(str(size) for size in (below, above) if size)
        groups = "ranks" if together == 1 else f"groups of {together} ranks"
        message = f"{run.batch_size} cannot be split evenly across {replicas} {groups}"
        yield Problem(path="batch_size", message=message, hint=f"nearest sizes that can: {nearest}")


def several_ranks_need_ray(run: SupervisedConfig) -> Iterator[Problem]:
    """Several ranks need several processes, and therefore Ray."""
    ranks = MODEL.ranks(run)
    if run.placement.executor == "in_process" and ranks > 1:
        message = f"in_process has room for one rank, and this run has {ranks}"
        yield Problem(path="placement.executor", message=message, hint="set it to ray, or leave it out")


def run_fits_cluster(run: SupervisedConfig) -> Iterator[Problem]:
    """A run has no more processes than the largest clusters have GPUs."""
    yield from processes_fit_cluster(Sizes(models=grids_of(run, [MODEL])), "placement")


def supervised_excludes_rollback(run: SupervisedConfig) -> Iterator[Problem]:
    """A step repeated on the same rows would fail again, so rolling back does not help."""
    if run.faults.on_non_finite == "roll_back":
        message = "roll_back would train on the same rows from the same weights again"
        yield Problem(path="faults.on_non_finite", message=message, hint="set it to abort or skip")


def pairs_are_not_truncated(run: SupervisedConfig) -> Iterator[Problem]:
    """The score of a chat is read at its end, which truncation would remove."""
    if isinstance(run, RewardModelConfig) and run.too_long == "truncate":
        message = "truncate would cut off the token that the score is read at"
        yield Problem(path="too_long", message=message, hint="set it to skip, which counts the pairs that are left out")


def chat_template_is_built_in(run: SupervisedConfig) -> Iterator[Problem]:
    """Other templates come from files."""
    yield from named_template_exists(run.chat_template, "chat_template")


def fewer_ranks_change_dropout(run: SupervisedConfig) -> Iterator[Problem]:
    """Dropout depends on the ranks, so a run that continues on fewer of them computes different numbers."""
    if run.faults.on_lost_rank == "shrink" and not run.resume_with_changes:
        message = "shrink continues with fewer ranks, on which the numbers of a supervised run may depend"
        yield Problem(path="faults.on_lost_rank", message=message, hint="set resume_with_changes = true, or wait")


def ranks_form_whole_groups(run: SupervisedConfig) -> Iterator[Problem]:
    """Every row is computed by the same number of ranks."""
    ranks, degrees, fields = MODEL.ranks(run), MODEL.degrees(run), MODEL.facts(run).degrees
    if ranks % degrees.replica:
        sizes = {name: getattr(degrees, name) for name in ("sequence", "context", "tensor", "pipeline")}
        written = {MODEL.at(fields[name]): size for name, size in sizes.items() if size > 1}
        listed = ", ".join(f"{path} = {size}" for path, size in written.items())
        yield Problem(
            path=next(iter(written)),
            message=f"{ranks} ranks cannot be divided into groups of {degrees.replica} ({listed})",
            hint=f"sizes whose product is one of {', '.join(map(str, divisors(ranks)))}",
        )


def evaluation_names(run: SupervisedConfig) -> tuple[str, ...]:
    """Name of each evaluation set in metrics."""
    if run.eval_dataset_names is not None:
        return run.eval_dataset_names
    return tuple(Path(source).stem if Path(source).suffix else source for source in run.eval_datasets)

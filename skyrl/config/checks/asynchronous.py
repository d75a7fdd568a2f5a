"""Checks of asynchronous training: batches can be filled, and stale samples are corrected."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks import warning
from skyrl.config.derive.algorithm_facts import loss_facts
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.settings.fully_async import FullyAsyncConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem

_ASYNC = "trainer.fully_async"


def _keeps_keys_and_values(settings: FullyAsyncConfig) -> bool:
    """Whether samples continue under new weights from keys and values that old weights computed."""
    return settings.enabled and settings.interrupt_generation and not settings.clear_kv_cache_on_weight_sync


def is_corrected(run: SkyRLTrainConfig) -> bool:
    """Whether the loss, or a correction of it, uses the probabilities that the samples were drawn with, or does not
    depend on them.
    """
    algorithm = run.trainer.algorithm
    correction = algorithm.off_policy_correction
    return (
        algorithm.old_logprobs == "engine"
        or loss_facts(algorithm).learns_from_pairs
        or loss_facts(algorithm).reads_rollout_logprobs is not False
        or correction.tis_ratio_type is not None
        or correction.sequence_mask_metric is not None
    )


def queue_holds_one_batch(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A batch waits in the queue until it is complete, so the queue must hold at least one batch."""
    settings, batch = run.trainer.fully_async, run.trainer.train_batch_size
    if settings.enabled and settings.queue_size is not None and settings.queue_size < batch:
        yield Problem(
            path=f"{_ASYNC}.queue_size",
            message=f"{settings.queue_size} groups cannot fill a batch of trainer.train_batch_size = {batch}",
            hint=f"set it to at least {batch}, or leave it out",
        )


def sync_interval_within_staleness_bound(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each step between two syncs makes samples one version older, and `max_staleness_steps` bounds their age."""
    settings = run.trainer.fully_async
    if settings.enabled and settings.steps_per_sync > settings.max_staleness_steps + 1:
        yield Problem(
            path=f"{_ASYNC}.steps_per_sync",
            message=f"new weights every {settings.steps_per_sync} steps leave samples {settings.steps_per_sync - 1} "
            f"versions old, more than {_ASYNC}.max_staleness_steps = {settings.max_staleness_steps}",
            hint=f"set it to at most {settings.max_staleness_steps + 1}",
        )


def asynchronous_excludes_batched_sampling(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`batched` samples a whole batch at once; asynchronous training samples a stream of groups."""
    if run.trainer.fully_async.enabled and run.generator.batched:
        yield Problem(
            path="generator.batched",
            message=f"{_ASYNC}.enabled samples groups one by one",
            hint="set generator.batched = false",
        )


def kept_cache_excludes_prefix_caching(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A prefix cache would give new samples what the old weights computed."""
    settings, engine = run.trainer.fully_async, run.generator.inference_engine
    if (
        _keeps_keys_and_values(settings)
        and backend_of(engine).keeps_prefixes_across_updates
        and engine.enable_prefix_caching
    ):
        yield Problem(
            path=f"{_ASYNC}.clear_kv_cache_on_weight_sync",
            message=f"the prefix cache of {engine.backend} would give new samples keys and values of old weights",
            hint="set generator.inference_engine.enable_prefix_caching = false, or this to true",
        )


def kept_cache_needs_awake_engine(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """vLLM gives up its cache whenever learners need the GPU, so samples cannot continue from it afterwards."""
    settings, shares = run.trainer.fully_async, run.trainer.placement.colocate_all
    engine = run.generator.inference_engine
    if _keeps_keys_and_values(settings) and shares and backend_of(engine).sleeps:
        yield Problem(
            path=f"{_ASYNC}.clear_kv_cache_on_weight_sync",
            message=f"with trainer.placement.colocate_all, {engine.backend} drops its keys and values whenever "
            "learners run",
            hint="set this to true, or trainer.placement.colocate_all = false",
        )


def stale_samples_are_corrected(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Off-policy training without a correction degrades (AReaL, arXiv:2505.24298, table 2)."""
    settings = run.trainer.fully_async
    if settings.enabled and settings.max_staleness_steps > 0 and not is_corrected(run):
        yield warning(
            path="trainer.algorithm.policy_loss_type",
            message=f"samples are up to {settings.max_staleness_steps} versions old "
            f"({_ASYNC}.max_staleness_steps), and nothing in the loss corrects for it",
            hint='set it to "decoupled", or trainer.algorithm.off_policy_correction.tis_ratio_type = "token"',
        )


def interpolation_needs_stale_samples(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Interpolation needs samples that are at least two versions old; for newer ones it equals the engine's values."""
    settings = run.trainer.fully_async
    staleness = settings.max_staleness_steps if settings.enabled else 0
    if run.trainer.algorithm.old_logprobs == "interpolated" and staleness < 2:
        yield warning(
            path="trainer.algorithm.old_logprobs",
            message=f"interpolated is the same as engine here: no sample is more than {staleness} versions old",
            hint=f"set it to learner, or {_ASYNC}.enabled = true and max_staleness_steps to 2 or more",
        )


def stream_has_no_last_batch(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A stream forms batches from groups in the order in which they are ready, across epochs, so no epoch has a last
    batch.
    """
    if run.trainer.fully_async.enabled and run.data.epoch_tail == "short":
        yield Problem(
            path="data.epoch_tail",
            message=f"{_ASYNC}.enabled draws prompts one by one, so no epoch has a last batch",
            hint='set it to "carry", which leaves out no prompts either, or to "drop"',
        )

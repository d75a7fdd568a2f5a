"""Builds a policy's prompts and rollouts from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SkyRLTrainConfig
from skyrl.data.cursor import PromptCursor, batches, permutation
from skyrl.data.order import InOrder, Mixed, Shuffled
from skyrl.data.prompts import PromptDataset, load_prompts
from skyrl.data.sources import Columns
from skyrl.experiments.asked_rows import what_rows_lack
from skyrl.experiments.collaborators import stream_limits
from skyrl.experiments.samplers import SampledRows, sampler_of
from skyrl.rollout.batches import Rollouts, SynchronousRollouts
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.stream import StreamingRollouts
from skyrl.trajectory import Prompt
from skyrl.tree.imports import import_object


def read_prompts(
    run: SkyRLTrainConfig, sources: Sequence[str], tokenizer: ChatTokenizer, *, env_class: str | None = None
) -> PromptDataset:
    """The prompts of these sources, tokenized. Raises `DataError`. `env_class` is the task of rows that name none, by
    default that of the run.
    """
    return load_prompts(
        sources,
        tokenizer,
        env_class=env_class or run.environment.task,
        max_prompt_length=run.trainer.max_prompt_length,
        chat_template_kwargs=run.generator.chat_template_kwargs,
        columns=Columns(prompt=run.data.prompt_column, answer=run.data.answer_column),
        skip_bad_rows=run.data.bad_rows == "skip",
        refuses=what_rows_lack(run),
        rendered=not run.environment.agent.plays,
    )


def steps_that_prompts_fill(run: SkyRLTrainConfig, prompts: int) -> int:
    """Number of batches in all epochs, at most `max_training_steps` and what `max_training_prompts` fills. `prompts` is
    the number of prompts in an epoch.
    """
    trainer = run.trainer
    steps, _ = batches(prompts, trainer.train_batch_size, trainer.epochs, run.data.epoch_tail)
    limits = [trainer.max_training_steps]
    if trainer.max_training_prompts is not None:
        limits.append(trainer.max_training_prompts // trainer.train_batch_size)
    return min([steps, *(limit for limit in limits if limit is not None)])


def sampled_rollouts(
    run: SkyRLTrainConfig,
    dataset: PromptDataset,
    generator: SkyRLGymGenerator,
    *,
    total_steps: int,
    waits: Callable[[], Sequence[str]],
) -> Rollouts:
    """Batches sampled by `generator`: when the trainer asks for them, or ahead of it if the run is asynchronous.

    `waits` names what the process is waiting for, which a stalled stream reports.
    """
    trainer, cursor = run.trainer, prompt_cursor(run, dataset)
    settings, algorithm, seed = run.generator, trainer.algorithm, trainer.seed
    if not trainer.fully_async.enabled:
        return SynchronousRollouts(cursor, generator, settings, algorithm, seed=seed)
    accept = trainer.fully_async.accept
    return StreamingRollouts(
        cursor,
        dataset.prompts,
        generator,
        settings,
        algorithm,
        stream_limits(run, total_steps),
        accept=None if accept is None else import_object(accept),
        mask_older_tokens=trainer.fully_async.mask_older_tokens,
        seed=seed,
        waits=waits,
    )


def prompt_cursor(run: SkyRLTrainConfig, dataset: PromptDataset) -> PromptCursor[Prompt]:
    """The prompts of the run in the order in which they are drawn. Raises `UserError`."""
    data, trainer, count = run.data, run.trainer, len(dataset.prompts)
    shares = data.train_weights if data.train_weights and len(data.train_weights) > 1 else None
    in_order = Shuffled(count, trainer.seed) if data.shuffle else InOrder(count)
    order = in_order if shares is None else Mixed(dataset.sizes, shares, trainer.seed)
    size = trainer.train_batch_size
    drawn = SampledRows(rows=dataset.prompts, sizes=dataset.sizes, batch=size, seed=trainer.seed)
    return PromptCursor(
        dataset.prompts,
        size,
        trainer.seed,
        order=order,
        tail=data.epoch_tail,
        fingerprint=dataset.fingerprint,
        sampler=sampler_of(data.curriculum, drawn, permutation(order, size, data.epoch_tail)),
        lag=trainer.fully_async.max_staleness_steps if trainer.fully_async.enabled else 0,
    )

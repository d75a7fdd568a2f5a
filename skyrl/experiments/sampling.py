"""Builds a policy's prompts and rollouts from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import asdict, evolve

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SkyRLTrainConfig
from skyrl.data.cursor import PromptCursor, StreamCursor, batches, permutation
from skyrl.data.order import Mixed, Sequential, Shuffled
from skyrl.data.prompt_facts import facts_of
from skyrl.data.prompts import PromptDataset, StreamedPrompts, load_prompts
from skyrl.data.row_store import row_key
from skyrl.data.row_streams import EXAMINED, RowStream, parts_of, versions
from skyrl.data.sources import Columns
from skyrl.data.stored_prompts import PromptStore
from skyrl.errors import DataError
from skyrl.experiments.factories import stream_limits
from skyrl.experiments.samplers import SampledRows, sampler_of
from skyrl.experiments.unrewardable_rows import asked_of_tasks, unrewardable_reason
from skyrl.rollout.batches import Rollouts, SynchronousRollouts
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.stream import StreamingRollouts
from skyrl.trajectory import Prompt
from skyrl.tree.imports import import_object


def read_prompts(
    run: SkyRLTrainConfig,
    sources: Sequence[str],
    tokenizer: ChatTokenizer,
    *,
    env_class: str | None = None,
    stored: bool = False,
) -> PromptDataset:
    """The prompts of these sources, tokenized. Raises `DataError`. `env_class` is the task of rows that name none, by
    default that of the run. With `stored`, they are kept below `data.tokenized_path`, if it is set.
    """
    settings = _reading(run, env_class)
    path, columns = run.data.tokenized_path if stored else None, columns_of(run)
    store = None if path is None else PromptStore(path=path, settings=_described(run, settings))
    return load_prompts(sources, tokenizer, **settings, columns=columns, refuses=unrewardable_reason(run), store=store)


def columns_of(run: SkyRLTrainConfig) -> Columns:
    """Names of the columns that the run reads."""
    return Columns(prompt=run.data.prompt_column, answer=run.data.answer_column)


def _reading(run: SkyRLTrainConfig, env_class: str | None = None) -> dict[str, Any]:
    """How rows become prompts."""
    return {
        "env_class": env_class or run.environment.task,
        "max_prompt_length": run.trainer.max_prompt_length,
        "chat_template_kwargs": run.generator.chat_template_kwargs,
        "skip_bad_rows": run.data.bad_rows == "skip",
        "rendered": not run.environment.agent.plays,
    }


def _described(run: SkyRLTrainConfig, settings: Mapping[str, object]) -> dict[str, object]:
    """Everything that prompts depend on besides sources, tokenizer and template."""
    return {**settings, "columns": asdict(columns_of(run)), "asked": asked_of_tasks(run)}


def first_prompts(run: SkyRLTrainConfig, tokenizer: ChatTokenizer) -> PromptDataset:
    """The first streamed prompts, as many as are examined before the run starts. Raises `DataError`.

    Any later prompt may have `trainer.max_prompt_length` tokens: that is the longest one of the dataset.
    """
    make = prompt_maker(run, tokenizer)
    stream = RowStream(parts_of(run.data.train_data, columns_of(run)), buffer=1, seed=None)
    prompts: list[Prompt] = []
    for _ in range(EXAMINED):
        row = stream.draw()
        if stream.passes:
            break
        prompt, _ = make(row)
        prompts += [] if prompt is None else [prompt]
    if not prompts:
        raise DataError(
            f"none of the first {EXAMINED} rows of {', '.join(run.data.train_data)} is a prompt of at most "
            f"trainer.max_prompt_length = {run.trainer.max_prompt_length} tokens"
        )
    facts = evolve(facts_of(prompts), longest=run.trainer.max_prompt_length)
    return PromptDataset(prompts=tuple(prompts), facts=facts)


def prompt_maker(run: SkyRLTrainConfig, tokenizer: ChatTokenizer) -> StreamedPrompts:
    """Makes prompts of rows one by one, as the run does."""
    return StreamedPrompts(tokenizer, **_reading(run), columns=columns_of(run), refuses=unrewardable_reason(run))


def stream_cursor(run: SkyRLTrainConfig, tokenizer: ChatTokenizer) -> StreamCursor[Prompt]:
    """The streamed prompts of the run in the order in which they are drawn. Raises `DataError`."""
    data, trainer = run.data, run.trainer
    seed = trainer.seed if data.shuffle else None
    stream = RowStream(parts_of(data.train_data, columns_of(run)), buffer=data.shuffle_buffer_size, seed=seed)
    read = {**_described(run, _reading(run)), "buffer": data.shuffle_buffer_size, "seed": seed}
    key = row_key((), tokenizer, {**read, "versions": versions(data.train_data)})
    return StreamCursor(stream, prompt_maker(run, tokenizer), trainer.train_batch_size, key)


def steps_that_prompts_fill(run: SkyRLTrainConfig, prompts: int) -> int:
    """Number of batches in all epochs, which streamed prompts do not count, at most `max_training_steps` and what
    `max_training_prompts` fills. `prompts` is the number of prompts in an epoch.
    """
    trainer = run.trainer
    limits = [trainer.max_training_steps]
    if not run.data.streaming:
        limits.append(batches(prompts, trainer.train_batch_size, trainer.epochs, run.data.epoch_tail)[0])
    if trainer.max_training_prompts is not None:
        limits.append(trainer.max_training_prompts // trainer.train_batch_size)
    return min(limit for limit in limits if limit is not None)


def sampled_rollouts(
    run: SkyRLTrainConfig,
    cursor: PromptCursor | StreamCursor,
    generator: SkyRLGymGenerator,
    *,
    total_steps: int,
    describe_waits: Callable[[], Sequence[str]],
) -> Rollouts:
    """Batches sampled by `generator`: when the trainer asks for them, or ahead of it if the run is asynchronous.

    `waits` names what the process is waiting for, which a stalled stream reports.
    """
    trainer, settings = run.trainer, run.generator
    algorithm, seed = trainer.algorithm, trainer.seed
    if not trainer.fully_async.enabled:
        return SynchronousRollouts(cursor, generator, settings, algorithm, seed=seed)
    accept = trainer.fully_async.accept
    return StreamingRollouts(
        cursor,
        generator,
        settings,
        algorithm,
        stream_limits(run, total_steps),
        accept=None if accept is None else import_object(accept),
        mask_older_tokens=trainer.fully_async.mask_older_tokens,
        seed=seed,
        describe_waits=describe_waits,
    )


def prompt_cursor(run: SkyRLTrainConfig, dataset: PromptDataset) -> PromptCursor[Prompt]:
    """The prompts of the run in the order in which they are drawn. Raises `UserError`."""
    data, trainer, count = run.data, run.trainer, len(dataset.prompts)
    shares = data.train_weights if data.train_weights and len(data.train_weights) > 1 else None
    in_order = Shuffled(count, trainer.seed) if data.shuffle else Sequential(count)
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
        parts=dataset.facts.parts,
        sampler=sampler_of(data.curriculum, drawn, permutation(order, size, data.epoch_tail)),
        lag=trainer.fully_async.max_staleness_steps if trainer.fully_async.enabled else 0,
    )

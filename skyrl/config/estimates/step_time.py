"""Estimated seconds of the phases of a training step: the tree's settings as `skyrl.planning.roofline` counts them."""

from __future__ import annotations

import attrs

from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.sizes import (
    Model,
    data_parallel_of,
    degrees_of,
    engines_of,
    grid_of,
    models_of,
    on_ray,
    scored_answers,
    scorings,
    work_of,
)
from skyrl.config.estimates.memory import ShapeOf, learner_of, rest_of, serving_of, shape_in
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.planning.gpus import GPU_KINDS
from skyrl.planning.memory import LearnerRank, total
from skyrl.planning.model_shape import ModelShape
from skyrl.planning.roofline import (
    AnswerWork,
    PassRows,
    Rates,
    Sharding,
    Stages,
    generation_seconds,
    rates_of,
    scoring_seconds,
    stage_scoring_seconds,
    stage_update_seconds,
    transfer_seconds,
    turns_seconds,
    update_seconds,
)

SHARE_OF_THE_LONGEST = 0.5
"""Default ratio of the mean answer length to the maximum."""


@attrs.frozen(kw_only=True)
class StepTime:
    """Seconds of one training step, by phase."""

    generation: float
    scoring: float
    update: float
    transfer: float
    turns: float = 0.0
    """Seconds in which models and engines swap on the same GPUs."""

    overlaps: bool = False
    """Whether the next batch is sampled while this one is trained on."""

    @property
    def training(self) -> float:
        """Seconds of the learners in a step."""
        return self.scoring + self.update

    @property
    def step(self) -> float:
        """The whole step: the sum of its phases, or the longer of sampling and training where they overlap."""
        both = max(self.generation, self.training) if self.overlaps else self.generation + self.training
        return both + self.transfer + self.turns


def step_time(run: SkyRLTrainConfig, shape_of_model: ShapeOf, mean_answer: float | None = None) -> StepTime | None:
    """Seconds of a training step of a resolved tree that has passed `check`; `mean_answer` is the mean length of an
    answer in tokens, half of the longest by default.

    None if a model's sizes are unknown, no kind of GPU is named, or the run starts no engine of several sequences.
    """
    kind, engines = run.trainer.placement.gpu_kind, engines_of(run)
    shapes = {model: shape_in(run, model, shape_of_model) for model in models_of(run)}
    known = {model: shape for model, shape in shapes.items() if shape is not None}
    if kind is None or engines is None or known != shapes or backend_of(run.generator.inference_engine).is_embedded:
        return None
    rates = rates_of(GPU_KINDS[kind])
    mean = _mean(run, mean_answer)
    learners = {model: learner_of(run, model, shape) for model, shape in known.items()}
    policy, shares = known["policy"], run.trainer.placement.colocate_all and on_ray(run)
    return StepTime(
        generation=_generation(run, policy, mean, rates),
        scoring=sum(_scoring(run, model, learner, mean, rates) for model, learner in learners.items()),
        update=sum(_update(run, model, learner, mean, rates) for model, learner in learners.items()),
        transfer=transfer_seconds(policy, _degrees(run, "policy", learners["policy"]), rates, across=not shares),
        turns=turns_seconds(sum(total(rest_of(item)) for item in learners.values()), rates) if shares else 0.0,
        overlaps=run.trainer.fully_async.enabled and not shares,
    )


def training_seconds(
    run: SkyRLTrainConfig, shape_of_model: ShapeOf, mean_answer: float | None = None, rates: Rates | None = None
) -> float:
    """Seconds of the learners in a step, regardless of its engines, on the run's kind of GPU or at `rates`. The sizes
    of the models must be known.
    """
    kind, mean, seconds = run.trainer.placement.gpu_kind, _mean(run, mean_answer), 0.0
    if rates is None:
        assert kind is not None
        rates = rates_of(GPU_KINDS[kind])
    for model in models_of(run):
        shape = shape_in(run, model, shape_of_model)
        assert shape is not None
        learner = learner_of(run, model, shape)
        seconds += _scoring(run, model, learner, mean, rates) + _update(run, model, learner, mean, rates)
    return seconds


def _mean(run: SkyRLTrainConfig, mean_answer: float | None) -> float:
    """Mean length of an answer in tokens."""
    longest = run.generator.sampling_params.max_generate_length
    return longest * SHARE_OF_THE_LONGEST if mean_answer is None else min(mean_answer, longest)


def _generation(run: SkyRLTrainConfig, shape: ModelShape, mean: float, rates: Rates) -> float:
    engines, serving, engine = engines_of(run), serving_of(run, shape), run.generator.inference_engine
    assert engines is not None  # asked before
    assert serving is not None
    prompts, samples = run.trainer.train_batch_size, run.generator.n_samples_per_prompt
    typical = serving.token_bytes * (run.trainer.max_prompt_length + mean)
    answers = AnswerWork(
        number=-(-prompts * samples // engines.number),
        prompts=-(-prompts * (1 if engine.enable_prefix_caching else samples) // engines.number),
        prompt=run.trainer.max_prompt_length,
        mean=mean,
        longest=run.generator.sampling_params.max_generate_length,
    )
    at_once = min(serving.sequences, int(serving.cache / typical))
    return generation_seconds(answers, serving, at_once, rates, eager=engine.enforce_eager)


def _scoring(run: SkyRLTrainConfig, model: Model, learner: LearnerRank, mean: float, rates: Rates) -> float:
    work = work_of(run, model)
    if not work.rows_scored:
        return 0.0
    times = scorings(run.trainer, work.optimizer_steps) if model == "policy" else 1
    passes = work.scoring_micro_batches // times
    rows = _rows(run, model, learner.shape, mean, passes, answers=scored_answers(run))
    if learner.megatron is not None:
        return times * stage_scoring_seconds(learner.shape, rows, _stages(run, model, learner), rates)
    return times * scoring_seconds(learner.shape, rows, _degrees(run, model, learner), rates)


def _update(run: SkyRLTrainConfig, model: Model, learner: LearnerRank, mean: float, rates: Rates) -> float:
    work = work_of(run, model)
    if learner.update is None:
        return 0.0
    passes = run.trainer.update_epochs_per_batch
    answers = run.generator.n_samples_per_prompt
    rows = _rows(run, model, learner.shape, mean, work.optimizer_steps * work.micro_batches, answers=answers)
    zero, rows = learner.zero, attrs.evolve(rows, tokens=rows.tokens * passes)
    if learner.megatron is not None:
        return stage_update_seconds(learner, rows, _stages(run, model, learner), rates, steps=work.optimizer_steps)
    return update_seconds(
        learner.shape,
        rows,
        _degrees(run, model, learner),
        rates,
        steps=work.optimizer_steps,
        recomputes=learner.recomputes,
        adapter=learner.trained if learner.adapter_rank else 0,
        gathers_once=zero is not None and zero.stage < 3,
        states_on_host=learner.rests_on_host or (zero is not None and zero.offloads_optimizer),
    )


def _rows(
    run: SkyRLTrainConfig, model: Model, shape: ModelShape, mean: float, micro_batches: int, *, answers: int
) -> PassRows:
    """A batch of `answers` of mean length to each prompt. Where tokens bound a micro-batch, its number follows from
    them.
    """
    trainer, prompts = run.trainer, run.trainer.train_batch_size
    samples, prompt = prompts * answers, run.trainer.max_prompt_length
    shares = trainer.share_group_prompts and trainer.use_sample_packing and shape.packs and shape.shares_prompts
    tokens = round((prompts if shares else samples) * prompt + samples * mean)
    if trainer.max_tokens_per_microbatch > 0:
        of_a_rank = tokens / (data_parallel_of(run, model) or 1)
        micro_batches = max(1, round(of_a_rank / trainer.max_tokens_per_microbatch))
    return PassRows(tokens=tokens, length=round(prompt + mean), micro_batches=micro_batches)


def _stages(run: SkyRLTrainConfig, model: Model, learner: LearnerRank) -> Stages:
    degrees = degrees_of(run, model)
    data = max(1, grid_of(run, model).ranks // degrees.replica)
    sharding = Sharding(data=data, tensor=degrees.tensor, context=degrees.context, shards=degrees.tensor)
    return Stages(sharding=sharding, number=degrees.pipeline, experts=learner.expert_parallel)


def _degrees(run: SkyRLTrainConfig, model: Model, learner: LearnerRank) -> Sharding:
    if learner.megatron is not None:  # as weights are sent: each whole on every rank
        stages = _stages(run, model, learner)
        inner = max(stages.sharding.tensor, stages.experts if learner.shape.experts else 1)
        return Sharding(data=grid_of(run, model).ranks, shards=stages.number * inner)
    degrees = degrees_of(run, model)
    return Sharding(
        data=grid_of(run, model).ranks // degrees.replica,
        tensor=degrees.tensor,
        sequence=degrees.sequence,
        context=degrees.context,
        shards=learner.shards,
        on_host=learner.rests_on_host,
    )

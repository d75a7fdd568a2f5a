"""Checks of sampling: samples are random, and the learner scores the distribution that they were drawn from."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks import warning
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.every_kind import evaluates
from skyrl.config.derive.sizes import draws_rollouts
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree.names import nearest


def evaluation_samples_differ(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Greedy samples of a prompt are all the same, so pass@n would equal pass@1."""
    sampling, count = run.generator.eval_sampling_params, run.generator.eval_n_samples_per_prompt
    if evaluates(run.trainer) and sampling is not None and (sampling.greedy or sampling.temperature == 0) and count > 1:
        yield warning(
            path="generator.eval_n_samples_per_prompt",
            message=f"the {count} samples of a prompt are equal, since evaluation is greedy",
            hint="give generator.eval_sampling_params a temperature above 0 without greedy, or set this to 1",
        )


def learner_temperature_matches_sampling(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Importance ratios compare probabilities of the same distribution."""
    learner, rollout = run.trainer.algorithm.temperature, run.generator.sampling_params.temperature
    if learner is not None and learner != rollout:
        yield Problem(
            path="trainer.algorithm.temperature",
            message=f"{learner} is not generator.sampling_params.temperature = {rollout}",
            hint="leave it out: it is derived",
        )


def training_samples_are_random(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Greedy samples of a prompt are all the same, so no advantage would be left."""
    if run.generator.sampling_params.temperature == 0:
        yield Problem(
            path="generator.sampling_params.temperature",
            message="0 is greedy: every sample of a prompt would be the same",
            hint="training needs a temperature above 0; 1.0 is usual",
        )
    if run.generator.sampling_params.greedy:
        yield Problem(
            path="generator.sampling_params.greedy",
            message="every sample of a prompt would be the same",
            hint="set it to false; evaluation may use it",
        )


def learner_can_score_samples(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Penalties and a minimum length change the sampling distribution depending on the answer so far. The engine's
    log-probabilities include that change; the learner's do not.
    """
    for name, off in (("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("min_new_tokens", 0)):
        if getattr(run.generator.sampling_params, name) != off:
            yield warning(
                path=f"generator.sampling_params.{name}",
                message="the learner does not apply it, so training is off-policy by as much as it changes",
                hint=f"leave it at {off} in training; generator.eval_sampling_params may have one",
            )


def input_length_covers_prompt(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """With one turn the longest input is the longest prompt; with several it is at least that."""
    longest, prompt = run.generator.max_input_length, run.trainer.max_prompt_length
    turns = max(run.generator.max_turns, 2 if run.environment.agent.plays else 1)
    if longest is None or longest == prompt or (turns > 1 and longest > prompt):
        return
    relation = "equal to" if turns == 1 else "at least"
    yield Problem(
        path="generator.max_input_length",
        message=f"{longest} is not {relation} trainer.max_prompt_length = {prompt} (max_turns = {turns})",
        hint="leave it out in single-turn runs, where it is derived (~generator.max_input_length drops that of a file)"
        if turns == 1
        else "raise it to the longest conversation before an answer, or lower trainer.max_prompt_length",
    )


def engine_has_sampling_arguments(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Sampling parameters beyond the tree's own are arguments of the chosen engine."""
    engine = run.generator.inference_engine
    able = backend_of(engine).sampling_arguments
    for table in ("sampling_params", "eval_sampling_params") if draws_rollouts(run) else ():
        sampling = getattr(run.generator, table)
        for name in (sampling and sampling.additional_kwargs) or ():
            if name not in able:
                near = nearest(name, able)
                takes = f"it takes {', '.join(able)}" if able else "it takes none: leave the table out"
                yield Problem(
                    path=f"generator.{table}.additional_kwargs",
                    message=f"the {engine.backend} engine has no sampling argument {name!r}",
                    hint=f"did you mean {near}?" if near else takes,
                )

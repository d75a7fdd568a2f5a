"""Checks of rollouts: turns, templates and samples fit together, and engine and learner use the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.config.checks import warning
from skyrl.config.checks.every_kind import named_template_exists
from skyrl.config.derive.algorithm_facts import estimator_facts
from skyrl.config.derive.engine_options import given_length, length_option
from skyrl.config.derive.rl_models import has_critic
from skyrl.config.settings.environment import ENVIRONMENTS, built_in_name
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem

_ENGINE_KWARGS = "generator.inference_engine.engine_init_kwargs"
_ROPE = ("rope_scaling", "rope_theta", "rope_parameters")


def batched_sampling_has_one_turn(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`batched` hands all prompts to the engine at once, so nothing can be answered in between."""
    generator = run.generator
    if not generator.batched:
        return
    if generator.max_turns > 1:
        yield Problem(
            path="generator.batched",
            message=f"one call of the engine has one turn, but generator.max_turns = {generator.max_turns}",
            hint="set it to false",
        )
    if generator.step_wise_trajectories:
        message = "one call of the engine has one turn, but generator.step_wise_trajectories needs many"
        yield Problem(path="generator.batched", message=message, hint="set it to false")
    if generator.chat_template_kwargs:
        message = "the engine formats a whole batch by itself, without the variables of a chat template"
        yield Problem(
            path="generator.chat_template_kwargs", message=message, hint="set generator.batched = false, or drop them"
        )


def batched_sampling_ignores_flight_limit(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`batched` has the whole batch in flight at once, so `max_trajectories_in_flight` cannot limit it."""
    if run.generator.batched and run.generator.max_trajectories_in_flight is not None:
        yield Problem(
            path="generator.max_trajectories_in_flight",
            message="generator.batched = true has the whole batch in flight",
            hint="leave one of them out",
        )


def several_turns_have_room(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A second turn starts from the prompt, the first answer and an observation, which need room."""
    longest, prompt = run.generator.max_input_length, run.trainer.max_prompt_length
    if run.generator.max_turns > 1 and longest == prompt:
        yield warning(
            path="generator.max_input_length",
            message=f"it is trainer.max_prompt_length = {prompt}: a prompt of that length ends after its first turn",
            hint="give it room for all turns but the last: prompt, answers and observations",
        )


def second_turns_are_allowed(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A built-in environment that answers a wrong solution needs a turn for the next one."""
    name, generator = run.environment.task, run.generator
    facts = ENVIRONMENTS.get(built_in_name(name)) if name else None
    if facts is None or facts.single_turn or generator.max_turns > 1 or run.environment.agent.plays:
        return
    yield warning(
        path="generator.max_turns",
        message=f"{name} asks for another turn, and 1 allows none: a sample that does not end at once fails, unless "
        "its row has max_turns = 1",
        hint="set it to the largest number of turns, such as 2",
    )


def step_wise_excludes_discounting(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The turns of a trajectory share one advantage under `step_wise_trajectories`, which discounting would break."""
    algorithm, generator = run.trainer.algorithm, run.generator
    if not generator.step_wise_trajectories:
        return
    if estimator_facts(algorithm).discounts:
        yield Problem(
            path="trainer.algorithm.advantage_estimator",
            message=f"{algorithm.advantage_estimator} discounts over tokens, and the samples of a step-wise trajectory "
            "share no tokens",
            hint="use grpo, rloo or maxrl, or set generator.step_wise_trajectories = false",
        )
    if algorithm.loss_reduction == "token_mean_legacy":
        yield Problem(
            path="trainer.algorithm.loss_reduction",
            message="token_mean_legacy weighs micro-batches, whose number varies when turns are samples",
            hint="use token_mean",
        )
    if generator.chat_template.name_or_path is not None:
        message = "a custom template re-tokenizes the history at every turn, but each step must be a prefix of the next"
        yield Problem(
            path="generator.chat_template.name_or_path",
            message=message,
            hint="leave it out, or set generator.step_wise_trajectories = false",
        )
    if not generator.use_conversation_multi_turn:
        yield Problem(
            path="generator.use_conversation_multi_turn",
            message="one assistant message has no steps, and generator.step_wise_trajectories makes each a sample",
            hint="set it to true",
        )


def chat_template_is_built_in(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A chat template that is not built in comes from a file."""
    yield from named_template_exists(run.generator.chat_template, "generator.chat_template")


def merging_needs_step_wise_trajectories(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Merging needs `step_wise_trajectories`: without it, a trajectory is a single sample."""
    if run.generator.merge_stepwise_output and not run.generator.step_wise_trajectories:
        yield Problem(
            path="generator.merge_stepwise_output",
            message="merges the samples of generator.step_wise_trajectories, which is off",
            hint="set generator.step_wise_trajectories = true, or leave it out",
        )


def returns_need_single_sample_trajectories(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """If the template renders the conversation again each turn, a trajectory can be several samples, as with step-wise
    ones.
    """
    algorithm, generator = run.trainer.algorithm, run.generator
    retokenized = generator.chat_template.name_or_path is not None and generator.use_conversation_multi_turn
    several = generator.max_turns > 1 and (retokenized or generator.step_wise_trajectories)
    if not several:
        return
    which = "generator.chat_template" if retokenized else "generator.step_wise_trajectories"
    if retokenized and estimator_facts(algorithm).discounts:
        yield Problem(
            path="trainer.algorithm.advantage_estimator",
            message=f"{algorithm.advantage_estimator} discounts over tokens, and with {which} a trajectory can be "
            "several samples",
            hint="use grpo, rloo or maxrl, or the model's own template",
        )
    elif has_critic(run):
        yield Problem(
            path="trainer.critic.model.path",
            message=f"a critic's returns end with each sample, and with {which} a trajectory can be several",
            hint="leave the critic out",
        )
    if retokenized and algorithm.loss_reduction == "token_mean_legacy":
        yield Problem(
            path="trainer.algorithm.loss_reduction",
            message="token_mean_legacy weighs micro-batches, whose number varies when the template "
            "re-renders conversations",
            hint="use token_mean",
        )


def turns_end_with_eos(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A turn that a stop text ended lacks the end-of-sequence token that the model's chats have there."""
    generator = run.generator
    stops = generator.sampling_params.stop and generator.max_turns > 1 and generator.use_conversation_multi_turn
    if stops and not generator.append_eos_token_after_stop_str_in_multi_turn:
        yield warning(
            path="generator.append_eos_token_after_stop_str_in_multi_turn",
            message="turns that end at a stop text get no end-of-sequence token, unlike the model's own chats",
            hint="set it to true",
        )


def engine_rope_matches_learner(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engine and learner use the same rotary embeddings."""
    for name in ("rope_scaling", "rope_theta"):
        learner, engine = getattr(run.trainer, name), getattr(run.generator, name)
        if engine is not None and engine != learner:
            yield Problem(
                path=f"generator.{name}",
                message=f"the engine's is not the learner's trainer.{name}",
                hint=f"set trainer.{name} alone: the engine's is derived from it",
            )


def rope_excludes_engine_arguments(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Rotary settings given as engine arguments would bypass the learner and give a different model."""
    kwargs = run.generator.inference_engine.engine_init_kwargs
    overrides = kwargs.get("hf_overrides")
    inner: Mapping[str, Any] = overrides if isinstance(overrides, Mapping) else {}
    for name in _ROPE:
        if name in kwargs:
            yield _moved_rope(f"{_ENGINE_KWARGS}.{name}")
        if name == "rope_scaling" and name in inner:
            yield _moved_rope(f"{_ENGINE_KWARGS}.hf_overrides.{name}")
    engine = inner.get("rope_parameters")
    learner = run.trainer.policy.model_config_kwargs.get("rope_parameters")
    if engine != learner and (engine is not None or learner is not None):
        yield Problem(
            path=f"{_ENGINE_KWARGS}.hf_overrides.rope_parameters",
            message="differs from trainer.policy.model_config_kwargs.rope_parameters, but both describe one model",
            hint="set trainer.rope_scaling or trainer.rope_theta instead, which both sides read",
        )


def sequence_fits_engine(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """An engine limited to shorter sequences would silently cut answers off."""
    engine = run.generator.inference_engine
    engine_length = given_length(engine)
    longest = run.trainer.longest_row if engine_length is None else engine_length
    prompt, answer = run.generator.max_input_length, run.generator.sampling_params.max_generate_length
    if longest is not None and prompt is not None and longest < prompt + answer:
        yield warning(
            path="trainer.longest_row" if engine_length is None else f"{_ENGINE_KWARGS}.{length_option(engine)}",
            message=f"{longest} tokens are fewer than the longest input and answer, {prompt} + {answer}",
            hint=f"raise it to {prompt + answer}, or lower generator.sampling_params.max_generate_length",
        )


def completion_lengths_are_consistent(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The minimum length of a completion does not exceed the maximum, and a prompt leaves room for an answer."""
    for name in ("sampling_params", "eval_sampling_params"):
        sampling = getattr(run.generator, name)
        if sampling is None:
            continue
        if sampling.min_new_tokens > sampling.max_generate_length:
            yield Problem(
                path=f"generator.{name}.min_new_tokens",
                message=f"{sampling.min_new_tokens} is above max_generate_length = {sampling.max_generate_length}",
                hint="lower it, or raise max_generate_length",
            )
        if sampling.max_tokens is not None and sampling.max_tokens <= run.trainer.max_prompt_length:
            yield Problem(
                path=f"generator.{name}.max_tokens",
                message=f"{sampling.max_tokens} tokens leave no room for an answer to a prompt of "
                f"trainer.max_prompt_length = {run.trainer.max_prompt_length}",
                hint="raise it, or lower trainer.max_prompt_length",
            )


def _moved_rope(path: str) -> Problem:
    hint = "set trainer.rope_scaling or trainer.rope_theta, which both sides read"
    return Problem(path=path, message="would apply to the engine only, but the learner has the same model", hint=hint)

"""`check()`: which resolved trees can run. One small function for each rule that involves several fields.

Each yields problems with a remedy. Those of the algorithm, of batch sizes, of placement, of engines, of learners, of
rollouts and of asynchronous training are in `check_algorithm.py`, `check_batches.py`, `check_placement.py`,
`check_engines.py`, `check_learners.py`, `check_rollouts.py` and `check_async.py`. What a single field may hold is a
validator on the field; what depends on the machine (files, keys, GPUs) is looked at when a run starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs

from skyrl.config.check_algorithm import ALGORITHM_CHECKS
from skyrl.config.check_async import ASYNC_CHECKS
from skyrl.config.check_batches import BATCH_CHECKS
from skyrl.config.check_engines import ENGINE_CHECKS
from skyrl.config.check_learners import LEARNER_CHECKS
from skyrl.config.check_placement import PLACEMENT_CHECKS
from skyrl.config.check_rollouts import ROLLOUT_CHECKS
from skyrl.config.check_schedule import schedule_problems
from skyrl.config.effects import evaluates, without_effect
from skyrl.config.entry import RunConfig
from skyrl.config.not_yet import NOT_YET, SUPERVISED_NOT_YET, VALUES_NOT_YET
from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.sizes import has_critic, samples
from skyrl.errors import Problem
from skyrl.tree.classes import is_config
from skyrl.tree.origins import Origins, Path, dotted, place_of
from skyrl.tree.rules import Check, find_problems, touches
from skyrl.tree.secrets import HIDDEN


def the_policy_has_a_model(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """There is something to train."""
    if not run.trainer.policy.model.path:
        hint = "give a local folder or a hub name, such as Qwen/Qwen2.5-1.5B-Instruct"
        yield Problem(path="trainer.policy.model.path", message="no model to train", hint=hint)


def there_is_data_to_train_on(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """At least one source of prompts."""
    if not run.data.train_data and samples(run):
        yield Problem(path="data.train_data", message="the list is empty", hint="name at least one file of prompts")


def evaluation_has_data(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """An evaluation that is asked for has prompts."""
    if evaluates(run) and samples(run) and not run.data.val_data:
        hint = "name a file, or set trainer.eval_before_train = false and trainer.eval_interval = -1"
        yield Problem(path="data.val_data", message="evaluation is on but the list is empty", hint=hint)


def recorded_samples_evaluate_nothing(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Evaluation samples, and a run that is fed from a recording has no engine to sample with."""
    if evaluates(run) and not samples(run):
        yield Problem(
            path="trainer.rollouts_from",
            message="a run that is fed from a recording has no engine, and evaluation is on",
            hint="set trainer.eval_before_train = false and trainer.eval_interval = -1",
        )


def a_reward_model_is_somewhere(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment reward_model has its model here, or elsewhere."""
    settings, path = run.environment.skyrl_gym.reward_model, "environment.skyrl_gym.reward_model"
    if run.environment.env_class != "reward_model":
        return
    if not settings.path and not settings.url:
        hint = "name its folder in path, or the address of `skyrl serve-reward` in url"
        yield Problem(path=f"{path}.path", message="no reward model to ask", hint=hint)
    if settings.path and settings.url:
        yield Problem(path=f"{path}.url", message="both path and url say where the model is", hint="leave one out")


def several_evaluation_samples_differ(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Greedy samples of a prompt are all the same, so that pass@n would be pass@1."""
    sampling, samples = run.generator.eval_sampling_params, run.generator.eval_n_samples_per_prompt
    if evaluates(run) and sampling is not None and (sampling.greedy or sampling.temperature == 0) and samples > 1:
        yield Problem(
            path="generator.eval_n_samples_per_prompt",
            message=f"the {samples} samples of a prompt are equal, since evaluation is greedy",
            hint="give generator.eval_sampling_params a temperature above 0 without greedy, or take one sample",
            severity="warning",
        )


def the_schedules_have_what_they_need(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The settings of a schedule go together."""
    yield from schedule_problems(run.trainer.policy.optimizer_config, "trainer.policy.optimizer_config")
    if has_critic(run):
        yield from schedule_problems(run.trainer.critic.optimizer_config, "trainer.critic.optimizer_config")


def no_source_is_named_twice(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A second copy of a source repeats its prompts in every epoch."""
    for name in ("train_data", "val_data"):
        sources = getattr(run.data, name)
        twice = [source for source in dict.fromkeys(sources) if sources.count(source) > 1]
        if twice:
            message = f"{', '.join(twice)} stands here more than once, so its prompts are repeated"
            yield Problem(path=f"data.{name}", message=message, severity="warning")


def every_training_source_has_a_weight(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Or none has."""
    weights, sources = run.data.train_weights, run.data.train_data
    if weights is not None and len(weights) != len(sources):
        yield Problem(
            path="data.train_weights",
            message=f"{len(weights)} weights for {len(sources)} sources in data.train_data",
            hint="give one for each, in the same order, or leave them out",
        )


def the_learner_scores_at_the_rollout_temperature(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Importance ratios compare probabilities of the same distribution."""
    learner, rollout = run.trainer.algorithm.temperature, run.generator.sampling_params.temperature
    if learner is not None and learner != rollout:
        yield Problem(
            path="trainer.algorithm.temperature",
            message=f"{learner} is not generator.sampling_params.temperature = {rollout}",
            hint="leave it out: it is derived",
        )


def training_samples_are_random(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """At temperature 0 all samples of a prompt are one, and no advantage is left."""
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


def the_learner_can_score_what_was_sampled(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A repetition penalty changes the distribution by the history of the answer, which the learner does not undo."""
    if run.generator.sampling_params.repetition_penalty != 1.0:
        yield Problem(
            path="generator.sampling_params.repetition_penalty",
            message="the learner scores without it, so training is off policy by as much as it changes",
            hint="leave it at 1.0 in training; generator.eval_sampling_params may have one",
            severity="warning",
        )


def a_single_turn_is_given_the_prompt(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """With one turn the longest input is the longest prompt; with several it is at least that."""
    longest, prompt = run.generator.max_input_length, run.trainer.max_prompt_length
    if longest is None or longest == prompt or (run.generator.max_turns > 1 and longest > prompt):
        return
    turns = run.generator.max_turns
    wanted = "equal to" if turns == 1 else "at least"
    yield Problem(
        path="generator.max_input_length",
        message=f"{longest} is not {wanted} trainer.max_prompt_length = {prompt} (max_turns = {turns})",
        hint="leave it out in single-turn runs: it is derived",
    )


def a_resumed_run_has_a_path(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`from_path` says where from, and only it does."""
    if run.trainer.resume_mode == "from_path" and not run.trainer.resume_path:
        hint = "give the folder of a checkpoint: .../global_step_N"
        yield Problem(path="trainer.resume_path", message="resume_mode = from_path needs it", hint=hint)
    if run.trainer.resume_path and run.trainer.resume_mode != "from_path":
        message = f"is not read with resume_mode = {run.trainer.resume_mode}"
        yield Problem(path="trainer.resume_path", message=message, hint="set trainer.resume_mode = from_path")


def recovery_and_resuming_agree(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """One field says where a run begins, and it may not be contradicted by the other."""
    recover, resume = run.trainer.recover_mode, run.trainer.resume_mode
    agree = {None: (resume,), "disabled": ("latest", "none", None), "fault": ("latest", "none", None)}
    if resume not in agree.get(recover, ("latest",)):
        yield Problem(
            path="trainer.recover_mode",
            message=f"{recover} says where the run begins, and trainer.resume_mode = {resume or 'none'} says otherwise",
            hint="leave one of them out",
        )


def the_best_checkpoints_have_a_measure(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Best is by some metric."""
    if run.trainer.ckpt_keep_best > 0 and not run.trainer.ckpt_best_metric:
        yield Problem(
            path="trainer.ckpt_best_metric",
            message=f"ckpt_keep_best = {run.trainer.ckpt_keep_best} needs it",
            hint="name a metric of metrics.jsonl, such as eval/all/avg_score",
        )


def repeatable_runs_are_promised_on_a_cpu(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Kernels that repeat bit for bit are tested on CPUs; on CUDA that is not promised yet."""
    if run.trainer.deterministic and run.trainer.device == "cuda":
        yield Problem(
            path="trainer.deterministic",
            message="bit-for-bit repeatable runs are promised on a CPU only",
            severity="warning",
        )


CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    the_policy_has_a_model,
    there_is_data_to_train_on,
    evaluation_has_data,
    recorded_samples_evaluate_nothing,
    a_reward_model_is_somewhere,
    several_evaluation_samples_differ,
    no_source_is_named_twice,
    the_schedules_have_what_they_need,
    every_training_source_has_a_weight,
    the_learner_scores_at_the_rollout_temperature,
    training_samples_are_random,
    the_learner_can_score_what_was_sampled,
    a_single_turn_is_given_the_prompt,
    a_resumed_run_has_a_path,
    recovery_and_resuming_agree,
    the_best_checkpoints_have_a_measure,
    repeatable_runs_are_promised_on_a_cpu,
    *ALGORITHM_CHECKS,
    *BATCH_CHECKS,
    *PLACEMENT_CHECKS,
    *ENGINE_CHECKS,
    *LEARNER_CHECKS,
    *ROLLOUT_CHECKS,
    *ASYNC_CHECKS,
    *(entry.check for entry in (*NOT_YET, *VALUES_NOT_YET)),
)


def checks_of(root: type[RunConfig]) -> tuple[Check[Any], ...]:
    """Those of this kind of run."""
    if issubclass(root, SkyRLTrainConfig):
        return CHECKS
    from skyrl.config.supervised_check import SUPERVISED_CHECKS

    return (*SUPERVISED_CHECKS, *(entry.check for entry in SUPERVISED_NOT_YET))


def check(config: RunConfig, origins: Origins | None = None, broken: Collection[str] = ()) -> list[Problem]:
    """Every problem of a resolved tree, errors and warnings, each with its place.

    `origins` tell what was written; without them, written means different from the default.
    """
    found = find_problems(config, checks_of(type(config)), origins or {}, broken)
    return [*found, *_what_was_hidden(config, origins or {}, broken), *without_effect(config, origins, broken)]


def _what_was_hidden(run: RunConfig, origins: Origins, broken: Collection[str]) -> Iterator[Problem]:
    """Where a stored run is read, of whatever kind, its secrets are missing: they were not stored."""
    for path in map(dotted, _hidden(run)):
        if not touches([path], broken):
            hint = "take it from a variable: env:NAME"
            message = f"{HIDDEN} stands where a secret was: give it again"
            yield Problem(path=path, message=message, hint=hint, place=place_of(path, origins))


def _hidden(value: Any) -> list[Path]:
    """Where it stands in the texts of a tree, those in lists and tables of free form among them."""
    if isinstance(value, str):
        return [()] if HIDDEN in value else []
    inside: Iterable[tuple[Any, Any]] = ()
    if is_config(type(value)):
        held = ((each, getattr(value, each.name)) for each in attrs.fields(type(value)))
        inside = ((each.name, child) for each, child in held if child is not each.default)  # most of a tree is default
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, tuple):
        inside = enumerate(value)
    return [(str(name), *path) for name, child in inside for path in _hidden(child)]

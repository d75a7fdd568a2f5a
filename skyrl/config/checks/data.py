"""Checks of what a run starts from: a model, prompts, data to evaluate on, a reward model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf

from skyrl.config.checks import warning
from skyrl.config.derive.every_kind import evaluates
from skyrl.config.derive.sizes import draws_rollouts
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.config.foundation.reasoning_tasks import REASONING_GYM, SCHEME, is_installed, prompt_refusal, task_problems
from skyrl.config.settings.data import DataConfig
from skyrl.config.settings.environment import ENVIRONMENTS, MCP, built_in_name
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree.names import nearest
from skyrl.tree.types import display_value


def training_has_data(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Training has at least one source of prompts."""
    if not run.data.train_data and draws_rollouts(run):
        yield Problem(path="data.train_data", message="the list is empty", hint="give at least one file of prompts")


def evaluation_has_data(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """If evaluation is on, it has prompts."""
    if evaluates(run.trainer) and draws_rollouts(run) and not run.data.val_data:
        hint = "give a file, or set trainer.eval_before_train = false and trainer.eval_interval = -1"
        yield Problem(path="data.val_data", message="evaluation is on but the list is empty", hint=hint)


def recorded_samples_exclude_evaluation(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Evaluation needs to sample, but a run that is fed from a recording has no engine."""
    if evaluates(run.trainer) and not draws_rollouts(run):
        yield Problem(
            path="trainer.rollouts_from",
            message="a run on recorded rollouts has no engine, but evaluation is on",
            hint="set trainer.eval_before_train = false and trainer.eval_interval = -1",
        )


def environment_is_known(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A plain name is that of a built-in environment, or of one that the user's own program registers."""
    for name in run.environment.names:
        if is_import_path(name) or built_in_name(name) in ENVIRONMENTS:
            continue
        near = nearest(name, tuple(ENVIRONMENTS))
        hint = f"did you mean {near}? " if near else ""
        yield warning(
            path="environment.env_class",
            message=f"no environment {name!r} is built in; the run stops with an error unless a program registers it",
            hint=f"{hint}Built in: {', '.join(ENVIRONMENTS)}; your own: file.py:name or module:name",
        )


def rewards_have_weights(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each reward of a list has a weight, or none has; those that are built in end after one turn."""
    if not isinstance(run.environment.env_class, tuple):
        return
    names, weights = run.environment.names, run.environment.reward_weights
    if weights is not None and len(weights) != len(names):
        message = f"{len(weights)} weights for {len(names)} rewards"
        yield Problem(path="environment.reward_weights", message=message, hint="give one for each item of env_class")
    for name in names:
        if name in ENVIRONMENTS and not ENVIRONMENTS[name].single_turn:
            message = f"{name} has several turns, and cannot be one of several rewards"
            yield Problem(path="environment.env_class", message=message, hint="leave it out of the list")
        if name in ENVIRONMENTS and ENVIRONMENTS[name].judges_whole_group:
            message = f"{name} compares the answers of a group, and cannot be one of several rewards"
            yield Problem(path="environment.env_class", message=message, hint="leave it out of the list")


def reward_model_has_one_location(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment reward_model has exactly one of `path` and `url` for its model."""
    settings, path = run.environment.skyrl_gym.reward_model, "environment.skyrl_gym.reward_model"
    if "reward_model" not in run.environment.judges:
        return
    if not settings.path and not settings.url:
        hint = "set path to its folder, or url to the address of `skyrl serve-reward`"
        yield Problem(path=f"{path}.path", message="no reward model is given", hint=hint)
    if settings.path and settings.url:
        yield Problem(path=f"{path}.url", message="both path and url say where the model is", hint="leave one out")


def mcp_servers_are_complete(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment mcp has servers, each with one place and only the settings that such a server reads."""
    settings, path = run.environment.skyrl_gym.mcp, "environment.skyrl_gym.mcp"
    if MCP not in run.environment.names:
        return
    if not settings.servers:
        hint = f"add a table [[{path}.servers]] with a command or a url"
        yield Problem(path=f"{path}.servers", message="no tool server is given", hint=hint)
    for index, server in enumerate(settings.servers):
        if not server.has_one_place:
            message = (
                f"server {index} has {'both a command and a url' if server.url else 'neither a command nor a url'}"
            )
            yield Problem(path=f"{path}.servers", message=message, hint="give it one of them")
        elif server.url is not None and not server.url.startswith(("http://", "https://")):
            message = f"server {index}: {server.url!r:.80} is not an address"
            yield Problem(path=f"{path}.servers", message=message, hint="write it as http://HOST:PORT/mcp")
        foreign = ("token", "headers") if server.command else ("env", "readable")
        for name in (name for name in foreign if server.has_one_place and getattr(server, name)):
            form = "that is a command" if server.command else "at a url"
            message = f"server {index}: {name} has no effect on a server {form}"
            yield Problem(path=f"{path}.servers", message=message, hint="remove it")


def mcp_has_a_reward(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment mcp has a reward, which judges one answer."""
    reward, path = run.environment.skyrl_gym.mcp.reward, "environment.skyrl_gym.mcp.reward"
    if MCP not in run.environment.names:
        return
    if reward is None:
        hint = "name a reward function (file.py:name or module:name) or an environment such as gsm8k"
        yield Problem(path=path, message="nothing judges the answers", hint=hint)
    elif is_import_path(reward):
        return
    elif reward not in ENVIRONMENTS:
        near = nearest(reward, tuple(ENVIRONMENTS))
        message = f"no environment {reward!r} is built in; the run stops with an error unless a program registers it"
        hint = f"did you mean {near}?" if near else "your own: file.py:name or module:name"
        yield warning(path=path, message=message, hint=hint)
    elif ENVIRONMENTS[reward].judges_whole_group:
        message = f"{reward} compares the answers of a group, and cannot judge one"
        yield Problem(path=path, message=message, hint="name one that judges single answers, or a reward function")
    elif not ENVIRONMENTS[reward].single_turn:
        message = f"{reward} has several turns of its own, and cannot judge the answers of another conversation"
        yield Problem(path=path, message=message, hint="name one that ends after one turn, or a reward function")


def reasoning_tasks_are_valid(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The tasks of reasoning-gym exist and accept their settings, as far as the package is installed."""
    table, environment = "environment.skyrl_gym.reasoning_gym.tasks", run.environment
    played = environment.reasoning_tasks
    named = [name for name in environment.names if built_in_name(name) == REASONING_GYM]
    if REASONING_GYM in named and not played and run.data.train_data == DataConfig().train_data:
        hint = "set environment.env_class to reasoning_gym:TASK, or give a table for each task"
        yield Problem(path=table, message="no task is given", hint=hint)
    if len(named) > 1:
        message, hint = f"{' and '.join(named)} would each score every answer", "set it to reasoning_gym, with a table"
        yield Problem(path="environment.env_class", message=message, hint=f"{hint} for each task in {table}")
    if named:
        for name in ("train_data", "val_data") if evaluates(run.trainer) else ("train_data",):
            others = [source for source in getattr(run.data, name) if not source.startswith(SCHEME)]
            is_derived = getattr(run.data, name) == getattr(DataConfig(), name)  # where a task is broken
            if others and not is_derived:
                message = f"reasoning_gym only judges rows of its own tasks, and {others[0]} has other rows"
                hint = f"leave it out, write {SCHEME}TASK, or let its rows name their environment"
                yield warning(path=f"data.{name}", message=message, hint=hint)
            tasks = [source for source in getattr(run.data, name) if source.startswith(SCHEME)]
            if len(environment.names) > 1 and any("names_environment=false" not in source for source in tasks):
                message = f"its rows name {REASONING_GYM}, so no other reward judges them"
                hint = "add names_environment=false to its parameters, or leave it out"
                yield warning(path=f"data.{name}", message=message, hint=hint)
    if played and is_installed() and (reason := prompt_refusal(environment.skyrl_gym.reasoning_gym.system_prompt)):
        yield Problem(path="environment.skyrl_gym.reasoning_gym.system_prompt", message=reason)
    for task, settings in played.items():
        if not isinstance(settings, Mapping):
            message = f"{display_value(settings)} is not a table of settings"
            yield Problem(path=f"{table}.{task}", message=message, hint="write {} for the task's own defaults")
            continue
        weight = settings.get("weight", 1)
        if not isinstance(weight, int | float) or not 0 < weight < inf:
            message, hint = f"{display_value(weight)} is not a positive number", "leave the task out to exclude it"
            yield Problem(path=f"{table}.{task}.weight", message=message, hint=hint)
        own = {name: value for name, value in settings.items() if name != "weight"}
        fixed = [name for name in own if name in ("seed", "size")]
        for name in fixed:
            hint = "set environment.skyrl_gym.reasoning_gym.seed, train_rows and eval_rows"
            yield Problem(path=f"{table}.{task}.{name}", message="a task has no such setting here", hint=hint)
        if is_installed() and not fixed:
            for name, reason in task_problems(task, own):
                path = f"{table}.{task}" if settings else "environment.env_class"
                yield Problem(path=f"{path}.{name}" if name else path, message=reason)


def data_sources_are_distinct(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A second copy of a source repeats its prompts in every epoch."""
    for name in ("train_data", "val_data"):
        sources = getattr(run.data, name)
        twice = [source for source, count in Counter(sources).items() if count > 1]
        if twice:
            message = f"{', '.join(twice)} is listed more than once, so its prompts are repeated"
            yield warning(path=f"data.{name}", message=message)


def training_sources_have_weights(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Every training source has a weight, or none has."""
    yield from run.data.problems_at("data")


def streaming_has_an_end(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Streamed prompts are not counted, so that the run needs another end, and cannot be drawn out of turn."""
    trainer, curriculum = run.trainer, run.data.curriculum
    if not run.data.streaming:
        return
    if trainer.max_training_steps is None and trainer.max_training_prompts is None:
        yield Problem(
            path="trainer.max_training_steps",
            message="the number of streamed prompts is not known in advance, so trainer.epochs ends no run",
            hint="set it to a number of steps, or trainer.max_training_prompts",
        )
    if curriculum.sampler != "permutation" or curriculum.skip_solved is not None:
        unset = "sampler" if curriculum.sampler != "permutation" else "skip_solved"
        yield Problem(
            path=f"data.curriculum.{unset}",
            message="streamed prompts come in the order in which they are read",
            hint="leave it out, or set data.streaming to false",
        )


def curriculum_can_draw(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The sampler is known, its stages are in order, and something can be drawn at every step."""
    curriculum = run.data.curriculum
    yield from curriculum.problems_at("data.curriculum")
    yield from curriculum.mixture_problems("data.curriculum", len(run.data.train_data))

"""Rows of data, tried before a run starts: all are read (`counted_rows.py`), the first is rendered by the chat template
and judged.

Reads only files, without torch and transformers; for a dataset of the hub, only its existence is checked.
`skyrl doctor` reads every file whole. `skyrl run`, which reads all rows once it has its tokenizer, reads them here only
if that is quick.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from attrs import frozen

from skyrl.chats.contents import (
    ALLOW_DROPPED,
    DESCRIBE_TOOLS,
    DroppedPart,
    dropped,
    dropped_tools,
    tool_name,
    with_tools,
)
from skyrl.chats.masks import message_weights
from skyrl.chats.rendering import begins_an_answer
from skyrl.chats.spellings import FullestSpelling, Spelling, spellings
from skyrl.chats.text import Message
from skyrl.config import SFTConfig, SkyRLTrainConfig, SupervisedConfig
from skyrl.config.derive.every_kind import evaluates
from skyrl.config.derive.sizes import draws_rollouts
from skyrl.config.foundation.reasoning_tasks import SCHEME, refusal
from skyrl.config.loading.kinds import reads_chats
from skyrl.data.conversations import tools_of, with_system
from skyrl.data.data_files import FILES
from skyrl.data.prompts import data_source_of, extras_of, tools_in
from skyrl.data.row_forms import chat_in, learns_all
from skyrl.data.sources import BadRow, Columns, Row, chat_of, first_row, iterate_rows
from skyrl.envs.env import Env, EnvStep, SampledAnswer
from skyrl.envs.group_rewards import GroupReward
from skyrl.envs.isolated import IsolatedTask
from skyrl.envs.mcp.environment import McpTask
from skyrl.envs.reference_answers import ANSWER_FORMATS
from skyrl.envs.registry import PAIRWISE, MakeEnv, find_env, find_env_of_row, ignored_columns, ignored_columns_warning
from skyrl.envs.reward_functions import PlainReward, arguments, ground_truth, lacking, signature_of, trainer_arguments
from skyrl.envs.tools import ToolEnv, TriedTool
from skyrl.envs.weighted_rewards import WeightedRewards
from skyrl.errors import ConfigError, DataError, DroppedPartsError, Problem, RewardError, TaskError
from skyrl.experiments.counted_rows import (
    CountedRows,
    bad_rows,
    blank_parts,
    count_rows,
    prompts_of,
    steps_without_rows,
    supervised_rows_of,
    too_few_rows,
    unknown_roles,
)
from skyrl.experiments.model_checks import readable_files
from skyrl.experiments.unrewardable_rows import asked_by, columns_text, name_of, unrewardable_rows
from skyrl.models.files.chat_templates import configured_template
from skyrl.models.files.facts import ModelFiles
from skyrl.models.files.template_text import TemplateRefusal, render_template
from skyrl.processes.event_loop import event_loop
from skyrl.rollout.env_calls import EnvCalls, EpisodeError, number
from skyrl.trajectory import Failure
from skyrl.tree.names import nearest
from skyrl.tree.rules import Check

T = TypeVar("T")


@frozen(kw_only=True)
class FirstRow:
    """The first row of a source, as an environment is given it."""

    source: str
    field: str
    """Dotted path of the list of sources."""

    env_class: str | None
    messages: tuple[Mapping[str, Any], ...]
    extras: dict[str, Any]


def first_rows_can_be_used(*, judge: bool, training: bool = True) -> Check[SkyRLTrainConfig]:
    """The check that each source begins with a prompt, that no row is bad, and that there are enough to fill a batch.
    With `judge`, files of any size are read whole, reward functions are called, and all rows are searched for missing
    values; without `training`, only evaluation sources are read.
    """

    def first_rows_are_prompts(run: SkyRLTrainConfig) -> Iterator[Problem]:
        judged: set[str | None] = set()
        skips, counts = run.data.bad_rows == "skip", list[CountedRows | None]()
        for field, source in _sources(run, training=training):
            try:
                row = _read_first_row(run, field, source)
                counted = count_rows(source, prompts_of(run), all_rows=judge)
            except (DataError, OSError) as error:
                yield Problem(path=field, message=str(error))
                continue
            if counted and (judge or not skips):  # the run itself reports the rows that it skips
                yield from bad_rows(counted, field, "data.bad_rows = skip", skips=skips)
            if counted and judge:  # as above
                yield from blank_parts(counted, field, source)
            if counted:
                files = readable_files(run.trainer.policy.model.path, run.trainer.tokenizer_path)
                yield from unknown_roles(counted, field, source, files, run.generator.chat_template)
            if field == "data.train_data":
                counts.append(counted)
            yield from _written_by_the_template(run, row)
            yield from unrewardable_rows(run, field, source, all_rows=judge)
            if row.env_class not in judged:
                judged.add(row.env_class)
                yield from _judged(run, row, call=judge)
        if counts and len(counts) == len(run.data.train_data):  # otherwise some are of the hub, or cannot be read
            path, batch = "trainer.train_batch_size", run.trainer.train_batch_size
            yield from too_few_rows(counts, path, batch, "prompts", skips=skips)
            if judge and not run.data.streaming:  # the run itself tells once it knows which prompts are too long
                most, epochs = run.trainer.max_training_steps, ("trainer.epochs", run.trainer.epochs)
                path, tail = "trainer.max_training_steps", run.data.epoch_tail
                yield from steps_without_rows(counts, path, most, batch, epochs, tail)

    return first_rows_are_prompts


@frozen(kw_only=True)
class TriedTask:
    """A task that has judged the first row of a source."""

    name: str
    called: tuple[str, ...] = ()
    """Names of the tools that were called."""

    uncalled: tuple[str, ...] = ()
    """Names of its other tools."""

    returned_none: tuple[str, ...] = ()
    """Names of the tools whose call returned None."""


def tried_tasks(run: SkyRLTrainConfig, *, call_tools: bool = False) -> Iterator[TriedTask]:
    """Each task that has judged the first row of a source. With `call_tools`, each tool of a `ToolEnv` is called once,
    with arguments made up from its schema; otherwise none is, because they may have effects. `run` has passed all
    checks.

    Raises `ConfigError` for tools that fail.
    """
    tasks: dict[str | None, FirstRow] = {}
    problems: list[Problem] = []
    for field, source in _sources(run, training=True):
        row = _read_first_row(run, field, source)
        tasks.setdefault(row.env_class, row)
    for name, row in tasks.items():
        make = find_env_of_row(str(name), run.environment.task, run.environment.skyrl_gym)
        if not _is_tried(row, make):
            continue
        offered = [*filter(None, map(tool_name, _offered_tools(run, row, make) or ()))]
        tools: Sequence[TriedTool] = ()
        try:
            tools = _called_tools(run, row, make) if call_tools else ()
        except EpisodeError as error:  # all of them together took too long
            problems.append(Problem(path="environment.env_class", message=str(error)))
        problems += _failed_tools(tools, row)
        called = tuple(tool.name for tool in tools if tool.arguments is not None)
        uncalled = tuple(item for item in offered if item not in called)
        returned_none = tuple(tool.name for tool in tools if tool.returned_none)
        yield TriedTask(name=str(name), called=called, uncalled=uncalled, returned_none=returned_none)
    if problems:
        raise ConfigError(problems)


def _called_tools(run: SkyRLTrainConfig, row: FirstRow, make: MakeEnv) -> Sequence[TriedTool]:
    """The tools of a `ToolEnv`, each called once."""
    if not (isinstance(make, type) and issubclass(make, ToolEnv)):
        return ()
    return (
        _result_of_started(run, row, make, lambda env: tuple(env.try_tools()) if isinstance(env, ToolEnv) else ()) or ()
    )


def _failed_tools(tools: Sequence[TriedTool], row: FirstRow) -> Iterator[Problem]:
    """The problem of each tool that failed."""
    for tool in tools:
        if tool.failure:
            arguments = json.dumps(tool.arguments, default=str, ensure_ascii=False)
            yield Problem(
                path="environment.env_class",
                message=f"{row.env_class}: the tool {tool.name}, called with {arguments:.200}, {tool.failure}",
                hint="arguments that fit its schema are answered, or refused by raising skyrl.envs.tools.ToolFailed",
            )


def supervised_rows_can_be_used(*, all_rows: bool) -> Check[SupervisedConfig]:
    """The check that each file exists, that no row is bad, that the template takes the first one, and that there are
    enough to fill a batch. With `all_rows`, files of any size are read whole.
    """

    def rows_can_be_learned(run: SupervisedConfig) -> Iterator[Problem]:
        skips, counts = run.bad_rows == "skip", list[CountedRows | None]()
        for field, sources in (("train_datasets", run.train_datasets), ("eval_datasets", run.eval_datasets)):
            for source in filter(_is_file, sources):
                try:
                    counted = count_rows(source, supervised_rows_of(run), all_rows=all_rows)
                except (DataError, OSError) as error:
                    yield Problem(path=field, message=str(error))
                    continue
                if counted and (all_rows or not skips):  # the run itself reports the rows that it skips
                    yield from bad_rows(counted, field, "bad_rows = skip", skips=skips)
                if counted and all_rows:  # as above
                    yield from blank_parts(counted, field, source)
                if counted:
                    files = readable_files(run.model.path, run.tokenizer_path)
                    yield from unknown_roles(counted, field, source, files, run.chat_template)
                if field == "train_datasets":
                    counts.append(counted)
                if reads_chats(run) and not skips and not (counted and counted.bad):
                    yield from _refused_chat(field, source, run)
        if counts and len(counts) == len(run.train_datasets) and run.epoch_tail != "short" and not run.num_dummy_steps:
            otherwise = ", or set epoch_tail = short"
            yield from too_few_rows(counts, "batch_size", run.batch_size, "rows", skips=skips, otherwise=otherwise)
        if all_rows and len(counts) == len(run.train_datasets) and not run.streaming and not run.num_dummy_steps:
            epochs = "num_epochs", run.num_epochs
            yield from steps_without_rows(counts, "num_steps", run.num_steps, run.batch_size, epochs, run.epoch_tail)

    return rows_can_be_learned


def _refused_chat(field: str, source: str, run: SFTConfig) -> Iterator[Problem]:
    """The problem of a file whose first row is a chat that the template refuses, or that has nothing to learn."""
    row = next(iter(iterate_rows(source)), None)
    if row is None or isinstance(row, BadRow):  # another check reports both
        return
    try:
        chat = chat_in(row, run)
        if chat is not None:
            message_weights(chat, all_messages=learns_all(run))
            _write_chat(chat, row, run)
    except ConfigError as error:
        yield from error.problems
    except DataError as error:
        yield Problem(path=field, message=f"{source}, row 0: {error}")
    except TemplateRefusal as error:
        yield Problem(path=field, message=f"{source}, row 0: the chat template refuses the chat: {error}")


def _write_chat(chat: Sequence[Message], row: Row, run: SFTConfig) -> None:
    """Render the chat by its template. Raises `TemplateRefusal` if it is refused in every spelling of its thoughts."""
    files = readable_files(run.model.path, run.tokenizer_path)
    template = configured_template(run.chat_template) or (files.chat_template if files else None)
    if files is None or template is None:  # other checks report both
        return
    tools = tools_of(row.get(run.tools_key), run.tools_key)
    variables = {**files.special_tokens, **({"tools": list(tools)} if tools else {}), **run.chat_template_kwargs}
    messages = with_system(list(chat), row.get(run.system_key))
    refusals = []
    for spelling in spellings(messages):
        try:
            render_template(template, spelling.spell(messages), **variables)
        except TemplateRefusal as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def _sources(run: SkyRLTrainConfig, *, training: bool) -> Iterator[tuple[str, str]]:
    """Dotted path and name of each source that is a file or an installed task of reasoning-gym; another check reports
    those that are missing.
    """
    fields = {"data.train_data": run.data.train_data if training and draws_rollouts(run) else ()}
    fields["data.val_data"] = run.data.val_data if draws_rollouts(run) and evaluates(run.trainer) else ()
    for field, sources in fields.items():
        for source in sources:
            if _is_file(source) or (source.startswith(SCHEME) and not _refused(source)):
                yield field, source


def _refused(source: str) -> bool:
    """Whether a source of reasoning-gym is one that another check reports."""
    try:
        return refusal(source) is not None
    except DataError:
        return True


def _is_file(source: str) -> bool:
    """Whether the source is a file with rows. Unlike Path's methods, `os.path` raises nothing for an invalid path."""
    return source.endswith(FILES) and os.path.isfile(os.path.expanduser(source))


def _read_first_row(run: SkyRLTrainConfig, field: str, source: str) -> FirstRow:
    columns = Columns(prompt=run.data.prompt_column, answer=run.data.answer_column)
    row = first_row(source, columns, skip=run.data.bad_rows == "skip")
    extras = {"data_source": data_source_of(row), **extras_of(row, columns)}
    named = row.get("env_class") or run.environment.task
    return FirstRow(
        source=source, field=field, env_class=named, messages=chat_of(row, 0, source, columns), extras=extras
    )


def _written_by_the_template(run: SkyRLTrainConfig, row: FirstRow) -> Iterator[Problem]:
    """The chat template takes the messages, and what it writes has room for an answer."""
    try:
        files = readable_files(run.trainer.policy.model.path, run.trainer.tokenizer_path)
        if files is None:  # another check reports it
            return
        text = _prompt_text(run, files, row, checked=not run.environment.agent.plays)
    except ConfigError as error:
        yield from error.problems
        return
    except DataError as error:
        yield Problem(path=row.field, message=f"{row.source}, row 0: {error}")
        return
    tokens = files.count_tokens(text) if text else None
    evaluation = run.generator.eval_sampling_params if row.field == "data.val_data" else None
    table = "sampling_params" if evaluation is None else "eval_sampling_params"
    answer, positions = (evaluation or run.generator.sampling_params).max_generate_length, files.positions
    if tokens and positions and tokens <= run.trainer.max_prompt_length and answer < positions < tokens + answer:
        yield Problem(
            path=f"generator.{table}.max_generate_length",
            message=f"{answer} tokens and the {tokens} of row 0 of {row.source} do not fit into the {positions} "
            "positions of the model",
            hint="lower it, or leave long prompts out with trainer.max_prompt_length",
        )


def _prompt_text(
    run: SkyRLTrainConfig, files: ModelFiles, row: FirstRow, *, checked: bool, tools: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """The prompt with the row's tools and these in the spelling of which the template drops the least; None if there is
    no template, which another check reports, or only the tokenizer can render it.

    Raises `DataError` if the template refuses it, or if it is `checked` and the template drops a part.
    """
    template = configured_template(run.generator.chat_template) or files.chat_template
    if template is None:
        return None
    variables = {**files.special_tokens, **run.generator.chat_template_kwargs}
    tools = with_tools(tools_in(row.extras, row.source), tools) if checked else ()

    def write(spelling: Spelling) -> str | None:
        tool_variables = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            return render_template(template, spelling.spell(row.messages), **{**variables, **tool_variables})
        except TemplateRefusal as error:
            raise DataError(f"the chat template refuses the prompt: {error}") from error

    def missing(text: str | None) -> Iterator[DroppedPart]:
        for message in row.messages if text is not None else ():
            yield from dropped(message, text or "", thoughts=False)
        yield from dropped_tools(tools if text is not None else (), text or "")

    allowed = not checked or bool(row.extras.get(ALLOW_DROPPED))
    fullest: FullestSpelling[str | None] = FullestSpelling()
    return fullest(row.messages, write, missing=missing, text_of=lambda text: text or "", allow_dropped=allowed)


def _judged(run: SkyRLTrainConfig, row: FirstRow, *, call: bool) -> Iterator[Problem]:
    """The environment takes the row; a reward function can be called with its columns, and with `call` it is."""
    if row.env_class is None:
        yield Problem(
            path="environment.env_class", message=f"{row.source}, row 0 names no env_class, and neither does this"
        )
        return
    try:
        if row.env_class == run.environment.task:
            find_env(row.env_class)
    except TaskError:  # another check reports the configuration's own
        return
    try:
        make = find_env_of_row(row.env_class, run.environment.task, run.environment.skyrl_gym)
        is_built_in = isinstance(make, type) and issubclass(make, Env) and make.__module__.startswith("skyrl.envs.")
        if is_built_in and row.env_class not in ANSWER_FORMATS:  # another check reports those
            make(deepcopy(row.extras))
    except TaskError as error:
        yield Problem(path="environment.env_class", message=f"{row.source}, row 0: {error}")
        return
    if call and (columns := ignored_columns(make, row.extras)):
        yield Problem(path=row.field, message=ignored_columns_warning(columns, row.env_class), severity="warning")
    problems = list(_signature_problems(row, make))
    yield from problems
    if call and not problems and not lacking(asked_by(make), row.extras):
        at_start = list(_unusable_tools(run, row, make))
        yield from at_start or _judge_problems(run, row, make)  # judging starts it again


def _signature_problems(row: FirstRow, make: MakeEnv) -> Iterator[Problem]:
    """A reward function accepts the arguments that it is called with; another check covers values that rows lack."""
    match make:
        case PlainReward(function=function):
            answers, columns = arguments(function, "", row.messages, row.extras)
            columns |= trainer_arguments(function, [SampledAnswer()], {}) if signature_of(function) == "trl" else {}
        case GroupReward(function=function):
            answers, columns = (), make.arguments(row.messages, [""], row.extras)
            columns |= trainer_arguments(function, [SampledAnswer()], {})
        case McpTask(reward=reward):
            yield from _signature_problems(row, reward)
            return
        case WeightedRewards(parts=parts):
            for part in parts:
                yield from _signature_problems(row, part.make)
            return
        case _:
            return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin, of which nothing is known
        return
    try:
        signature.bind(*answers, **(dict.fromkeys(lacking(asked_by(make), row.extras)) | columns))
    except TypeError as error:
        argument_list = ", ".join(
            ["an answer", *(f"{column}=" for column in columns)] if answers else [f"{column}=" for column in columns]
        )
        message = f"{name_of(make, str(row.env_class))} cannot be called with row 0 of {row.source}: {error}"
        yield Problem(path="environment.env_class", message=message, hint=f"it is called with {argument_list}")


def _judge_problems(run: SkyRLTrainConfig, row: FirstRow, make: MakeEnv) -> Iterator[Problem]:
    """Judge an empty answer, and then the ground truth as an answer, as a rollout does: with its deadline, and in a
    sandbox if that is configured. A user's environment is judged in its first turn.
    """
    if not _is_tried(row, make):
        return
    truth = ground_truth(row.extras)
    spoken = str(truth) if isinstance(truth, str | int | float) and truth != "" else "1"
    failures: dict[str, EpisodeError] = {}
    rewards: list[Sequence[float]] = []
    for answer in ("", spoken):
        try:
            rewards.append(_rewards_of(run, row, make, answer))
        except EpisodeError as error:
            if isinstance(error.outcome, Failure):
                failures[answer] = error
                if error.outcome.kind != "raised":  # the other answer does not explain it, and may take as long
                    break
    if failures:
        answer, failure = next(iter(failures.items()))
        hint = _hint_of(failure, answer, row, depends=len(failures) == 1, is_reward=_is_reward(make))
        yield Problem(path="environment.env_class", message=str(failure), hint=hint)
    elif isinstance(truth, int | float) and len(rewards) == 2 and rewards[0] == rewards[1]:
        yield Problem(
            path="environment.env_class",
            message=f"{row.env_class} gives the answer {spoken!r:.40} to row 0 of {row.source} the reward of an empty "
            f"answer, {', '.join(f'{reward:g}' for reward in rewards[0])}, and the ground truth is the number {spoken}",
            hint="a number equals no text: compare str(ground_truth), unless right answers have another form",
            severity="warning",
        )


def _is_tried(row: FirstRow, make: MakeEnv) -> bool:
    """Whether the task judges answers before the run; a judge at a service is not asked."""
    return (_is_reward(make) or _is_users_environment(make)) and row.env_class != PAIRWISE


def _rewards_of(run: SkyRLTrainConfig, row: FirstRow, make: MakeEnv, answer: str) -> Sequence[float]:
    """Rewards of the answer. Raises `EpisodeError` if it cannot be judged."""
    named = f"the answer {answer[:40]!r}" if answer else "an empty answer"
    subject = f"{row.env_class}, judging {named} to row 0 of {row.source},"
    calls = EnvCalls(1, run.environment.skyrl_gym.step_timeout_seconds)
    with event_loop() as run_until_done:
        rewards, _ = run_until_done(calls(subject, _judgement(make, row, answer)))
    return [number(reward, f"{subject} gave the reward") for reward in rewards]


def _hint_of(error: EpisodeError, answer: str, row: FirstRow, *, depends: bool, is_reward: bool) -> str:
    """Remedy for an answer that cannot be judged. `depends` says that the other answer can be; empty if the message
    says all that is known.
    """
    assert isinstance(error.outcome, Failure)
    if error.outcome.kind in ("wrong_type", "not_finite"):
        return "return one finite number for each answer"
    cause = error.__cause__
    if hint := _columns_hint(cause, row, answer):
        return hint
    # What code raises when a text is not of the form that it expects, such as a regular expression that finds nothing.
    finds_nothing = isinstance(cause, AttributeError) and bool(cause.name) and cause.obj is None
    is_of_text = finds_nothing or isinstance(cause, ValueError | IndexError | ArithmeticError)
    if error.outcome.kind != "raised" or not (depends or (is_reward and is_of_text)):
        return ""
    if answer:
        return "return a reward for every answer, or raise skyrl.envs.SkipSample"
    return "a model may give an empty answer: return a reward for it, or raise skyrl.envs.SkipSample"


def _columns_hint(error: BaseException | None, row: FirstRow, answer: str = "") -> str:
    """The columns of the row, if the error is that a key other than the answer was not found; else empty."""
    if not isinstance(error, KeyError) or not error.args or not isinstance(key := error.args[0], str) or key == answer:
        return ""
    meant = nearest(key, [*row.extras])
    return f"row 0 has {columns_text(row.extras)}" + (f"; did you mean {meant}?" if meant else "")


def _unusable_tools(run: SkyRLTrainConfig, row: FirstRow, make: MakeEnv) -> Iterator[Problem]:
    """The environment starts, a `ToolEnv` has tools, and the chat template shows them. An environment that never has
    tools is not started, and none that waits for a service.
    """
    try:
        tools = _offered_tools(run, row, make)
        if tools is None:
            return
        files = readable_files(run.trainer.policy.model.path, run.trainer.tokenizer_path)
        if not tools and isinstance(make, type) and issubclass(make, ToolEnv):
            message = f"{row.env_class} has no tools for row 0 of {row.source}"
            hint = "tools = (weigh,) in the class, or self.tools = (self.weigh,) in __init__, offers the function weigh"
            yield Problem(path="environment.env_class", message=message, hint=hint)
        if files is not None:
            _prompt_text(run, files, row, checked=True, tools=tools)
    except EpisodeError as error:
        if isinstance(error.outcome, Failure):
            hint = _columns_hint(error.__cause__, row)
            yield Problem(path="environment.env_class", message=error.outcome.reason, hint=hint)
    except DroppedPartsError as error:
        yield Problem(path="environment.env_class", message=f"{row.source}, row 0: {error}", hint=DESCRIBE_TOOLS)
    except (ConfigError, DataError):  # another check reports them
        return


def _offered_tools(run: SkyRLTrainConfig, row: FirstRow, make: MakeEnv) -> Sequence[Mapping[str, Any]] | None:
    """Schemas of the tools that the environment shows once it has started on the row; None if it is not started,
    because it never has tools or waits for a service. Raises `EpisodeError`.
    """
    return _result_of_started(run, row, make, lambda env: env.tool_schemas())


def _result_of_started(run: SkyRLTrainConfig, row: FirstRow, make: MakeEnv, ask: Callable[[Env], T]) -> T | None:
    """The result of `ask` for the environment once it has started on the row; None if it is not started, as for
    `_offered_tools`. Raises `EpisodeError`.
    """
    if not (isinstance(make, type) and issubclass(make, Env)) or make.tool_schemas is Env.tool_schemas:
        return None
    if inspect.iscoroutinefunction(make.init):
        return None
    who = f"{row.env_class}, starting on row 0 of {row.source},"
    calls = EnvCalls(1, run.environment.skyrl_gym.step_timeout_seconds)

    def answer() -> T:
        env = make(deepcopy(row.extras))
        try:
            env.init(deepcopy(tuple(row.messages)))
            return ask(env)
        finally:
            env.close()

    with event_loop() as run_until_done:
        result: T = run_until_done(calls(who, answer))[0]
    return result


def _is_users_environment(make: MakeEnv) -> bool:
    """Whether the task is an environment class of the user's that waits for nothing: its methods are no coroutines."""
    return (
        isinstance(make, type)
        and issubclass(make, Env)
        and not make.__module__.startswith("skyrl.")
        and not any(inspect.iscoroutinefunction(method) for method in (make.init, make.step, make.close))
    )


def _is_reward(make: MakeEnv) -> bool:
    """Whether the task is a reward function, or several."""
    match make:
        case WeightedRewards(parts=parts):
            return all(_is_reward(part.make) for part in parts)
        case IsolatedTask():
            return make.is_reward
        case McpTask(reward=reward):
            return _is_reward(reward)
    return isinstance(make, PlainReward | GroupReward)


def _judgement(make: MakeEnv, row: FirstRow, answer: str) -> Callable[[], Sequence[Any]]:
    """Function that calls the reward function once and returns its rewards, where None stands for no reward."""

    def judge() -> Sequence[Any]:
        prompt = row.messages[:-1] if begins_an_answer(row.messages) else row.messages
        messages, extras = deepcopy(prompt), deepcopy(row.extras)
        make_judge = make.reward if isinstance(make, McpTask) else make
        if isinstance(make_judge, GroupReward):
            return [reward for reward in make_judge.rewards(messages, [answer], extras) if reward is not None]
        env = make_judge(extras)
        try:
            env.init(messages)
            step: object = env.step(answer)
            if not isinstance(step, EnvStep):
                raise RewardError(
                    f"returned {step!r:.200} from step() instead of an EnvStep, such as EnvStep(reward=1.0, done=True)"
                )
            return [step.reward]
        finally:
            env.close()

    return judge

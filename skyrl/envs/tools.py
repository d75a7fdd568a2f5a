"""Environments in which the policy calls tools through the chat template.

The chat template describes the tools to the policy (`tools=`), the policy writes calls, and each call is answered with
a message of the role `tool`. A turn without a call is the final answer. A tool is a function, or a `Tool`.

    class Sums(ToolEnv):
        tools = (add, multiply)

        def judge(self, answer: str) -> EnvStep:
            return EnvStep(reward=float(answer.strip() == self.extras["reward_spec"]["ground_truth"]), done=True)

Mistakes of the model are reported to it and counted: a call that cannot be parsed, an unknown tool, arguments that do
not fit the schema, an exception or a missed deadline of the tool. If the service behind a tool fails (`ServiceError`,
or an error of skyrl), that is a failure of the environment instead, without a reward: see docs/environments.md.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from skyrl.chats.tool_calls import Call, CallParser, hermes
from skyrl.envs.coroutines import awaited
from skyrl.envs.env import Env, EnvStep, Message
from skyrl.envs.example_arguments import example_of
from skyrl.envs.http_json import ServiceError
from skyrl.envs.rows import tokenizable
from skyrl.errors import SkyRLError, TaskError
from skyrl.tree.frames import described, raised_at

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator  # a run without tools starts without it

_log = logging.getLogger(__name__)

MOST_CALLS = 16
"""Largest number of calls in one turn; the calls beyond it are answered with one error."""

SHOWN_CHARACTERS = 10_000
"""Largest number of characters of a call's result that are shown."""


class ToolFailed(Exception):
    """A failed call. Only the policy is told, in the words of the message: nothing is logged."""

    def __init__(self, message: str, counted: Literal["tool_errors", "tool_timeouts"] = "tool_errors") -> None:
        """`counted` is the metric that counts it."""
        super().__init__(message)
        self.counted = counted


@frozen(kw_only=True)
class Tool:
    """A tool that the policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: an object."""

    run: Callable[..., Any]
    """Called with the arguments by name, once they fit the schema. The policy sees the result: a text as it is,
    anything else as JSON."""

    seconds: float = 10.0
    """Deadline of one call. A thread cannot be killed, so code that may hang belongs in a sandbox."""

    _validator: Draft202012Validator = field(init=False, repr=False, eq=False)

    @_validator.default
    def _parameter_validator(self) -> Draft202012Validator:
        try:
            return _validator(json.dumps(dict(self.parameters), sort_keys=True, default=dict))
        except TaskError as error:
            raise TaskError(f"the tool {self.name}: {error}") from error.__cause__

    @classmethod
    def from_function(cls, function: Callable[..., Any], seconds: float = 10.0) -> Tool:
        """Make a tool from a function with annotations and a docstring in Google's style, whose `Args:` describe each
        parameter.

        Raises `TaskError` for a function whose annotations or docstring are incomplete, and for a method without its
        object.
        """
        if not callable(function) or not hasattr(function, "__name__"):
            raise TaskError(f"a tool is a function or a Tool(name=..., run=...), not {function!r:.80}")
        if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "self":
            name = function.__name__
            raise TaskError(f"the tool {name} is a method: set self.tools = (self.{name},) in __init__")
        from transformers.utils import chat_template_utils as chat

        try:
            schema = chat.get_json_schema(function)["function"]
        except (chat.DocstringParsingException, chat.TypeHintParsingException) as error:
            raise TaskError(f"the tool {function.__name__}: {error}") from error
        parameters = {**schema["parameters"], "additionalProperties": False}
        return cls(
            name=schema["name"],
            description=schema["description"],
            parameters=parameters,
            run=function,
            seconds=seconds,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form that chat templates and OpenAI's protocol use."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Reason why the tool refuses these arguments, or None."""
        from jsonschema.exceptions import best_match

        error = best_match(self._validator.iter_errors(dict(arguments)))
        return None if error is None else f"the arguments of {self.name} do not fit: {error.message:.300}"


@frozen(kw_only=True)
class TriedTool:
    """A tool that was called with arguments made up from its schema, before a run."""

    name: str
    arguments: Mapping[str, Any] | None
    """The arguments; None if none that fit the schema could be made up, so that the tool was not called."""

    returned_none: bool = False
    """Whether the call returned None, as a function does that prints its result."""

    failure: str = ""
    """Reason why the call is a failure of the tool: it raised an exception, named with its place, or did not return in
    time. Empty if there is none, and after `ToolFailed`, by which a tool refuses arguments."""


class ToolEnv(Env):
    """Subclass it, name its `tools`, and write `judge`. Its metrics count calls and failed calls."""

    tools: Sequence[Tool | Callable[..., Any]] = ()
    """Tools of the environment, where a function stands for `Tool.from_function` of it; may also be set in `__init__`,
    for tools of a single episode."""

    shown_characters = SHOWN_CHARACTERS
    """Largest number of characters of a call's result that are shown."""

    parse: CallParser = staticmethod(hermes)
    """Parser for the model's call format."""

    @cached_property
    def _counts(self) -> dict[str, float]:
        return dict.fromkeys(("tool_calls", "malformed_calls", "tool_errors", "tool_timeouts"), 0.0)

    @cached_property
    def _tools_by_function(self) -> dict[Callable[..., Any], Tool]:
        return {}

    def judge(self, answer: str) -> EnvStep:
        """The reward of a turn without a call. The episode may still continue with another turn."""
        raise TypeError(f"{type(self).__name__} does not define judge()")

    def step(self, action: str) -> EnvStep:
        calls = self.parse(action)
        if not calls:
            return self.judge(action)
        if len(calls) > MOST_CALLS:
            left_out = Call(unreadable=f"{len(calls) - MOST_CALLS} calls were left out: {MOST_CALLS} in a turn at most")
            calls = (*calls[:MOST_CALLS], left_out)
        return EnvStep(reward=0.0, done=False, observations=tuple(self._tool_message(call) for call in calls))

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(tool.schema for tool in self._offered())

    def get_metrics(self) -> dict[str, float]:
        return dict(self._counts)

    def try_tools(self) -> Iterator[TriedTool]:
        """Call each tool once with arguments that are made up from its schema. Raises `TaskError` for what is no
        tool.
        """
        for tool in self._offered():
            arguments = example_of(tool.parameters)
            if not isinstance(arguments, Mapping) or tool.refusal(arguments):
                yield TriedTool(name=tool.name, arguments=None)
                continue
            outcome = _run(tool, arguments)
            failure = f"returned nothing within {tool.seconds:g} s"
            if outcome is not None:
                error = outcome[1]
                failure = "" if error is None or isinstance(error, ToolFailed) else f"raised {described(error)}"
            returned_none = outcome == (None, None)
            yield TriedTool(name=tool.name, arguments=arguments, returned_none=returned_none, failure=failure)

    def _offered(self) -> Iterator[Tool]:
        """The tools. Raises `TaskError` for what is none."""
        named: object = self.tools
        if not isinstance(named, Iterable):
            kind = type(named).__name__
            raise TaskError(f"{type(self).__name__}.tools is a {kind}, not a tuple: write (tool,) in place of tool")
        for item in named:
            if isinstance(item, Tool):
                yield item
                continue
            if not inspect.isroutine(item) or item not in self._tools_by_function:
                self._tools_by_function[item] = Tool.from_function(item)
            yield self._tools_by_function[item]

    def _tool_message(self, call: Call) -> Message:
        self._counts["tool_calls"] += 1
        number = int(self._counts["tool_calls"])
        message = {"role": "tool", "name": tokenizable(call.name) or "unknown", "tool_call_id": f"call{number:05}"}
        text = tokenizable(self._result(call))
        if len(text) > self.shown_characters:
            text = f"{text[: self.shown_characters]}\n... cut at {self.shown_characters} characters"
        return message | {"content": text}

    def _result(self, call: Call) -> str:
        offered = tuple(self._offered())
        tool = next((item for item in offered if item.name == call.name), None)
        refusal = call.unreadable or (
            f"there is no tool {call.name!r:.80}; there are {', '.join(entry.name for entry in offered)}"
            if tool is None
            else tool.refusal(call.arguments)
        )
        if tool is None or refusal:
            self._counts["malformed_calls"] += 1
            return f"Error: {refusal}"
        outcome = _run(tool, call.arguments)
        if outcome is None:
            self._counts["tool_timeouts"] += 1
            return f"Error: {tool.name} gave nothing within {tool.seconds:g} s"
        value, error = outcome
        if isinstance(error, ServiceError | SkyRLError):  # includes SkipSample
            raise error
        if isinstance(error, ToolFailed):
            self._counts[error.counted] += 1
            return f"Error: {error}"
        if error is not None:
            self._counts["tool_errors"] += 1
            _report_once(tool.name, error)
            return f"Error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Draft202012Validator:
    """The validator of a JSON schema, which all episodes share. Raises `TaskError`."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    parameters = json.loads(schema)
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise TaskError(f"its parameters are not a JSON schema: {error.message}") from error
    return Draft202012Validator(parameters)


_REPORTED: set[tuple[str, str, str]] = set()
"""Tool, place and kind of each exception that was logged."""


def _report_once(tool: str, error: BaseException) -> None:
    """Log, once for each tool, place and kind, an exception that the policy sees as the result of its call."""
    kind = (tool, raised_at(error), type(error).__name__)
    if kind not in _REPORTED:
        _REPORTED.add(kind)
        _log.warning("the tool %s raised %s: the answer to the call says so", tool, described(error))


def _run(tool: Tool, arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None] | None:
    """Result or exception of a call; None at the deadline, when the thread is abandoned."""
    outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            outcome.put((awaited(tool.run(**arguments)), None))
        except BaseException as error:  # noqa: BLE001  # every exception of a tool is reported or raised above
            outcome.put((None, error))

    Thread(target=call, daemon=True, name=f"tool {tool.name}").start()
    try:
        return outcome.get(timeout=tool.seconds)
    except Empty:
        return None

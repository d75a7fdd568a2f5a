"""Environments whose policy calls tools in the chat format.

The chat template shows the policy what there is (`tools=`), the policy writes calls, and each is answered with a
message of the role `tool`. A turn without a call is the answer.

    class Sums(ToolEnv):
        tools = (Tool.of(add), Tool.of(multiply))

        def judge(self, answer: str) -> EnvStep:
            return EnvStep(reward=float(answer.strip() == self.extras["reward_spec"]["ground_truth"]), done=True)

What the model did wrong, it is told, and it is counted: a call that cannot be read, a tool that there is not,
arguments against the schema, an exception or a missed deadline of the tool. A service behind a tool that fails
(`ServiceError`, or an error of skyrl's) is the environment's failure instead: no reward, see docs/environments.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from attrs import field, frozen
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from skyrl.chats.tool_calls import Call, CallParser, hermes
from skyrl.envs.coroutines import settled
from skyrl.envs.env import Env, EnvStep, Message
from skyrl.envs.http_json import ServiceError
from skyrl.envs.texts import tokenizable
from skyrl.errors import SkyRLError, TaskError
from skyrl.tree.frames import raised_at

_log = logging.getLogger(__name__)

MOST_CALLS = 16
"""Largest number of calls in one turn; each further one is answered with an error."""

SHOWN_CHARACTERS = 10_000
"""Characters that are shown of the result of one call."""


@frozen(kw_only=True)
class Tool:
    """Something that the policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: an object."""

    run: Callable[..., Any]
    """Called with the arguments by name, once they fit the schema. What it gives is shown: a text as it is, anything
    else as JSON."""

    seconds: float = 10.0
    """Deadline of one call. A thread cannot be killed: what hangs for certain belongs into a sandbox."""

    _validator: Draft202012Validator = field(init=False, repr=False, eq=False)

    @_validator.default
    def _of_parameters(self) -> Draft202012Validator:
        try:
            Draft202012Validator.check_schema(dict(self.parameters))
        except SchemaError as error:
            raise TaskError(f"the tool {self.name}: its parameters are no JSON schema: {error.message}") from error
        return Draft202012Validator(dict(self.parameters))

    @classmethod
    def of(cls, function: Callable[..., Any], seconds: float = 10.0) -> Tool:
        """From a function with annotations and a docstring in Google's style, whose `Args:` describe each parameter.

        Raises `TaskError` for a function that does not say enough.
        """
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
        """The tool's schema in the form of chat templates and OpenAI's protocol."""
        shown = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": shown}

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Reason why the tool refuses these arguments, or None."""
        error = best_match(self._validator.iter_errors(dict(arguments)))
        return None if error is None else f"the arguments of {self.name} do not fit: {error.message:.300}"


class ToolEnv(Env):
    """Subclass it, name its `tools`, and write `judge`. Its metrics count calls, and what went wrong with them."""

    tools: Sequence[Tool] = ()
    """May be set in `__init__`, too, where a tool belongs to the episode."""

    parse: CallParser = staticmethod(hermes)
    """How the model writes its calls."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self._counts = dict.fromkeys(("tool_calls", "malformed_calls", "tool_errors", "tool_timeouts"), 0.0)

    def judge(self, answer: str) -> EnvStep:
        """The reward of a turn without a call. The episode may continue with another turn, too."""
        raise TypeError(f"{type(self).__name__} does not define judge()")

    def step(self, action: str) -> EnvStep:
        calls = self.parse(action)
        if not calls:
            return self.judge(action)
        if len(calls) > MOST_CALLS:
            left_out = Call(unreadable=f"{len(calls) - MOST_CALLS} calls were left out: {MOST_CALLS} in a turn at most")
            calls = (*calls[:MOST_CALLS], left_out)
        return EnvStep(reward=0.0, done=False, observations=tuple(self._told(call) for call in calls))

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(tool.schema for tool in self.tools)

    def get_metrics(self) -> dict[str, float]:
        return dict(self._counts)

    def _told(self, call: Call) -> Message:
        self._counts["tool_calls"] += 1
        number = int(self._counts["tool_calls"])
        told = {"role": "tool", "name": tokenizable(call.name) or "unknown", "tool_call_id": f"call{number:05}"}
        return told | {"content": _cut(tokenizable(self._result(call)))}

    def _result(self, call: Call) -> str:
        tool = next((each for each in self.tools if each.name == call.name), None)
        refusal = call.unreadable or (self._unknown(call) if tool is None else tool.refusal(call.arguments))
        if tool is None or refusal:
            self._counts["malformed_calls"] += 1
            return f"Error: {refusal}"
        outcome = _run(tool, call.arguments)
        if outcome is None:
            self._counts["tool_timeouts"] += 1
            return f"Error: {tool.name} gave nothing within {tool.seconds:g} s"
        value, error = outcome
        if isinstance(error, ServiceError | SkyRLError):  # SkipSample among these
            raise error
        if error is not None:
            self._counts["tool_errors"] += 1
            _report_once(tool.name, raised_at(error), type(error).__name__)
            return f"Error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)

    def _unknown(self, call: Call) -> str:
        return f"there is no tool {call.name!r:.80}; there are {', '.join(tool.name for tool in self.tools)}"


@cache
def _report_once(tool: str, place: str, kind: str) -> None:
    """The policy reads what its call raised; its author reads the line, once for each."""
    _log.warning("the tool %s raised %s%s: the answer to the call says so", tool, kind, f" ({place})" if place else "")


def _run(tool: Tool, arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None] | None:
    """Result or exception of a call; None at its deadline, when its thread is left behind."""
    outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            outcome.put((settled(tool.run(**arguments)), None))
        except BaseException as error:  # noqa: BLE001  # whatever a user's tool raises is told or raised above
            outcome.put((None, error))

    Thread(target=call, daemon=True, name=f"tool {tool.name}").start()
    try:
        return outcome.get(timeout=tool.seconds)
    except Empty:
        return None


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= SHOWN_CHARACTERS
        else f"{text[:SHOWN_CHARACTERS]}\n... cut at {SHOWN_CHARACTERS} characters"
    )

"""Reward functions as environments, in the signatures of skyrl, TRL, verl and OpenRLHF.

    skyrl   function(completion, ground_truth=..., **columns) -> number, or a dict with `reward`, its components and
            the text `feedback`, which a teacher is told; with a parameter `prompt` or `data_source`, the messages of
            the prompt or the name of its source as well
    TRL     function(completions=[...], **columns) -> list of numbers, None where it has no reward for a sample
    verl    function(data_source=..., solution_str=..., ground_truth=..., extra_info=...) -> number or dict with `score`
    OpenRLHF    function(queries=[...], prompts=[...], labels=[...]) -> dict with `rewards`, `scores`, `extra_logs`

The signature is recognised by its parameters: TRL's has `completions` or `completion_ids`, verl's `solution_str`. Each
may be `async def`. A TRL function is called with one sample at a time; `group_rewards.py` passes all samples of a
prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

from attrs import frozen

from skyrl.envs.coroutines import awaited
from skyrl.envs.env import Env, EnvStep, Message, SampleAwareEnv, SampledAnswer
from skyrl.envs.rows import ground_truths
from skyrl.errors import SkipSample

Signature = Literal["skyrl", "trl", "verl", "openrlhf"]


class TrainerState:
    """State of the trainer for a reward function of TRL's form: the number of training steps before the sample."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has only global_step here, and no {name}")


class RewardFunctionEnv(SampleAwareEnv):
    """One turn, rewarded by a plain function."""

    def __init__(self, extras: Mapping[str, Any], function: Callable[..., Any]) -> None:
        super().__init__(extras)
        self._function = function
        self._prompt: Sequence[Mapping[str, str]] = ()
        self._measured: dict[str, float] = {}
        self._answer: str | None = None

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self._prompt = prompt
        return super().init(prompt)

    def step(self, action: str) -> EnvStep:
        answers, columns = arguments(self._function, action, self._prompt, self.extras)
        if signature_of(self._function) == "trl":
            columns |= trainer_arguments(self._function, [self.sampled], self._measured)
        result = awaited(self._function(*answers, **columns))
        result = result.tolist() if hasattr(result, "tolist") else result  # an array or a tensor
        components: dict[str, Any] = {}
        feedback: str | None = None
        match signature_of(self._function):
            case "trl":
                if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 1:
                    raise TypeError(
                        f"a TRL reward function gives a list with one number for each completion, not {result!r:.100}"
                    )
                if result[0] is None:
                    raise SkipSample("the reward function gives None: it has no reward for this sample")
                result = result[0]
            case "verl" if isinstance(result, Mapping):
                result = self._measure(result)
            case "openrlhf":
                result = self._measure_openrlhf(result)
            case "skyrl" if isinstance(result, Mapping) and "reward" in result:
                components = {name: part for name, part in result.items() if name != "reward"}
                if isinstance(components.get("feedback"), str):
                    feedback = components.pop("feedback")
                result = result["reward"]
        return EnvStep(reward=result, done=True, answer=self._answer, feedback=feedback, components=components)

    def get_metrics(self) -> dict[str, float]:
        return self._measured

    def _measure(self, result: Mapping[str, Any]) -> Any:
        """The score that the function returned; other numbers become metrics."""
        numbers = {name: value for name, value in result.items() if isinstance(value, bool | int | float)}
        self._measured = {name: float(value) for name, value in numbers.items() if name != "score"}
        self._answer = result["pred"] if isinstance(result.get("pred"), str) else None
        return result["score"]

    def _measure_openrlhf(self, result: object) -> float:
        """The reward that a function of OpenRLHF returned; its score and its other numbers become metrics."""
        if not isinstance(result, Mapping) or result.get("rewards") is None:
            raise TypeError(f"an OpenRLHF reward function gives a dict with `rewards`, not {result!r:.100}")
        logs = result.get("extra_logs") or {}
        self._measured = {name: _single_number(name, value) for name, value in logs.items()}
        if result.get("scores") is not None:
            self._measured["score"] = _single_number("scores", result["scores"])
        return _single_number("rewards", result["rewards"])


def _single_number(name: str, value: object) -> float:
    """The number of one sample: itself, or the only entry of a list or tensor. Raises `TypeError`."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(plain, Sequence) and not isinstance(plain, str) and len(plain) == 1:
        plain = plain[0]
    if isinstance(plain, bool | int | float):
        return float(plain)
    raise TypeError(f"`{name}` of an OpenRLHF reward function has one number for each query, not {value!r:.100}")


@frozen
class PlainReward:
    """Makes the environments of a reward function, which scores one answer at a time."""

    function: Callable[..., Any]

    def __call__(self, extras: Mapping[str, Any]) -> Env:
        return RewardFunctionEnv(extras, self.function)


def arguments(
    function: Callable[..., Any], answer: str, prompt: Sequence[Mapping[str, str]], extras: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Positional and keyword arguments for a reward function, according to its signature.

    A TRL function receives a batch of one sample: each column is a list, and prompt and completion are chats. So does
    a function of OpenRLHF, whose prompt is the text of the messages and whose query is the prompt with the answer,
    without the marks of a chat template.
    """
    truth, reserved = ground_truth(extras), reserved_names(function)
    columns = {name: value for name, value in extras.items() if name not in reserved}
    match signature_of(function):
        case "trl":
            lists = {name: [value] for name, value in {**columns, "ground_truth": truth}.items()}
            chat = [{"role": "assistant", "content": answer}]
            return (), {**lists, "prompts": [list(prompt)], "completions": [chat]}
        case "verl":
            others = {"ground_truth": truth, "extra_info": extras.get("extra_info")}
            return (), {"data_source": extras.get("data_source"), "solution_str": answer, **others}
        case "openrlhf":
            prompt_text = "\n".join(str(message.get("content") or "") for message in prompt) + "\n"
            return (), {"queries": [prompt_text + answer], "prompts": [prompt_text], "labels": [truth]}
        case _:
            columns.pop("data_source", None)
            more = {"prompt": list(prompt), "data_source": extras.get("data_source")}
            named = _signature(function).keys() - reserved - columns.keys()
            columns |= {name: value for name, value in more.items() if name in named}
            return (answer,), {**columns, "ground_truth": truth}


def ground_truth(extras: Mapping[str, Any]) -> object:
    """The first of the ground truths of a row; None if there is none."""
    return next(iter(ground_truths(extras).values()), None)


def trainer_arguments(
    function: Callable[..., Any], sampled: Sequence[SampledAnswer], measured: dict[str, float]
) -> dict[str, Any]:
    """Arguments that TRL's trainer adds, of those that the function takes: tokens, the trainer's state, and functions
    whose numbers are put into `measured`, as means over the samples.
    """

    def log_metric(name: str, value: Any) -> None:
        measured[str(name)] = float(value)

    def log_extra(column: str, values: Sequence[Any]) -> None:
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if numbers and len(numbers) == len(values):
            measured[str(column)] = sum(numbers) / len(numbers)

    added = {
        "completion_ids": [list(sample.token_ids) for sample in sampled],
        "trainer_state": TrainerState(min(item.version for item in sampled)),
        "log_metric": log_metric,
        "log_extra": log_extra,
    }
    parameters = _signature(function)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return added if takes_all else {name: value for name, value in added.items() if name in parameters}


OF_THE_TRAINER = (
    *("prompts", "completions", "completion", "completion_ids", "environments"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""Arguments that TRL's trainer gives itself: a column of such a name is not passed to a function of its form."""


def reserved_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names of columns that are not passed to a reward function, because they are names of its other arguments: those
    of the answer, the object it is a method of, and those that `functools.partial` has set.
    """
    inner = function
    names: set[str] = set()
    while isinstance(inner, partial):
        names |= {*inner.keywords}
        inner = inner.func
    if not inspect.isfunction(inner):
        names |= {*_parameters(getattr(inner, "__func__", type(inner).__call__))[:1]}
    match signature_of(function):
        case "trl":
            return frozenset(names | {*OF_THE_TRAINER})
        case "verl" | "openrlhf":
            return frozenset()
    return frozenset(names | {*_parameters(function)[:1]})


@lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters by name; none for a builtin without a signature. Kept, because a step asks for them for each sample,
    and reading them takes 40 microseconds.
    """
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that may be given by position and by name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [parameter.name for parameter in _signature(function).values() if parameter.kind is kind]


_ALWAYS_GIVEN = {
    "skyrl": ("prompt", "data_source"),
    "trl": ("data_source", "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    "verl": ("data_source", "solution_str", "extra_info"),
    "openrlhf": ("data_source", "queries", "prompts"),
}


def required_columns(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that need a value from the row: those without a default, except the answer itself."""
    parameters = list(_signature(function).values())
    form = signature_of(function)
    own = parameters[1:] if form == "skyrl" else parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = (item.name for item in own if item.kind in kinds and item.default is inspect.Parameter.empty)
    names = tuple(name for name in required if name not in _ALWAYS_GIVEN[form])
    return tuple("ground_truth" if form == "openrlhf" and name == "labels" else name for name in names)


def lacking(required: Sequence[str], extras: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in `required`, from `required_columns`, for which the row has no value."""

    def value(name: str) -> object:
        return ground_truth(extras) if name == "ground_truth" else extras.get(name)

    return tuple(name for name in required if value(name) is None)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Kind of a reward function, by the names of its parameters."""
    names = _signature(function)
    if "solution_str" in names:
        return "verl"
    if "queries" in names:
        return "openrlhf"
    return "trl" if {"completions", "completion_ids"} & names.keys() else "skyrl"

"""One attempt at one sample: a new environment, and the turns until it is done.

    begin() -> first request -> play(first completion) -> Trajectory, or EpisodeError

The caller provides the first completion, because the samples of a prompt begin with the same tokens and are requested
from the engine together.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar, cast

import attrs
from attrs import evolve, frozen

from skyrl.chats.contents import ALLOW_DROPPED, DESCRIBE_TOOLS, tool_name, with_tools
from skyrl.chats.rendering import Message, Template
from skyrl.config import GeneratorConfig, SamplingParams
from skyrl.envs import Env, EnvStep
from skyrl.envs.env import SampleAwareEnv, SampledAnswer
from skyrl.envs.registry import MakeEnv, answers_immediately, starts_immediately
from skyrl.envs.rows import capped_max_turns, copied
from skyrl.errors import DataError, DroppedPartsError, TextError
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.rollout.agent_runner import AgentRunner
from skyrl.rollout.chats import Chat, ChatTurn
from skyrl.rollout.env_calls import EnvCalls, EpisodeError, called_immediately, number
from skyrl.rollout.filters import drop_truncated
from skyrl.rollout.transcript import Transcript
from skyrl.trajectory import Failure, Prompt, Skipped, StopReason, TokenRow, Trajectory

T = TypeVar("T")
R = TypeVar("R")

LONGEST_OBSERVATION = 1_000_000
"""Maximum number of characters of the observations of a step: more than any model reads, few enough to tokenize."""


@frozen(kw_only=True)
class EpisodeContext:
    """Objects that the episodes of one call of the generator share."""

    config: GeneratorConfig
    sampling: SamplingParams
    client: InferenceEngineClient
    tokenizer: Any
    chat: Callable[[], Chat]
    """Makes the chat mode, when a second turn needs it."""

    call: EnvCalls
    agent: AgentRunner | None = None
    """The agent that plays the episodes; None if the policy plays them itself."""


class Episode:
    """One attempt at one sample. Single use: call `begin`, `play`, and `close` in every case."""

    def __init__(self, context: EpisodeContext, prompt: Prompt, make: MakeEnv, key: SampleKey) -> None:
        self.key = key
        self._context, self._prompt, self._make = context, prompt, make
        self._env: Env | None = None
        self._transcript = Transcript(prompt.token_ids, with_logprobs=context.sampling.logprobs is not None)
        self._earlier_rows: list[TokenRow] = []
        self._initial_messages: Sequence[Message] = prompt.question
        self._dialogue: list[Message] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._turns = 0
        self._answer: str | None = None
        self._feedback: str | None = None
        self._metrics: dict[str, float] = {}
        self._components: dict[str, float] = {}
        self._seconds = {"llm": 0.0, "env": 0.0, "env_run": 0.0}
        self._begun = time.perf_counter()

    async def begin(self) -> GenerationRequest:
        """Make the environment; returns the request for the first turn. Raises `EpisodeError`."""
        prompt = self._prompt
        started: Started = await self._call_env(
            self._call_description("starting on"),
            _start_environment,
            self._make,
            self._extras(),
            copied(prompt.question),
            immediate=starts_immediately(self._make),
        )
        self._env, messages, tools = started
        self._initial_messages, self._tools = messages, with_tools(tools, prompt.tools)
        config = self._context.config
        changed = messages != prompt.question or self._tools != prompt.tools
        if changed or config.chat_template.name_or_path is not None:
            kwargs, tokenizer = config.chat_template_kwargs, self._context.tokenizer
            template = Template(tokenizer=tokenizer, arguments=kwargs, tools=self._tools)
            allowed = self._context.agent is not None or bool(prompt.extras.get(ALLOW_DROPPED))
            try:
                with self._readable("starting on"):
                    ids = template.start([*messages, *prompt.answer_prefix], allow_dropped=allowed)
            except DroppedPartsError as error:
                if not {*error.tools} & {*map(tool_name, tools)}:
                    raise
                raise DataError(f"{error}; or {DESCRIBE_TOOLS}") from error  # what an environment may do about it
            self._transcript = self._transcript.restarted(ids)
        return self._request(self.key)

    async def play(self, completion: Completion) -> Trajectory:
        """Play the episode from the first completion to its end. Raises `EpisodeError` if the environment fails."""
        if self._prompt.answer_prefix:
            completion = evolve(completion, text=self._prompt.full_answer(completion.text))
        while True:
            self._transcript.sample(completion)
            step = await self._judge(completion)
            self._turns += 1
            if step.done or self._turns >= self._context.config.max_turns:
                break
            if not self._prepare_next_turn(completion, step):
                assert self._env is not None, "play() comes after begin()"
                subject = self._call_description("measuring")
                self._metrics = _numbers(await self._call_env(subject, self._env.get_metrics), subject)
                return self._trajectory("context")
            request = self._request(evolve(self.key, turn=self._turns))
            (completion,) = await self._timed("llm", self._context.client.generate(request))
        if self._context.config.max_turns > 1:
            self._context.chat().end(self._transcript, completion)
        return self._trajectory(completion.stop_reason if completion.token_ids else "context")

    def _prepare_next_turn(self, completion: Completion, step: EnvStep) -> bool:
        """Whether another turn fits; if so, the transcript becomes the prompt of that turn."""
        self._dialogue += ({"role": "assistant", "content": completion.text}, *step.observations)
        turn = ChatTurn(
            completion=completion,
            observations=step.observations,
            prompt=self._initial_messages,
            messages=self._dialogue,
            tools=self._tools,
        )
        before, as_sampled = self._transcript, self._transcript.copy()
        with self._readable("answering in"):
            self._transcript = self._context.chat().go_on(before, turn)
        if self.too_long:
            self._transcript = as_sampled
            return False
        if self._transcript is not before:
            self._earlier_rows.append(before.step())
        return True

    @property
    def too_long(self) -> bool:
        """Whether the next turn would start from more than `max_input_length` tokens; None: there is no limit."""
        longest = self._context.config.max_input_length
        return longest is not None and len(self._transcript.input_ids) > longest

    def unplayed(self) -> Trajectory:
        """The trajectory of an episode that was too long before its first turn."""
        return self._trajectory("context")

    @property
    def is_open(self) -> bool:
        """Whether there is an environment that has something to close."""
        return self._env is not None and type(self._env).close is not Env.close

    async def close(self) -> None:
        """Close the environment, if it exists and has something to close. Raises `EpisodeError`."""
        env, self._env, is_open = self._env, None, self.is_open
        if env is not None and is_open:
            await self._call_env(self._call_description("closing after"), env.close)

    def waited_for_the_engine(self, seconds: float) -> None:
        """Record that the first completion took `seconds`."""
        self._seconds["llm"] += seconds

    async def _judge(self, completion: Completion) -> EnvStep:
        subject = self._call_description("judging an answer to", completion.text)
        assert self._env is not None, "play() comes after begin()"
        last = self._turns + 1 >= self._context.config.max_turns
        sampled = SampledAnswer(token_ids=completion.token_ids, version=self.key.weight_version)
        stepped: StepAndMetrics = await self._call_env(
            subject,
            _step_and_metrics,
            self._env,
            completion.text,
            sampled,
            last,
            immediate=answers_immediately(self._make),
        )
        step, metrics = stepped
        if not isinstance(step, EnvStep):
            raise _wrong(f"{subject} returned {step!r:.200} from step() instead of an EnvStep")
        _refuse_unreadable(step.observations, subject)
        if not isinstance(step.answer, str | None):
            raise _wrong(f"{subject} read the answer {step.answer!r:.200}, which is not a text")
        if not isinstance(step.feedback, str | None):
            raise _wrong(f"{subject} gave the feedback {step.feedback!r:.200}, which is not a text")
        self._answer, self._feedback = step.answer, step.feedback
        self._transcript.credit(number(step.reward, f"{subject} gave the reward"))
        if not isinstance(step.components, Mapping):
            raise _wrong(f"{subject} gave the components {step.components!r:.200}, which are not numbers by name")
        for name, part in _numbers(step.components, subject).items():
            self._components[name] = self._components.get(name, 0.0) + part
        if not step.done and self._context.config.max_turns == 1 and self._context.agent is None:
            raise _wrong(f"{subject} wants another turn, but generator.max_turns is 1")
        self._metrics = _numbers(metrics, subject)
        return step

    def _trajectory(self, reason: StopReason) -> Trajectory:
        config = self._context.config
        steps = [*self._earlier_rows, self._transcript.step()]
        if reason != "stop" and config.zero_reward_on_non_stop:
            steps = [evolve(step, rewards=tuple(evolve(turn, reward=0.0) for turn in step.rewards)) for step in steps]
        trajectory = Trajectory(
            prompt_id=self._prompt.id,
            sample_index=self.key.sample_index,
            earlier=tuple(steps[:-1]),
            **attrs.asdict(steps[-1], recurse=False),
            stop_reason=reason,
            answer=self._answer,
            feedback=self._feedback,
            metrics=self._metrics,
            components=self._components,
            timings={"completion": time.perf_counter() - self._begun, **self._seconds},
        )
        return drop_truncated(trajectory) if config.apply_overlong_filtering else trajectory

    @property
    def name(self) -> str:
        """Name of the sample in messages."""
        return f"{self._prompt.env_class}, sample {self.key.sample_index} of prompt {self._prompt.id},"

    def retry(self, attempt: int) -> Self:
        """A new attempt at the sample, with another environment and other random numbers."""
        return type(self)(self._context, self._prompt, self._make, evolve(self.key, attempt=attempt))

    def failed(self, failures: tuple[Failure, ...]) -> Trajectory:
        """The trajectory that replaces a failed sample: the prompt alone, with no reward."""
        blank = Episode(self._context, self._prompt, self._make, self.key)
        return evolve(blank._trajectory("stop"), failures=failures, failed=True)

    def skipped(self, outcome: Skipped, failures: tuple[Failure, ...]) -> Trajectory:
        """The trajectory that replaces a skipped sample: the prompt alone, with no reward."""
        return evolve(self.failed(failures), skipped=outcome.reason, failed=False)

    def _request(self, key: SampleKey) -> GenerationRequest:
        return GenerationRequest(prompt_ids=self._transcript.input_ids, sampling=self._context.sampling, keys=(key,))

    def _extras(self) -> dict[str, Any]:
        """A copy of the row's columns for this environment, whose changes no other sample sees."""
        extras = {"data_source": self._prompt.data_source, **copied(dict(self._prompt.extras))}
        most = self._context.config.max_turns
        return extras | ({"max_turns": capped_max_turns(extras, most)} if most > 1 else {})

    @contextmanager
    def _readable(self, doing: str) -> Iterator[None]:
        """Turn text that no tokenizer accepts into a failure of this sample, whatever its origin."""
        try:
            yield
        except TextError as error:
            raise _wrong(f"{self._call_description(doing)} returned text that cannot be tokenized: {error}") from error

    async def _call_env(
        self, subject: str, function: Callable[..., T | Awaitable[T]], *args: object, immediate: bool = False
    ) -> T:
        """The function's result. With `immediate`, no thread calls it, and it must be no coroutine."""
        if immediate:
            result, ran = called_immediately(subject, cast(Callable[..., T], function), *args)
            self._seconds["env"] += ran
        else:
            result, ran = await self._timed("env", self._context.call(subject, function, *args))
        self._seconds["env_run"] += ran
        return result

    async def _timed(self, name: str, work: Awaitable[T]) -> T:
        start = time.perf_counter()
        try:
            return await work
        finally:
            self._seconds[name] += time.perf_counter() - start

    def _call_description(self, doing: str, answer: str | None = None) -> str:
        excerpt = "" if answer is None else f" ({answer[:80]!r})"
        return f"{self._prompt.env_class}, {doing} prompt {self._prompt.id}{excerpt},"


Started = tuple[Env, Any, Any]
"""An environment, the messages to start from, and its tools, which code of users made."""

StepAndMetrics = tuple[Any, Any]
"""A step of an environment and its metrics, which code of users made."""


def _start_environment(
    make: MakeEnv, extras: dict[str, Any], messages: tuple[Message, ...]
) -> Started | Awaitable[Started]:
    """A new environment, the messages to start from and its tools; of one with an `async def init`, a coroutine."""
    env = make(extras)
    started: Any = env.init(messages)

    def with_tools(started: object) -> Started:
        if not (isinstance(started, tuple) and len(started) == 2):
            raise TypeError(f"init() returned {started!r:.200} instead of (messages, information)")
        return env, tuple(started[0]), env.tool_schemas()

    return _then(started, with_tools)


def _step_and_metrics(
    env: Env, answer: str, sampled: SampledAnswer, last: bool
) -> StepAndMetrics | Awaitable[StepAndMetrics]:
    """One step of the environment, and its metrics if the step is the last; of an `async def step`, a coroutine."""
    if isinstance(env, SampleAwareEnv):
        env.set_sampled(sampled)

    def with_metrics(step: object) -> StepAndMetrics | Awaitable[StepAndMetrics]:
        ends = last or not isinstance(step, EnvStep) or step.done
        return _then(env.get_metrics() if ends else {}, lambda metrics: (step, metrics))

    return _then(env.step(answer), with_metrics)


def _then(value: T | Awaitable[T], finish: Callable[[T], R | Awaitable[R]]) -> R | Awaitable[R]:
    """`finish` of the value, or a coroutine of that if the value or the result has to be awaited."""
    if not inspect.isawaitable(value):
        return finish(value)

    async def finished() -> R:
        result = finish(await value)
        return await result if inspect.isawaitable(result) else result

    return finished()


def _refuse_unreadable(observations: object, subject: str) -> None:
    if not isinstance(observations, tuple | list) or not all(
        isinstance(observation, Mapping) and all(isinstance(observation.get(key), str) for key in ("role", "content"))
        for observation in observations
    ):
        raise _wrong(f"{subject} returned {observations!r:.200}, not messages with the strings 'role' and 'content'")
    length = sum(len(observation["content"]) for observation in observations)
    if length > LONGEST_OBSERVATION:
        text = f"{subject} shows {length} characters, more than {LONGEST_OBSERVATION}"
        raise EpisodeError(Failure(kind="too_large", reason=text))


def _numbers(metrics: Mapping[str, Any], subject: str) -> dict[str, float]:
    return {name: number(value, f"{subject} measured {name} =") for name, value in metrics.items()}


def _wrong(reason: str) -> EpisodeError:
    return EpisodeError(Failure(kind="wrong_type", reason=reason))

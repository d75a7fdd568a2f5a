"""The environment protocol: it scores an answer and, in multi-turn tasks, replies.

    make(extras) -> init(prompt) -> step(answer), step(answer), ... -> get_metrics() -> close()

One instance plays one episode. Calls of one instance never overlap, but may come from different threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import field, frozen

Message = Mapping[str, str]


@frozen(kw_only=True)
class EnvStep:
    """The environment's answer to one turn of the policy, such as `EnvStep(reward=1.0, done=True)`."""

    reward: float
    """Credited to the turn's last token. Must be finite."""

    done: bool
    """True if there is no further turn. If False, the policy is asked again, unless it has had `generator.max_turns`
    turns or the conversation is longer than `generator.max_input_length`."""

    observations: tuple[Message, ...] = ()
    """Messages that the policy sees before its next turn."""

    answer: str | None = None
    """The extracted answer, normalised so that equal answers have equal text: evaluation votes with it (maj@N). None:
    no answer was found, or the task has no answers that can be compared."""

    feedback: str | None = None
    """Words about this answer for a teacher, which the policy does not read, such as the tests that failed: read with
    `distillation.hint.source = "feedback"`. Of several turns, the last one's counts. None: nothing."""

    components: Mapping[str, float] = field(factory=dict)
    """Parts of the reward by name, such as `{"correct": 1.0, "format": 0.2}`: logged and stored beside the
    reward, summed over turns. The policy is trained on `reward` alone. Must be finite."""

    metadata: Mapping[str, Any] = field(factory=dict)
    """Details that are only logged."""


@frozen(kw_only=True)
class SampledAnswer:
    """Tokens of an answer, and the version of the weights that it was drawn with."""

    token_ids: tuple[int, ...] = ()
    """The tokens as the policy drew them."""

    version: int = 0
    """Version of the weights that the sample was scheduled with: the number of training steps before it."""


class Env:
    """A single-use environment: one instance for one trajectory. Subclass it and write `step`.

    Example:
        class Echo(Env):
            def step(self, action: str) -> EnvStep:
                return EnvStep(reward=float(action == self.extras["reward_spec"]["ground_truth"]), done=True)
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        """`extras` are the columns of the prompt's row, `data_source`, `reward_spec` and `extra_info` among them;
        multi-turn runs add `max_turns`: `generator.max_turns`, or the row's value if that is smaller.
        """
        self.extras = extras

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise the usual `AttributeError`, with the remedy for a class that does not call this `__init__`."""
            remedy = ": call super().__init__(extras) in its __init__" if name == "extras" else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{remedy}", name=name, obj=self
            )

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """The messages to start from, and information for logs; by default the prompt of the row."""
        return prompt, {}

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Tools for the chat template's `tools`, read after `init`; see `skyrl.envs.tools`."""
        return ()

    def step(self, action: str) -> EnvStep:
        """Judge one answer: `action` is its text, without special tokens."""
        raise TypeError(f"{type(self).__name__} does not define step()")

    def get_metrics(self) -> dict[str, float]:
        """Numbers to average over trajectories, by name."""
        return {}

    def close(self) -> None:
        """Release what the environment holds; called once, even after an error."""


class SampleAwareEnv(Env):
    """An environment that receives the tokens of each answer and their version before `step` judges it."""

    sampled = SampledAnswer()

    def set_sampled(self, sampled: SampledAnswer) -> None:
        """Receive the tokens of the answer that the next `step` judges."""
        self.sampled = sampled

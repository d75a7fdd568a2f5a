"""The environment protocol: it scores an answer and, in multi-turn tasks, replies.

    make(extras) -> init(prompt) -> step(answer), step(answer), ... -> get_metrics() -> close()

One instance plays one episode. Calls of one instance never overlap, but may come from different threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

Message = Mapping[str, str]


@frozen(kw_only=True)
class EnvStep:
    """The environment's answer to one turn of the policy, such as `EnvStep(reward=1.0, done=True)`."""

    reward: float
    """Credited to the turn's last token. Must be finite."""

    done: bool
    """No further turn. Where it is False, the policy is asked again, unless it has had `generator.max_turns` turns or
    the conversation has become longer than `generator.max_input_length`."""

    observations: tuple[Message, ...] = ()
    """Messages that the policy sees before its next turn."""

    answer: str | None = None
    """The answer that was read, in one spelling for equal ones: samples vote by it in evaluation (maj@N). None: no
    answer was found, or the task has none that could be compared."""

    components: Mapping[str, float] = field(factory=dict)
    """Parts of the reward by name, such as `{"correct": 1.0, "format": 0.2}`: logged and stored beside the
    reward, summed over turns. The policy is trained on `reward` alone. Must be finite."""

    metadata: Mapping[str, Any] = field(factory=dict)
    """Details for logs only."""


class Env:
    """A single-use environment: one instance for one trajectory. Subclass it and write `step`.

    Example:
        class Echo(Env):
            def step(self, action: str) -> EnvStep:
                return EnvStep(reward=float(action == self.extras["reward_spec"]["ground_truth"]), done=True)
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        """`extras` are the columns of the prompt's row, `data_source`, `reward_spec` and `extra_info` among them; in
        multi-turn runs, `max_turns` is there too: `generator.max_turns`, or the row's own if it is smaller.
        """
        self.extras = extras

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """The messages to start from, and information for logs; by default the row's own prompt."""
        return prompt, {}

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Tools for the chat template's `tools`, asked for after `init`; see `skyrl.envs.tools`."""
        return ()

    def step(self, action: str) -> EnvStep:
        """Judge one answer: `action` is its text, without special tokens."""
        raise TypeError(f"{type(self).__name__} does not define step()")

    def get_metrics(self) -> dict[str, float]:
        """Numbers to average over trajectories, by name."""
        return {}

    def close(self) -> None:
        """Release what the environment holds; called once, whatever happened."""

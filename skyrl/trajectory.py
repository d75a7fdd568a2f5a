"""What happened in a rollout, in tokens: a prompt, what was sampled after it, and how it was rewarded.

    Prompt --rollout--> Trajectory x n = TrajectoryGroup

Everything here is frozen and free of torch, so that it can be stored, sent and compared. Token ids are exactly those
that the engine sampled: nothing downstream tokenises text again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal, Protocol

from attrs import evolve, field, fields, frozen

StopReason = Literal["stop", "length", "context"]
"""Why sampling ended. `stop`: an end-of-sequence token or stop string. `length`: the last answer reached its longest
length. `context`: there was no room for another answer, or an agent had made all of its requests."""


@frozen(kw_only=True)
class Prompt:
    """One row of a dataset, ready to be sampled from.

    Example: `Prompt(id="17", messages=({"role": "user", "content": "2+2?"},), env_class="gsm8k", token_ids=(5, 9))`
    """

    id: str
    """Unique in its dataset: number of the source and of the row in it. Samples with the same id form a group."""

    messages: tuple[Mapping[str, Any], ...]
    """The conversation so far: `{"role": ..., "content": ...}` each."""

    token_ids: tuple[int, ...]
    """Tokens of `messages` rendered with the chat template, generation prompt included. If the last message is the
    assistant's, it is the beginning of the answer, and the tokens end with it."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the row brings, which the chat template shows."""

    env_class: str
    """The task that rewards an answer: a registered name, or an import path from the configuration."""

    data_source: str = "default"
    """Name of the dataset that the row came from; evaluation is reported for each dataset."""

    extras: Mapping[str, Any] = field(factory=dict)
    """All other columns of the row, such as `reward_spec` and `extra_info`, for the environment."""

    @property
    def answer_prefix(self) -> tuple[Mapping[str, Any], ...]:
        """The last message if it is the beginning of the answer, which the policy continues; otherwise nothing."""
        return self.messages[-1:] if self.messages and self.messages[-1].get("role") == "assistant" else ()

    @property
    def question(self) -> tuple[Mapping[str, Any], ...]:
        """The messages without the beginning of the answer."""
        return self.messages[: len(self.messages) - len(self.answer_prefix)]

    def full_answer(self, text: str) -> str:
        """The answer of which the policy sampled `text`: what the row has begun, and the text."""
        return "".join(str(message["content"]) for message in self.answer_prefix) + text


@frozen(kw_only=True)
class TurnReward:
    """The reward of one turn, and the token that it is credited to."""

    token: int
    """Index into `Trajectory.response_ids` of the turn's last token; -1 when the turn sampled nothing."""

    reward: float
    """Reward as the environment gave it, before scaling or shaping."""


@frozen(kw_only=True)
class Failure:
    """Why an attempt at a sample failed. It is the environment's fault, and is neither a reward nor a 0."""

    kind: Literal["raised", "timeout", "wrong_type", "not_finite", "too_large", "close"]
    """raised: an exception, or the process ended; timeout: a deadline passed; wrong_type: no `EnvStep`, or a value that
    is not a number, a message, or text that a tokenizer accepts; not_finite: NaN or infinity; too_large: an observation
    longer than any model reads; close: closing the environment failed after it had judged the sample, which keeps its
    reward."""

    reason: str
    """A sentence for the author of the environment."""


@frozen
class Skipped:
    """An environment does not judge this sample, which is neither a reward nor a failure."""

    reason: str


@frozen(kw_only=True)
class RoutedExperts:
    """Experts that an engine chose for the first N tokens of a row, prompt included, in each MoE layer.

    The last token of a row is drawn but never computed, so N is one less than its number of tokens.
    """

    layers: int
    choices: int
    """Experts per token in a layer."""

    data: bytes = field(repr=False)
    """Expert indices (N, layers, choices), little-endian, `width` bytes each."""

    width: Literal[1, 2] = 1

    def __len__(self) -> int:
        return len(self.data) // self._size

    @property
    def _size(self) -> int:
        """Number of bytes per token."""
        return self.layers * self.choices * self.width

    def first(self, tokens: int) -> RoutedExperts:
        """Experts of the first `tokens` tokens."""
        return evolve(self, data=self.data[: tokens * self._size])

    def continued(self, later: RoutedExperts) -> RoutedExperts:
        """These experts, followed by those of `later` for the tokens after them: each token keeps its first choice."""
        return evolve(self, data=self.data + later.data[len(self.data) :])


ARRAY_TYPES: Mapping[str, tuple[str, int]] = {
    "?": ("bool", 1),
    "B": ("uint8", 1),
    "b": ("int8", 1),
    "h": ("int16", 2),
    "i": ("int32", 4),
    "l": ("int64", 8),
    "q": ("int64", 8),
    "e": ("float16", 2),
    "f": ("float32", 4),
    "d": ("float64", 8),
}
"""Python's character for a type of number -> its name in numpy and torch, and its bytes."""


class HasMemory(Protocol):
    """An array that shows its memory, as numpy's do."""

    @property
    def data(self) -> memoryview:
        """A view of its numbers, with their type and shape."""


@frozen(kw_only=True)
class RowArray:
    """Numbers that a row carries besides its tokens, in a form that is sent, recorded and stored with it."""

    dtype: str
    """Type of the numbers, such as `float32`."""

    shape: tuple[int, ...]
    """(n, ...): rows may differ in n, and in nothing else."""

    data: bytes = field(repr=False)
    """The numbers in C order, little-endian."""

    def __attrs_post_init__(self) -> None:
        sizes = dict(ARRAY_TYPES.values())
        if self.dtype not in sizes or not self.shape or prod(self.shape) * sizes[self.dtype] != len(self.data):
            raise ValueError(
                f"a row cannot carry {len(self.data)} bytes as an array of {self.dtype} {self.shape}: it needs one or "
                f"more dimensions and one of the types {', '.join(sizes)}"
            )

    @classmethod
    def of(cls, array: HasMemory) -> RowArray:
        """From a numpy array, or a tensor's `numpy()`. Raises `ValueError` for one that a row cannot carry: of objects,
        texts or big-endian numbers, or without a dimension.
        """
        view = array.data
        dtype, _ = ARRAY_TYPES.get(view.format.removeprefix("<"), (f"type {view.format!r}", 0))
        return cls(dtype=dtype, shape=tuple(view.shape or ()), data=view.tobytes())


@frozen(kw_only=True)
class TokenRow:
    """Tokens of one forward pass of the policy: one row of a training batch.

    The per-token tuples have the length of `response_ids`.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """All tokens after the prompt: sampled tokens, and in multi-turn tasks the observations between them."""

    loss_mask: tuple[int, ...]
    """1 where the policy sampled the token, 0 where the environment or the template put it."""

    rollout_logprobs: tuple[float, ...]
    """The engine's log-probability of each token under the tempered distribution it was drawn from, in nats; 0 where
    `loss_mask` is 0. Empty if `sampling_params.logprobs` is None."""

    weight_versions: tuple[int, ...]
    """Version of the weights that produced each token."""

    rewards: tuple[TurnReward, ...]
    """Reward of each turn, in order. A turn is one answer of the policy; one that is not rewarded has the reward 0."""

    routed_experts: RoutedExperts | None = None
    """Experts that the engine chose for these tokens. None: the engine does not return them."""

    engines: tuple[int, ...] = field(default=(), eq=False, repr=False)
    """Number of the engine that sampled each token, 0 for tokens that none did. Empty if it is not known, as in a
    recording: samples do not depend on it."""

    extras: Mapping[str, RowArray] = field(factory=dict)
    """Arrays that the row carries besides tokens, by name: `TrainingBatch.extras`."""

    def masked(self) -> TokenRow:
        """A copy of the row with no token to train on."""
        return evolve(self, loss_mask=(0,) * len(self.loss_mask))


_ROW_FIELDS = tuple(part.name for part in fields(TokenRow))


@frozen(kw_only=True)
class Trajectory(TokenRow):
    """One sampled answer: the row of its last tokens, and the rows before it."""

    prompt_id: str
    sample_index: int
    """0 to n - 1 within its group."""

    earlier: tuple[TokenRow, ...] = ()
    """Rows of earlier turns, whose tokens do not continue into the last row because the template rewrote the
    conversation or because each turn is a row."""

    stop_reason: StopReason
    answer: str | None = None
    """The answer that the environment read, used for majority votes in evaluation (maj@N). None: the environment
    reports none."""

    feedback: str | None = None
    """Words of the environment about the answer, for a teacher. None: it said nothing."""

    metrics: Mapping[str, float] = field(factory=dict)
    """Measurements of the environment, for logging only: what an estimator or an objective reads is in `extras`."""

    components: Mapping[str, float] = field(factory=dict)
    """Parts of the reward by name, summed over turns, as the environment reported them; for logging only."""

    timings: Mapping[str, float] = field(factory=dict, eq=False)
    """Seconds: `completion` from first request to last token, of which `llm` waited for the engine and `env` for the
    environment. Empty if no times were measured."""

    failures: tuple[Failure, ...] = ()
    """Failures of the attempts before this one, and any failure to close this attempt's environment."""

    failed: bool = False
    """This attempt, the last one, failed too; the last of `failures` says why. Its group is dropped."""

    skipped: str = ""
    """Why the environment did not judge the sample, which then has no reward and is not trained on. Empty: it was
    judged."""

    filled: bool = False
    """True if the sample failed for good or was skipped, and this is a copy of another sample of its group."""

    @property
    def token_rows(self) -> tuple[TokenRow, ...]:
        """All rows of the trajectory in order; a single one unless it has `earlier` rows."""
        return (*self.earlier, TokenRow(**{name: getattr(self, name) for name in _ROW_FIELDS}))

    @property
    def versions(self) -> frozenset[int]:
        """Versions of the weights that sampled its tokens."""
        return frozenset(version for token_row in self.token_rows for version in token_row.weight_versions)

    @property
    def reward(self) -> float:
        """Sum over turns: the raw reward of the answer."""
        before = sum(turn.reward for token_row in self.earlier for turn in token_row.rewards)
        return float(before + sum(turn.reward for turn in self.rewards))

    @property
    def positive_reward(self) -> float:
        """Sum over turns of the positive part of each turn's reward."""
        return float(sum(max(turn.reward, 0.0) for token_row in self.token_rows for turn in token_row.rewards))

    @property
    def length(self) -> int:
        """Number of tokens after the first prompt, observations included: one number for one conversation, whether it
        is one row or several. What the prompt of a row has beyond the row before it was shown, not sampled.
        """
        token_rows = self.token_rows
        before = [len(token_row.prompt_ids) + len(token_row.response_ids) for token_row in token_rows]
        observed = sum(
            max(0, len(token_row.prompt_ids) - known) for token_row, known in zip(token_rows[1:], before, strict=False)
        )
        return observed + sum(len(token_row.response_ids) for token_row in token_rows)

    @property
    def missing(self) -> bool:
        """Whether the sample has no reward: it failed or was skipped, and was not filled."""
        return (self.failed or bool(self.skipped)) and not self.filled

    @property
    def trained(self) -> bool:
        """Whether any token of the trajectory is trained on."""
        return any(self.loss_mask) or any(any(token_row.loss_mask) for token_row in self.earlier)

    def masked(self) -> Trajectory:
        """A copy of the trajectory with no token to train on."""
        earlier = tuple(token_row.masked() for token_row in self.earlier)
        return evolve(self, earlier=earlier, loss_mask=(0,) * len(self.loss_mask))


@frozen(kw_only=True)
class TrajectoryGroup:
    """All samples of one prompt, drawn under the same settings: what group-relative advantages compare."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    baseline: float | None = None
    """Raw reward of the greedy answer to the prompt, if the advantage estimator compares with it. Not trained on."""

    @property
    def dropped(self) -> bool:
        """Whether a sample is missing, which leaves nothing to compare the others with: the whole group is ignored."""
        return any(trajectory.missing for trajectory in self.trajectories)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Raw reward of each sample, in order of `sample_index`."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def judged_rewards(self) -> tuple[float, ...]:
        """Raw rewards of the samples that were judged; those that only replace one that was not do not count."""
        return tuple(row.reward for row in self.trajectories if not row.missing and not row.filled)

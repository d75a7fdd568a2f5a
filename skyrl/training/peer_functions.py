"""Policy losses and advantage estimators in the signatures of SkyRL and verl, called as their trainers call them.

Their losses reduce to one number themselves. Which reduction a loss does is found by calling it with a small batch,
whole and in parts, since the result of a mini-batch must not depend on its micro-batches:

    a sum      SkyRL's form of 2026. It gets advantages times the weight of each token under `loss_reduction`, as from
               SkyRL's trainer; the results of micro-batches add up.
    a mean     verl's form with `loss_agg_mode`, and SkyRL's before. The result of a micro-batch counts by the weights
               of its tokens: their share of tokens under token_mean, of answers under sequence_mean.

A loss whose result then still depends on the cut is refused: one that averages over padding, or otherwise than
`loss_reduction` says.

Tensors have the shape (answers, W), with answers that begin at column 0, where prompts are left out. Rows without a
trained token are not among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.estimators import AdvantageEstimator
from skyrl.algorithms.losses import LossInputs, PolicyLoss
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig
from skyrl.config.foundation.peer_signatures import PeerSignature, parameters_of
from skyrl.errors import ConfigError, Problem
from skyrl.tree.frames import described

_AGGREGATIONS = {
    "token_mean": "token-mean",
    "token_mean_legacy": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
"""verl's `loss_agg_mode` of each `loss_reduction`. It has none for `prompt_mean`."""

_VERL: Mapping[str, Callable[[AlgorithmConfig], object]] = {
    "clip_ratio": lambda algorithm: algorithm.eps_clip_low,
    "clip_ratio_low": lambda algorithm: algorithm.eps_clip_low,
    "clip_ratio_high": lambda algorithm: algorithm.eps_clip_high,
    "loss_agg_mode": lambda algorithm: _AGGREGATIONS.get(algorithm.loss_reduction, algorithm.loss_reduction),
    "loss_scale_factor": lambda algorithm: algorithm.max_seq_len,
    "global_batch_info": lambda algorithm: {},
    "entropy_coeff": lambda algorithm: algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
    "kl_loss_type": lambda algorithm: algorithm.kl_estimator_type,
    "kl_penalty": lambda algorithm: algorithm.kl_estimator_type,
    "tau_pos": lambda algorithm: algorithm.sapo.tau_pos,
    "tau_neg": lambda algorithm: algorithm.sapo.tau_neg,
    "policy_loss": lambda algorithm: PeerSettings(algorithm, _VERL_LOSS, "policy_loss."),
    "adv_estimator": lambda algorithm: algorithm.advantage_estimator,
    "lam": lambda algorithm: algorithm.lambd,
    "norm_adv_by_std_in_grpo": lambda algorithm: algorithm.grpo_norm_by_std,
}
_VERL_LOSS: Mapping[str, Callable[[AlgorithmConfig], object]] = {
    "loss_mode": lambda algorithm: algorithm.policy_loss_type,
    "clip_cov_ratio": lambda algorithm: algorithm.clip_cov.clip_ratio,
    "clip_cov_lb": lambda algorithm: algorithm.clip_cov.clip_cov_lb,
    "clip_cov_ub": lambda algorithm: algorithm.clip_cov.clip_cov_ub,
    "kl_cov_ratio": lambda algorithm: algorithm.kl_cov.kl_cov_frac,
    "ppo_kl_coef": lambda algorithm: algorithm.kl_cov.ppo_kl_coef,
}


class PeerSettings:
    """The `config` of SkyRL's and verl's functions: `trainer.algorithm`, and what it holds under verl's names.

    Read as `config.name`, `config["name"]` or `config.get("name", default)`.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        renamed: Mapping[str, Callable[[AlgorithmConfig], object]] = _VERL,
        below: str = "",
    ) -> None:
        self._algorithm, self._renamed, self._below = algorithm, renamed, below

    def __getattr__(self, name: str) -> object:
        if name in ("_algorithm", "_renamed", "_below"):
            raise AttributeError(name)
        if name in self._renamed:
            return self._renamed[name](self._algorithm)
        if not self._below and not name.startswith("_") and hasattr(self._algorithm, name):
            return getattr(self._algorithm, name)
        raise AttributeError(
            f"config.{self._below}{name} is not here: config holds the fields of trainer.algorithm, and verl's "
            f"{', '.join(self._renamed)}"
        )

    def __getitem__(self, name: str) -> object:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from error

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def get(self, name: str, default: object = None) -> object:
        """The value, or `default` if there is none of this name."""
        return getattr(self, name, default)


_SHOWN = 4
"""Number of items of a tuple that a message shows."""


@attrs.frozen
class Answers:
    """The answers in (B, L) rows, from the first to the last trained token, moved to begin at column 0."""

    positions: Tensor
    """(B, W) int64: the column of the row at which each position of an answer is."""

    inside: Tensor
    """(B, W) bool: whether the position is one of the answer."""

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """The answers between the first and the last true column of `mask` (B, L); W is the longest of them."""
        columns = torch.arange(mask.shape[1], device=mask.device)
        first = mask.int().argmax(1, keepdim=True)
        last = torch.where(mask, columns, -1).amax(1, keepdim=True)
        width = max(int((last - first).max()) + 1, 1)
        positions = first + columns[:width]
        return cls(positions.clamp(max=mask.shape[1] - 1), positions <= last)

    def gather(self, values: Tensor) -> Tensor:
        """(B, L) to (B, W)."""
        return torch.where(self.inside, values.gather(1, self.positions), torch.zeros_like(values[:1, :1]))

    def put_back(self, values: Tensor, width: int) -> Tensor:
        """(B, W) to (B, L = `width`), 0 outside of answers."""
        rows = values.new_zeros(len(values), width)
        return rows.scatter_add(1, self.positions, torch.where(self.inside, values, 0.0))


@attrs.frozen(kw_only=True)
class ReducedLoss:
    """A policy loss in SkyRL's or verl's signature, as one of skyrl's.

    Every token of a micro-batch gets the same loss, such that its weighted sum is what the function gives.
    """

    function: Callable[..., object]
    signature: PeerSignature
    algorithm: AlgorithmConfig
    sums: bool = False
    """Whether the function sums over tokens; otherwise it takes a mean."""

    _numbers: dict[str, float] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    """Metrics of the last call."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the micro-batch's loss, divided by the weight of its tokens."""
        assert inputs.weights is not None, "a loss that reduces itself needs the weights of tokens"
        rows = inputs.mask.any(1).nonzero().squeeze(1)
        if not len(rows):
            return inputs.logprobs * 0.0
        weight = inputs.weights.sum()
        weight = torch.where(weight > 0, weight, 1.0)  # rows that are only measured weigh nothing
        answers = Answers.of(inputs.mask[rows])

        def taken(values: Tensor) -> Tensor:
            return answers.gather(values[rows])

        advantages = inputs.advantages * inputs.weights if self.sums else inputs.advantages
        current, old, mask = taken(inputs.logprobs), taken(inputs.old_logprobs), taken(inputs.mask)
        config = PeerSettings(self.algorithm)
        arguments: dict[str, object] = {
            "log_probs": current,
            "old_log_probs": old,
            "log_prob": current,
            "old_log_prob": old,
            "advantages": taken(advantages),
            "response_mask": mask,
            "loss_mask": mask.float(),
            "rollout_logprobs": taken(inputs.rollout_logprobs),
            "rollout_log_probs": taken(inputs.rollout_logprobs),
            "rollout_is_weights": None,
            "config": config,
            "loss_agg_mode": config.loss_agg_mode,
            "cliprange": config.clip_ratio,
            "cliprange_low": config.clip_ratio_low,
            "cliprange_high": config.clip_ratio_high,
            "clip_ratio_c": config.clip_ratio_c,
        }
        loss, numbers = _loss_and_numbers(
            self.function(**_requested_arguments(self.function, self.signature, arguments))
        )
        self._numbers.update(numbers)
        return (loss / weight if self.sums else loss).expand_as(inputs.logprobs)

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """(B, L) of each of the function's own metrics in the last call."""
        return {name: torch.full_like(inputs.logprobs, value) for name, value in self._numbers.items()}


@attrs.frozen(kw_only=True)
class PeerEstimator:
    """An advantage estimator in SkyRL's or verl's signature, as one of skyrl's."""

    function: Callable[..., object]
    signature: PeerSignature
    algorithm: AlgorithmConfig

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere. Raises `TypeError` for a result of another form."""
        answers = Answers.of(batch.loss_mask)
        mask = answers.gather(batch.loss_mask)
        arguments: dict[str, object] = {
            "token_level_rewards": answers.gather(torch.where(batch.loss_mask, batch.rewards, 0.0)),
            "response_mask": mask.long(),
            "index": batch.groups.numpy(),
            "values": None if batch.values is None else answers.gather(batch.values),
            "reward_baselines": batch.baselines,
            "gamma": self.algorithm.gamma,
            "lam": self.algorithm.lambd,
            "lambd": self.algorithm.lambd,
            "config": PeerSettings(self.algorithm),
            "grpo_norm_by_std": self.algorithm.grpo_norm_by_std,
            "norm_adv_by_std_in_grpo": self.algorithm.grpo_norm_by_std,
        }
        result = self.function(**_requested_arguments(self.function, self.signature, arguments))
        advantages = result[0] if isinstance(result, Sequence) and result else result
        if not isinstance(advantages, Tensor) or advantages.shape != mask.shape:
            raise TypeError(
                f"an estimator of {self.signature.system}'s signature returns (advantages, returns), each of the shape "
                f"of response_mask, and not {_shape(result)}"
            )
        return answers.put_back(torch.where(mask, advantages.float(), 0.0), batch.loss_mask.shape[1])


def try_estimator(estimator: AdvantageEstimator, algorithm: AlgorithmConfig, answers: int) -> None:
    """Call an estimator with a small batch of two prompts with so many answers each, with one of the usual scores of
    answers, and with one in which the answers to a prompt have equal rewards, if this algorithm does not leave those
    out. Raises `ConfigError` if a call fails, or gives something else than one number for each token, or one that is
    not finite.
    """
    rows = torch.arange(2 * answers)
    batch = _small_batch().select(rows % 5).with_fields(groups=rows // answers)
    batch = batch.with_fields(
        values=batch.rewards.cos(),
        baselines=torch.zeros(len(batch)),
        teacher_logprobs=batch.rollout_logprobs,
        trajectories=rows,  # each row is a whole trajectory, as without these two
        last_step=torch.ones_like(rows, dtype=torch.bool),
    )
    last = torch.arange(batch.rewards.shape[1]) == (batch.lengths - 1)[:, None]
    usual = last * torch.tensor([0.0, 1.0, 0.5, -1.0])[rows % 4, None]
    silent = torch.where(batch.groups[:, None] == 0, last.float(), batch.rewards)
    leaves_out = algorithm.zero_variance_filter or algorithm.dynamic_sampling.type in ("filter", "replace")
    rewards = {"a small batch": batch.rewards, "a batch with the rewards 0, 1, 0.5 and -1": usual}
    rewards |= {} if leaves_out else {"a batch with equal rewards of all answers to a prompt": silent}
    name = algorithm.advantage_estimator
    for words, tokens in rewards.items():
        with _failures_refused("advantage_estimator", words):
            advantages: object = estimator(batch.with_fields(rewards=tokens))
        if not isinstance(advantages, Tensor) or advantages.shape != batch.rewards.shape:
            message = (
                f"{name} gives {_shape(advantages)} for rewards of shape {tuple(batch.rewards.shape)}: an advantage is "
                "one number for each token"
            )
            raise _refused("advantage_estimator", message)
        wrong = batch.loss_mask & ~advantages.isfinite()
        if wrong.any():
            message = (
                f"{name} gives the advantage {advantages[wrong][0].item()} for {wrong.sum()} of "
                f"{batch.loss_mask.sum()} tokens of {words}"
            )
            hint = "add a small number to what it divides by"
            raise ConfigError([Problem(path="trainer.algorithm.advantage_estimator", message=message, hint=hint)])


def checked_loss(loss: ReducedLoss, weigh: Callable[[TrainingBatch], Tensor]) -> ReducedLoss:
    """The loss, with its reduction found by calls with a small batch, whole and in parts, whose tokens get the weights
    `weigh(batch)`. Raises `ConfigError` if it fails, if it or its gradient is not finite, or if its result depends on
    how a mini-batch is cut.
    """
    batch = _small_batch()
    batch = batch.with_fields(loss_weights=weigh(batch))
    inputs = _inputs_of(batch)
    with _failures_refused("policy_loss_type"):
        losses = loss(inputs)
    _refuse_non_finite(loss.algorithm.policy_loss_type, losses, inputs)
    for candidate in (attrs.evolve(loss, sums=True), attrs.evolve(loss, sums=False)):
        with _failures_refused("policy_loss_type"):
            total = _loss_of(candidate, batch)
            cuts = ((1, 3), (2, 4), (3, 4))
            parts = [sum(_loss_of(candidate, part) for part in _cut(batch, cut)) for cut in cuts]
        if all(abs(part - total) <= 1e-5 * max(1.0, abs(total)) for part in parts):
            return candidate
    name, reduction = loss.algorithm.policy_loss_type, loss.algorithm.loss_reduction
    if wrong := [part for part in parts if not math.isfinite(part)]:
        message = (
            f"{name} gives {wrong[0]} for a part of a small batch whose answers together have a finite loss: a "
            "micro-batch may be a single answer, which has no deviation from others"
        )
        hint = "take no statistics over the answers of a call: advantage_estimator has all answers to a prompt"
        raise ConfigError([Problem(path="trainer.algorithm.policy_loss_type", message=message, hint=hint)])
    message = (
        f"{name} gives a mini-batch another loss if it is cut into micro-batches: it is "
        f"neither a sum over the tokens of its mask nor their {reduction}"
    )
    hint = "use the mask, without which padding counts, and set loss_reduction to the mean that it takes"
    raise ConfigError([Problem(path="trainer.algorithm.policy_loss_type", message=message, hint=hint)])


def checked_per_token_loss(loss: PolicyLoss, name: str) -> PolicyLoss:
    """The loss of this name, after a call with a small batch. Raises `ConfigError` if it fails, or gives something else
    than one finite number for each token that depends on the log-probabilities, or if its gradient is not finite.
    """
    batch = _small_batch()
    inputs = _inputs_of(batch.with_fields(loss_weights=batch.loss_mask.float()))
    with _failures_refused("policy_loss_type"):
        losses: object = loss(inputs)
    expected = inputs.logprobs.shape
    if not isinstance(losses, Tensor) or losses.shape != expected:
        message = (
            f"gives {_shape(losses)} for log-probabilities of shape {tuple(expected)}: a loss is one number for each "
            "token, of which loss_reduction takes the mean"
        )
        raise _refused("policy_loss_type", message)
    if not losses.requires_grad:
        raise _refused("policy_loss_type", "gives numbers without a gradient: they have to depend on inputs.logprobs")
    _refuse_non_finite(name, losses, inputs)
    return loss


def _refuse_non_finite(name: str, losses: Tensor, inputs: LossInputs) -> None:
    """Raises `ConfigError` for a loss of a small batch that is not finite at every token, or whose gradient is not."""
    with _failures_refused("policy_loss_type"):
        (gradient,) = torch.autograd.grad(losses[inputs.mask].sum(), inputs.logprobs, allow_unused=True)
    if gradient is None:
        raise _refused("policy_loss_type", f"{name} has no gradient by inputs.logprobs, on which it has to depend")
    for what, values in (("the loss", losses), ("the gradient", gradient)):
        wrong = inputs.mask & ~values.isfinite()
        if wrong.any():
            read = (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
            logprob, old, advantage = (round(tensor[wrong][0].item(), 2) for tensor in read)
            message = (
                f"{name} gives {what} {values[wrong][0].item()} for {wrong.sum()} of {inputs.mask.sum()} tokens of a "
                f"small batch, first for one of log-probability {logprob}, {old} before, and advantage {advantage}"
            )
            raise _refused("policy_loss_type", message)


@contextmanager
def _failures_refused(field: str, batch: str = "a small batch") -> Iterator[None]:
    """A block that runs the user's code with a batch, which messages call so."""
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise _refused(field, f"fails with {batch}: {described(error)}") from error


def _refused(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(path=f"trainer.algorithm.{field}", message=message)])


def _requested_arguments(
    function: object, signature: PeerSignature, arguments: Mapping[str, object]
) -> dict[str, object]:
    """Arguments of the signature that the function names; all of them if it takes `**kwargs`."""
    parameters = parameters_of(function) or ()
    names = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {name: arguments[name] for name in signature.parameters if name in names or takes_all}


def _loss_and_numbers(result: object) -> tuple[Tensor, dict[str, float]]:
    """The loss and the metrics in a result: (loss, metrics), (loss, clip_ratio), or verl's four numbers of before 0.6.
    Raises `TypeError` for another one.
    """
    loss, *rest = result if isinstance(result, Sequence) else (result,)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        raise TypeError(f"a policy loss gives one number that depends on the log-probabilities, not {_shape(loss)}")
    metrics = rest[0] if rest and isinstance(rest[0], Mapping) else {}
    if not metrics:
        names = ("clip_ratio",) if len(rest) == 1 else ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
        metrics = dict(zip(names, rest, strict=False))
    numbers = {str(name).rpartition("/")[2]: value for name, value in metrics.items()}
    return loss, {
        name: value.item() if isinstance(value, Tensor) else float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float | Tensor)
    }


def _shape(value: object) -> str:
    """A value in words, with the shapes of tensors in place of their numbers."""
    if isinstance(value, tuple | list):
        more = ", ..." if len(value) > _SHOWN else ""
        return f"({', '.join(_shape(item) for item in value[:_SHOWN])}{more})"
    if not isinstance(value, Tensor):
        return f"{value!r:.100}"
    if value.dim():
        return f"a tensor {tuple(value.shape)}"
    return "one number" if value.requires_grad else "one number without a gradient"


def _loss_of(loss: ReducedLoss, batch: TrainingBatch) -> float:
    """Number that the objective makes of the loss of a micro-batch."""
    assert batch.loss_weights is not None
    return (loss(_inputs_of(batch)) * batch.loss_weights).sum().item()


def _inputs_of(batch: TrainingBatch) -> LossInputs:
    assert batch.loss_weights is not None and batch.advantages is not None
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    return LossInputs.selected(
        batch.loss_mask,
        logprobs=(batch.old_logprobs.sin() - 1).requires_grad_(),
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=batch.advantages,
        weights=batch.loss_weights,
    )


def _cut(batch: TrainingBatch, at: tuple[int, int]) -> tuple[TrainingBatch, ...]:
    return batch.rows(0, at[0]), *((batch.rows(*at),) if at[0] < at[1] else ()), batch.rows(at[1], len(batch))


def _small_batch() -> TrainingBatch:
    """Five answers of 1 to 5 tokens to two prompts of different lengths, with numbers without any pattern."""
    starts, lengths = torch.tensor([2, 1, 3, 2, 1]), torch.tensor([3, 1, 5, 2, 4])
    columns = torch.arange(8)
    mask = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    numbers = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(7))
    return TrainingBatch(
        input_ids=torch.ones(5, 8, dtype=torch.int64),
        lengths=starts + lengths,
        loss_mask=mask,
        rollout_logprobs=-numbers[0].abs(),
        rewards=torch.where(mask, numbers[1], 0.0),
        groups=torch.tensor([0, 0, 1, 1, 1]),
        answer_lengths=lengths,
        trajectory_lengths=lengths,
        ref_logprobs=-numbers[0].abs() - 0.1,
        old_logprobs=-numbers[2].abs(),
        advantages=torch.where(mask, numbers[3], 0.0),
    )

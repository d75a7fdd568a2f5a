"""The losses that clients of the training service name, as sums over tokens.

r = exp(logprobs now - `logprobs` of the client), A = `advantages`, w = `weights`; of a critic, V = value now,
R = `returns`:

| name | loss of a token |
|---|---|
| `cross_entropy` | -w log p; targets may be several at each position |
| `importance_sampling` | -r A |
| `ppo` | -min(r A, clip(r) A), arXiv:1707.06347, eq. 7 |
| `cispo` | -sg(clip(r)) A log p, arXiv:2506.13585 |
| `gspo` | as `ppo`, with the sequence's geometric mean of r over `sequence_ratio_mask`, arXiv:2507.18071 |
| `dro` | -(A log p - beta / 2 (log r)^2), arXiv:2405.19107 |
| `dppo` | -r A, 0 where the probability has moved too far in the direction of A, arXiv:2602.04879 |
| `ppo_critic` | w / 2 max((V - R)^2, (V' - R)^2), V' = V held within `value_clip` of `values` |

clip(r) is between `clip_low_threshold` and `clip_high_threshold`, bounds of the ratio itself: settings, or arrays with
a bound for each token. Names, settings and defaults are those of the hosted service: 0.8 and 1.2, for cispo 0 and 4.
Its defaults for gspo and dro are not published: gspo has those of its paper, 1 - 3e-4 and 1 + 4e-4, dro has none. dppo
and ppo_critic, the loss of models with a value head, are SkyRL's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from skyrl.algorithms.critic import value_loss
from skyrl.algorithms.losses import LossInputs, importance_ratio
from skyrl.algorithms.rollout_losses import DPPOLoss
from skyrl.errors import RequestError
from skyrl.training_service.backend import Datum, PassRequest

TARGETS = "target_tokens"

CRITIC_WANTED = 'create the model with user_metadata = {"model_role": "critic"}'
"""How clients, which have no field for a value head, ask for one."""

_LOW, _HIGH, _SEQUENCE = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"


@frozen(kw_only=True, eq=False)
class LossTokens:
    """The tokens of one model's sequences as a loss sees them: N targets, one after the other."""

    computed: Tensor
    """(N,) with gradient: log-probabilities in nats, or values of a critic."""

    arrays: Mapping[str, Tensor]
    """(N,) float32 by name."""

    sequences: Tensor
    """(N,) int64: the sequence of each target, counted from 0."""

    settings: Mapping[str, float]

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities of the targets, in nats."""
        return self.computed

    @property
    def ratio(self) -> Tensor:
        """r, whose logarithm is bounded by 20 in either direction."""
        return importance_ratio(self.logprobs, self.arrays["logprobs"])

    @property
    def advantages(self) -> Tensor:
        return self.arrays["advantages"]

    def clipped(self, ratio: Tensor) -> Tensor:
        """The ratio between the bounds of each token."""
        low, high = (self.arrays.get(name, torch.tensor(self.settings[name])) for name in (_LOW, _HIGH))
        return torch.minimum(torch.maximum(ratio, low.to(ratio)), high.to(ratio))


@frozen(kw_only=True)
class LossFunction:
    """A loss and what it reads."""

    compute: Callable[[LossTokens], Tensor]
    """Loss of each target, (N,)."""

    inputs: tuple[str, ...] = ("logprobs", "advantages")
    """Arrays that each sequence must have besides its targets."""

    optional: tuple[str, ...] = ()
    settings: Mapping[str, float | None] = field(factory=dict)
    """Settings with their defaults; None: it must be given."""

    several_targets: bool = False
    """Whether a position may have several targets."""

    output: Literal["logprobs", "values"] = "logprobs"
    """Output of the model that the loss reads. Passes without gradient need no other inputs to return values."""


def _cross_entropy(tokens: LossTokens) -> Tensor:
    return -tokens.arrays["weights"] * tokens.logprobs


def _importance_sampling(tokens: LossTokens) -> Tensor:
    return -tokens.ratio * tokens.advantages


def _ppo(tokens: LossTokens) -> Tensor:
    return _smaller(tokens, tokens.ratio)


def _cispo(tokens: LossTokens) -> Tensor:
    return -tokens.clipped(tokens.ratio.detach()) * tokens.advantages * tokens.logprobs


def _gspo(tokens: LossTokens) -> Tensor:
    now, marked = tokens.logprobs.detach(), (tokens.arrays[_SEQUENCE] != 0).to(tokens.logprobs)
    count = int(tokens.sequences.max()) + 1
    sums = now.new_zeros(2, count).index_add_(
        1, tokens.sequences, torch.stack([(now - tokens.arrays["logprobs"]) * marked, marked])
    )
    of_sequence = (sums[0] / sums[1])[tokens.sequences]
    return _smaller(tokens, importance_ratio(of_sequence + tokens.logprobs, now))


def _smaller(tokens: LossTokens, ratio: Tensor) -> Tensor:
    return -torch.minimum(ratio * tokens.advantages, tokens.clipped(ratio) * tokens.advantages)


def _dro(tokens: LossTokens) -> Tensor:
    distance = tokens.logprobs - tokens.arrays["logprobs"]
    return tokens.settings["beta"] / 2 * distance.square() - tokens.logprobs * tokens.advantages


def _dppo(tokens: LossTokens) -> Tensor:
    settings = tokens.settings
    loss = DPPOLoss(dppo_type="binary_tv", delta_low=settings["delta_low"], delta_high=settings["delta_high"])
    old = tokens.arrays["logprobs"]
    return loss(
        LossInputs(
            logprobs=tokens.logprobs,
            old_logprobs=old,
            rollout_logprobs=old,
            advantages=tokens.advantages,
            mask=torch.ones_like(old, dtype=torch.bool),
        )
    )


def _ppo_critic(tokens: LossTokens) -> Tensor:
    arrays, values = tokens.arrays, tokens.computed
    if "returns" not in arrays:  # the values alone are asked for
        return torch.zeros_like(values)
    losses = value_loss(values, arrays["values"], arrays["returns"], clip=tokens.settings["value_clip"])
    return losses * arrays["weights"] if "weights" in arrays else losses


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(compute=_cross_entropy, inputs=("weights",), several_targets=True),
    "importance_sampling": LossFunction(compute=_importance_sampling),
    "ppo": LossFunction(compute=_ppo, optional=(_LOW, _HIGH), settings={_LOW: 0.8, _HIGH: 1.2}),
    "cispo": LossFunction(compute=_cispo, optional=(_LOW, _HIGH), settings={_LOW: 0.0, _HIGH: 4.0}),
    "gspo": LossFunction(
        compute=_gspo,
        inputs=("logprobs", "advantages", _SEQUENCE),
        optional=(_LOW, _HIGH),
        settings={_LOW: 1 - 3e-4, _HIGH: 1 + 4e-4},
    ),
    "dro": LossFunction(compute=_dro, settings={"beta": None}),
    "dppo": LossFunction(compute=_dppo, settings={"delta_low": 0.2, "delta_high": 0.2}),
    "ppo_critic": LossFunction(
        compute=_ppo_critic,
        inputs=("values", "returns"),
        optional=("weights",),
        settings={"value_clip": 0.2},
        output="values",
    ),
}
"""Every loss by the name that clients give it."""

_ELSEWHERE: Mapping[str, str] = {
    "custom": "custom losses are computed by the client (forward_backward_custom), not here",
    "stable_reinforce": "it needs information that only the hosted service records while it samples",
}
"""Losses that other services have -> why this one does not."""


def settings_of(request: PassRequest) -> dict[str, float]:
    """All settings of the request's loss. Raises `RequestError` for an unknown loss, and for an unknown, a missing or a
    wrong setting.
    """
    chosen, loss_config = request.loss, request.loss_config
    if chosen in _ELSEWHERE:
        raise RequestError(f"loss_fn = {chosen!r} is not supported: {_ELSEWHERE[chosen]}", param="loss_fn")
    if chosen not in LOSSES:
        raise RequestError(f"loss_fn = {chosen!r} is unknown; there are {', '.join(LOSSES)}", param="loss_fn")
    loss = LOSSES[chosen]
    for name, value in loss_config.items():
        if name not in loss.settings:
            has = f"it has {', '.join(loss.settings)}" if loss.settings else "it has no settings"
            raise RequestError(f"loss_fn_config: {request.loss} has no setting {name!r}; {has}", param="loss_fn_config")
        if not isinstance(value, (int, float)) or not np.isfinite(value) or value < 0:
            raise RequestError(
                f"loss_fn_config: {name} = {value!r} is not a number of at least 0", param="loss_fn_config"
            )
    settings: dict[str, float] = {}
    for name, setting in {**loss.settings, **loss_config}.items():
        if setting is None:
            raise RequestError(f"loss_fn_config: {request.loss} needs {name!r}, a number", param="loss_fn_config")
        settings[name] = float(setting)
    if _LOW in settings and settings[_LOW] > settings[_HIGH]:
        raise RequestError(
            f"loss_fn_config: {_LOW} = {settings[_LOW]:g} is above {_HIGH} = {settings[_HIGH]:g}",
            param="loss_fn_config",
        )
    return settings


def refuse_unusable(request: PassRequest, *, vocabulary: int, longest: int | None, value_head: bool = False) -> None:
    """Raises `RequestError` for data that the request's loss or the model cannot use; it names the sequence and the
    array. `vocabulary` is the model's number of tokens, `longest` its longest sequence; `value_head`: it is a critic.
    """
    settings_of(request)
    if value_head is not (LOSSES[request.loss].output == "values"):
        need = "the model is a critic, whose loss is ppo_critic" if value_head else f"needs a critic: {CRITIC_WANTED}"
        raise RequestError(f"loss_fn = {request.loss!r}: {need}", param="loss_fn")
    if not request.data:
        raise RequestError("data is empty: give at least one sequence", param="data")
    for index, datum in enumerate(request.data):
        where = f"data[{index}]"
        problem = _wrong_tokens(datum, vocabulary, longest) or _wrong_inputs(datum, request, vocabulary)
        if not problem and datum.inputs.keys() != request.data[0].inputs.keys():
            other = min(datum.inputs.keys() ^ request.data[0].inputs.keys())
            problem = f"loss_fn_inputs: {other!r} is in some sequences only: give it in all of them or in none"
        if problem:
            raise RequestError(f"{where}.{problem}", param=where)


def _wrong_tokens(datum: Datum, vocabulary: int, longest: int | None) -> str:
    tokens = datum.tokens
    if tokens.ndim != 1 or not len(tokens):
        return f"model_input has shape {tokens.shape}: it must be a sequence of at least one token"
    if longest is not None and len(tokens) > longest:
        return f"model_input has {len(tokens)} tokens, and the model sees {longest} at most: shorten it"
    return _wrong_ids("model_input", tokens, vocabulary)


def _wrong_inputs(datum: Datum, request: PassRequest, vocabulary: int) -> str:
    name, inputs = request.loss, datum.inputs
    loss = LOSSES[name]
    known = (TARGETS, *loss.inputs, *loss.optional)
    values_alone = loss.output == "values" and not request.backward and not inputs.keys() & set(loss.inputs)
    for item in (TARGETS, *(() if values_alone else loss.inputs)):
        if item not in inputs:
            return f"loss_fn_inputs: {item!r} is missing, which {name} reads"
    for value in inputs:
        if value not in known:
            return f"loss_fn_inputs: {value!r} is not an input of {name}, which reads {', '.join(known)}: leave it out"
    targets = inputs[TARGETS]
    shapes = "(T,) or (T, K)" if loss.several_targets else "(T,)"
    if targets.ndim not in ((1, 2) if loss.several_targets else (1,)) or 0 in targets.shape[1:]:
        return f"loss_fn_inputs: {TARGETS} has shape {targets.shape}: {name} takes {shapes}"
    if len(targets) != len(datum.tokens):
        return f"loss_fn_inputs: {TARGETS} has {len(targets)} positions, and model_input {len(datum.tokens)} tokens"
    for entry, array in inputs.items():
        if array.shape != targets.shape:
            return f"loss_fn_inputs: {entry} has shape {array.shape}, {TARGETS} {targets.shape}: make them equal"
        if entry != TARGETS and not np.isfinite(array).all():
            return f"loss_fn_inputs: {entry} contains NaN or infinity"
    if name == "gspo" and not np.any(inputs[_SEQUENCE]):
        return f"loss_fn_inputs: {_SEQUENCE} marks no token: a sequence needs at least one"
    return _wrong_ids(f"loss_fn_inputs: {TARGETS}", targets, vocabulary)


def _wrong_ids(field: str, ids: np.ndarray[tuple[int, ...], np.dtype[np.generic]], vocabulary: int) -> str:
    if ids.dtype.kind not in "iu":
        return f"{field} holds {ids.dtype}: token ids are whole numbers"
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        return f"{field} contains {wrong}: the model's tokens are 0 to {vocabulary - 1}"
    return ""


def loss_tokens(data: Sequence[Datum], computed: Sequence[Tensor], settings: Mapping[str, float]) -> LossTokens:
    """The tokens of some sequences of one request; `computed` has log-probabilities of each sequence's targets, or
    values, in the shape of the targets.
    """
    device = computed[0].device
    sizes = torch.tensor([tensor.numel() for tensor in computed])
    arrays = {
        name: torch.from_numpy(np.concatenate([datum.inputs[name].astype(np.float32).ravel() for datum in data]))
        for name in data[0].inputs
        if name != TARGETS
    }
    return LossTokens(
        computed=torch.cat([tensor.flatten() for tensor in computed]),
        arrays={name: array.to(device, non_blocking=True) for name, array in arrays.items()},
        sequences=torch.arange(len(sizes)).repeat_interleave(sizes).to(device, non_blocking=True),
        settings=settings,
    )

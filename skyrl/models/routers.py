"""Hooks on the routers of a mixture of experts: their losses and loads, recording of their choices, and routing replay.

Statistics are per row of the batch, so that padding, packing, shared prompts and micro-batches change nothing. They
stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from skyrl.errors import ModelError
from skyrl.models.attention.shared_rows import SequenceGroup
from skyrl.models.files.naming import is_experts
from skyrl.trajectory import RoutedExperts

_KNOWN = frozenset({"Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter"})
"""Routers that choose the top K of a softmax over all experts, and return logits, weights and choices."""


Routed = tuple[Tensor, Tensor, Tensor]
"""Output of a router for T tokens: logits (T, E), weights of the chosen experts (T, K), and their numbers (T, K)."""


@attrs.frozen(kw_only=True, eq=False)
class RoutedTokens:
    """The tokens of a micro-batch of B rows in a rank's order of computation: T tokens, one after the other."""

    lengths: Tensor
    """(B,) int64: tokens of each row."""

    rows: Tensor
    """(M,) int64: the row of each token that this rank computes; a shared token has an entry for each of its rows."""

    positions: Tensor
    """(M,) int64: index of the same token among the T."""

    replayed: Tensor | None = None
    """(T, layers, K) int16: experts that an engine chose; -1 if it chose none. None: routers choose."""

    group: SequenceGroup | None = None
    """The ranks that compute the rows together. None: this rank computes them alone."""


@attrs.frozen(kw_only=True, eq=False)
class RowLoads:
    """Losses and loads of the routers of all layers, for each of B rows."""

    balance: Tensor
    """(B,) float32, with gradient if router losses are learned: E sum_i f_i P_i, where f_i is the mean number of
    choices of expert i per token and P_i its mean probability; mean over layers. It is K for evenly spread choices."""

    z: Tensor
    """(B,) float32, with gradient as `balance`: mean over tokens and layers of (log sum exp of the logits)^2."""

    chosen: Tensor
    """(layers, B, E) float32: tokens that chose each expert."""

    entropy: Tensor
    """(B,) float32: entropy of the distribution over experts in nats, mean over tokens and layers."""


class Routers:
    """Hooks on the routers of a transformers model, which stay for the life of the model."""

    def __init__(self, model: nn.Module, *, learned: bool) -> None:
        """`learned`: whether router losses have a gradient. Raises `ModelError` for a model without known routers."""
        gates = list(_gates(model))
        if not gates:
            raise ModelError("this model has no experts, or its type of router is not supported")
        self.layers, self._learned = len(gates), learned
        self._tokens: RoutedTokens | None = None
        self._measured = False
        self._seen: dict[int, Tensor] = {}
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(partial(self._routed, layer))

    def begin(self, tokens: RoutedTokens | None, *, measured: bool) -> None:
        """Announce a forward pass over these tokens, and its backward pass, which may recompute layers.

        `tokens` None: the hooks do nothing in this pass. Raises `ModelError` for replayed choices of another number of
        layers.
        """
        if tokens is not None:
            refuse_other_layers(tokens, self.layers)
        self._tokens, self._measured, self._seen = tokens, measured, {}

    def loads(self) -> RowLoads:
        """Loads of the last measured pass. Collective over the ranks that share rows."""
        tokens = self._tokens
        assert tokens is not None and self._measured
        seen = torch.stack([self._seen[layer] for layer in range(self.layers)])
        if tokens.group is not None:
            seen = tokens.group.gather(seen.unsqueeze(0)).sum(0)
        return row_loads(seen, tokens.lengths)

    def _routed(self, layer: int, gate: nn.Module, _: tuple[Tensor, ...], output: Routed) -> Routed:
        """The output of a router, with its choices replaced by the engine's if they are replayed."""
        tokens = self._tokens
        if tokens is None:
            return output
        logits, weights, chosen = output
        probabilities = logits.softmax(-1, dtype=torch.float32)
        if tokens.replayed is not None:
            replayed = tokens.replayed[:, layer].long()
            chosen = torch.where(replayed >= 0, replayed, chosen)
            routing_weights = probabilities.gather(1, chosen)
            if getattr(gate, "norm_topk_prob", True):
                routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
            weights = routing_weights.to(weights.dtype)
        if self._measured:
            with torch.set_grad_enabled(self._learned and torch.is_grad_enabled()):
                choices = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
                self._seen[layer] = loads_by_rows(tokens, logits.float(), probabilities, choices)
        return logits, weights, chosen


class ChoiceRecorder:
    """Records the choices of a model's routers in a forward pass."""

    def __init__(self, model: nn.Module, field: str = "enable_return_routed_experts") -> None:
        """Raises `ModelError`, which names `field`, for a model without known routers."""
        self._chosen: dict[int, Tensor] = {}
        gates = list(_gates(model))
        if not gates:
            raise ModelError(f"{field}: this model has no experts, or its type of router is not supported")
        self._experts = max(int(gate.num_experts) for gate in gates)
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(partial(self._routed, layer))

    def take(self) -> Tensor:
        """(T, layers, K) int16: experts of the T tokens of the last forward pass; the record is cleared."""
        chosen, self._chosen = self._chosen, {}
        return torch.stack([chosen[layer] for layer in range(len(chosen))], dim=1)

    def packed(self, chosen: Tensor) -> RoutedExperts:
        """Recorded choices (N, layers, K) in the compact form of a trajectory."""
        return packed_choices(chosen.cpu().numpy(), self._experts)

    def _routed(self, layer: int, gate: nn.Module, _: tuple[Tensor, ...], output: Routed) -> None:
        self._chosen[layer] = output[2].to(torch.int16)


def packed_choices(chosen: NDArray[Any], experts: int) -> RoutedExperts:
    """Expert numbers (N, layers, K), each below `experts`, in the compact form of a trajectory."""
    width: Literal[1, 2] = 1 if experts <= 256 else 2
    _, layers, choices = chosen.shape
    return RoutedExperts(layers=layers, choices=choices, data=chosen.astype(f"<u{width}").tobytes(), width=width)


def restored_choices(routed: RoutedExperts) -> Tensor:
    """(N, layers, K) int16: the inverse of `packed_choices`."""
    numbers = np.frombuffer(routed.data, np.dtype(f"<u{routed.width}")).astype(np.int16)
    return torch.from_numpy(numbers.reshape(len(routed), routed.layers, routed.choices))


def joined_choices(rows: Sequence[RoutedExperts | None], columns: int) -> Tensor | None:
    """(B, columns, layers, K) int16: the choices of B rows, -1 for tokens without any. None if no row has any."""
    known = [(index, row) for index, row in enumerate(rows) if row is not None]
    if not known:
        return None
    _, some = known[0]
    result = torch.full((len(rows), columns, some.layers, some.choices), -1, dtype=torch.int16)
    for index, item in known:
        result[index, : len(item)] = restored_choices(item)
    return result


def known_routers(model: nn.Module) -> bool:
    """Whether the routers of a model can be watched and replayed."""
    return next(_gates(model), None) is not None


def _gates(model: nn.Module) -> Iterator[Any]:
    """The routers of a model in order of layers; empty if any router is of an unknown kind."""
    blocks = dict.fromkeys(name.rpartition(".experts.")[0] for name, _ in model.named_parameters() if is_experts(name))
    gates: list[Any] = [getattr(model.get_submodule(block), "gate", None) for block in blocks]
    if all(type(gate).__name__ in _KNOWN for gate in gates):
        yield from gates


def refuse_other_layers(tokens: RoutedTokens, layers: int) -> None:
    """Raises `ModelError` if an engine chose experts in a number of layers other than `layers`, the learner's."""
    if tokens.replayed is not None and tokens.replayed.shape[1] != layers:
        raise ModelError(
            f"the engine chose experts in {tokens.replayed.shape[1]} layers, and the learner's model has "
            f"{layers} with experts"
        )


def loads_by_rows(tokens: RoutedTokens, logits: Tensor, probabilities: Tensor, choices: Tensor) -> Tensor:
    """(B, 2 E + 2) float32: for each row the sums over its tokens of the probabilities of experts, the choices of
    experts, the squared log sum exp of the logits, and the entropy. The first and the third have a gradient.

    Shapes: logits and probabilities (T, E); choices (T, E), 1 where an expert is chosen and 0 elsewhere.
    """
    exact = probabilities.detach()
    entropy = -torch.special.xlogy(exact, exact).sum(1, keepdim=True)
    statistics = torch.cat([probabilities, choices, logits.logsumexp(1, keepdim=True).square(), entropy], dim=1)
    return statistics.new_zeros(len(tokens.lengths), statistics.shape[1]).index_add(
        0, tokens.rows, statistics[tokens.positions]
    )


def row_loads(seen: Tensor, lengths: Tensor, met: Callable[[Tensor], Tensor] = lambda chosen: chosen) -> RowLoads:
    """Loads from `loads_by_rows` of each layer, (layers, B, 2 E + 2), for rows of `lengths` (B,). If a rank has only
    some tokens of a row, `met` turns their choices (layers, B, E) into the choices of all tokens; the loads of ranks
    add up.
    """
    experts = (seen.shape[2] - 2) // 2
    probabilities, chosen, z, entropy = seen.split([experts, experts, 1, 1], dim=2)
    length = lengths.clamp(min=1)
    balance = (probabilities * met(chosen.detach())).sum(2) * experts / length.square()
    return RowLoads(
        balance=balance.mean(0),
        z=z.squeeze(2).mean(0) / length,
        chosen=chosen.detach(),
        entropy=entropy.detach().squeeze(2).mean(0) / length,
    )

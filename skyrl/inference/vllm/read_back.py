"""Shows that the weights that vLLM was given are in the parameters with which it computes.

A model's `load_weights` decides itself where a weight goes: into a slice of a fused matrix, into several, or nowhere.
While it loads into its parameters in place, each copy is noted with the digest of what was copied, and afterwards the
same places are read again. Where each weight goes does not depend on its values, so that one load of a worker shows it
for those that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.checksums import digest_word
from skyrl.weight_receiver.incoming_weights import summarize_problems

Weights = Iterator[tuple[str, Tensor]]


class ReadBack(TorchDispatchMode):
    """While it is entered, notes what is copied into the parameters of `model`; `compare` reads it again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._names: list[str] = []
        self._copies: list[tuple[str, Tensor, Tensor]] = []
        """Name of the weight, the place that it was copied to, and the digest of what was copied."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Executes an operation, and notes it if it copies into a parameter."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._held:
            target, content = args[0], args[1]
            self._copies.append((self._names[-1], target, digest_word(content.to(target).expand_as(target))))
        return result

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Weights:
        """The weights, while it is noted which of them the model takes."""
        for name, tensor in weights:
            self._names.append(name)
            yield name, tensor

    def compare(self, may_go_nowhere: Container[str]) -> None:
        """Raises `WeightSyncError` if a weight went nowhere, unless it may, or is not where it was copied to."""
        copied = {name for name, _, _ in self._copies}
        lost = (name for name in self._names if name not in copied and name not in may_go_nowhere)
        problems = [f"{name} was taken by vLLM and is in none of its parameters" for name in lost]
        if self._copies:
            now = torch.stack([digest_word(target) for _, target, _ in self._copies]).tolist()
            then = torch.stack([word for _, _, word in self._copies]).tolist()
            pairs = zip(self._copies, now, then, strict=True)
            changed = dict.fromkeys(name for (name, _, _), after, before in pairs if after != before)
            problems += [f"{name} was replaced by another weight after it was loaded" for name in changed]
        if problems:
            raise WeightSyncError(summarize_problems(problems))

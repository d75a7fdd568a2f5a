"""Layers of a model that add the low-rank updates of several adapters to their output, each to its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from skyrl.algorithms.stretch_updates import StretchUpdate, with_updates


@contextmanager
def updated(layers: Mapping[str, nn.Linear], updates: Mapping[str, Sequence[StretchUpdate]]) -> Iterator[None]:
    """A block in which layers, by name, add these updates to their output. A backward pass that computes layers again
    must be in the block, too.
    """
    with ExitStack() as block:
        for name, update in updates.items():
            block.enter_context(layers[name].register_forward_hook(partial(_added, tuple(update))))
        yield


def _added(updates: tuple[StretchUpdate, ...], layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return with_updates(inputs[0], output, updates)

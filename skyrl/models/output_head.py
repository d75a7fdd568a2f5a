"""The output head, between a model's last hidden states and its logits, and a way to compute something else there.

The logits are `head(hidden)` in most models; some scale or cap them afterwards. Where they are, a caller may replace
the product by a function of its own, inside the model's forward pass: there, and only there, a sharded model has its
output matrix whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class PlainHead(nn.Module, ABC):
    """An output head of its own kind: logits are the product of hidden states and `matrix`."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """(V, H), which may be distributed by rows over ranks."""


@torch.no_grad()
def has_plain_head(model: nn.Module, device: torch.device) -> bool:
    """Are its logits the product of hidden states and one matrix, and nothing else? Seen on a few tokens.

    `model` is called as it is trained: with several ranks, all of them must come here.
    """
    head = _head(model)
    if head is None or isinstance(head, PlainHead):
        return head is not None
    products: list[Tensor] = []
    own = head.forward

    def watched(hidden: Tensor) -> Tensor:
        products.append(own(hidden))
        return products[-1]

    with _forward_of(head, watched):
        ids = torch.arange(1, 9, device=device).unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False).logits
    return len(products) == 1 and torch.equal(products[0].float(), logits.float())


@contextmanager
def in_place_of_the_head(model: nn.Module, read: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """A block in which `model(...).logits` is `read(hidden, weight)`, of whatever shape that returns.

    `hidden` (B, N, H) are the hidden states that logits are asked for, `weight` (V, H) is the output matrix in the type
    of the computation.
    """
    head = _head(model)
    assert head is not None, "has_plain_head was not asked"

    def replaced(hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        own = head.matrix if isinstance(head, PlainHead) else head.weight
        weight = own.to(torch.get_autocast_dtype(kind)) if casts else own
        return read(hidden.to(weight.dtype), weight)

    with _forward_of(head, replaced):
        yield


def _head(model: nn.Module) -> nn.Linear | PlainHead | None:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find else None
    return head if isinstance(head, PlainHead) or (isinstance(head, nn.Linear) and head.bias is None) else None


@contextmanager
def _forward_of(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    replaced = vars(head).get("forward")  # tensor parallelism has a forward of its own
    head.forward = forward  # until the block ends
    try:
        yield
    finally:
        if replaced is None:
            del head.forward
        else:
            head.forward = replaced  # as it was

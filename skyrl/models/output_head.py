"""The output head, between a model's last hidden states and its logits, and a way to replace its computation.

The logits are `head(hidden)` in most models; some models scale or cap them afterwards. If they are plain, a caller may
replace the product by another function inside the model's forward pass, the only time at which a sharded model has its
whole output matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from skyrl.errors import ModelError


class PlainHead(nn.Module, ABC):
    """A custom output head whose logits are the product of hidden states and `matrix`."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """The output matrix (V, H), which may be distributed by rows over ranks."""


@torch.no_grad()
def has_plain_head(model: nn.Module, device: torch.device) -> bool:
    """Whether the model's logits are exactly the product of hidden states and one matrix, tested on a few tokens.

    `model` is called as in training, so that all ranks must call this function together.
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
    """A block in which `model(...).logits` is the result of `read(hidden, weight)`, in any shape.

    `hidden` (B, N, H) are the hidden states at the kept columns, `weight` (V, H) is the output matrix in the type of
    the computation.
    """
    head = _head(model)
    assert head is not None, "has_plain_head was not asked"

    def replaced(hidden: Tensor) -> Tensor:
        weight = head.matrix if isinstance(head, PlainHead) else head.weight
        return read(hidden.to(weight.dtype), weight)

    with _forward_of(head, replaced):
        yield


@contextmanager
def float32_head(model: nn.Module) -> Iterator[None]:
    """A block in which the model's own output head computes in float32, whatever type its weights have. What the model
    does to logits afterwards then happens in float32, too.
    """
    head = output_layer(model)
    with _forward_of(head, in_float32(head)):
        yield


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """The layer that transformers calls by this name, which makes the model's logits; None if it has none."""
    find = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = find() if find else None
    return head


def output_layer(model: nn.Module) -> nn.Linear:
    """The linear layer that makes the model's logits. Raises `ModelError` if it has none."""
    head = output_embeddings(model)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output head: set trainer.fp32_lm_head = false")
    return head


def in_float32(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """x W^T + b in float32 with the present weight of the layer: (..., in) -> (..., out)."""

    def forward(x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.float()
        return nn.functional.linear(x.float(), layer.weight.float(), bias)

    return forward


def _head(model: nn.Module) -> nn.Linear | PlainHead | None:
    head = output_embeddings(model)
    return head if isinstance(head, PlainHead) or (isinstance(head, nn.Linear) and head.bias is None) else None


@contextmanager
def _forward_of(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    replaced = vars(head).get("forward")  # tensor parallelism sets its own forward
    head.forward = forward  # until the block ends
    try:
        yield
    finally:
        if replaced is None:
            del head.forward
        else:
            head.forward = replaced  # as it was

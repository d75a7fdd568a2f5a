"""Copies of a model's weights in the type it computes in, for a model that is not sharded.

Weights, gradients and optimizer state stay in float32. During forward and backward the model's parameters are copies
in 16 bits, so that nothing is converted between two matrix products, and the residual stream takes half the memory
traffic. FSDP2's mixed precision computes in the same way with several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A block in which the parameters of `model` are copies in `dtype`, which it drops at its end.

    Each backward pass in the block adds its gradients to those of the model's own parameters, in their own type. Tied
    parameters share one copy. In its own type, the model stays as it is.
    """
    held = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and parameter.dtype is not dtype
    ]
    copies = _copies({id(parameter): parameter for _, _, parameter in held}, dtype)
    try:
        for module, name, parameter in held:
            module._parameters[name] = copies[id(parameter)]
        yield
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter


def _copies(parameters: dict[int, nn.Parameter], dtype: torch.dtype) -> dict[int, nn.Parameter]:
    """A copy of each parameter, under the same key. All are filled by one operator: a model has hundreds."""
    tensors = [torch.empty_like(each, dtype=dtype, requires_grad=False) for each in parameters.values()]
    if tensors:
        torch._foreach_copy_(tensors, [each.detach() for each in parameters.values()])
    copies = {}
    for (key, parameter), tensor in zip(parameters.items(), tensors, strict=True):
        copies[key] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            copies[key].register_post_accumulate_grad_hook(partial(_add_gradient, parameter))
    return copies


def _add_gradient(parameter: nn.Parameter, copy: Tensor) -> None:
    """Move the gradient of a copy to the parameter as soon as it is complete, so that few exist at once in 16 bits."""
    assert copy.grad is not None
    if parameter.grad is None:
        parameter.grad = copy.grad.to(parameter.dtype)
    else:
        parameter.grad.add_(copy.grad)
    copy.grad = None

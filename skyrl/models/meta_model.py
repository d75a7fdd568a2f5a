"""A model's modules without values: what a process builds that will receive the weights from another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl.models.loading import load_config
from skyrl.tree import FrozenDict


def causal_lm_skeleton(path: str, *, attention: str, overrides: Mapping[str, Any] = FrozenDict()) -> PreTrainedModel:
    """The model of `load_causal_lm` in float32 on the meta device, tied weights tied. Raises `ModelError`."""
    config = load_config(path, overrides)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    return model


def without_numbers(model: nn.Module) -> nn.Module:
    """The same model from the meta device, on the host, where each parameter is one number in its whole shape: what
    looks at shapes and types alone works on it, and takes no memory.
    """
    zero = torch.zeros(())
    numbers = {each: nn.Parameter(zero.expand(each.shape), requires_grad=False) for each in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, numbers[parameter])  # tied ones stay so
    return model

"""A model's modules without values, for a process that receives the weights from another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl.models.files.loading import load_config
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
    """The same meta model moved to the host without using memory: each parameter is one number expanded to its shape.
    Code that reads only shapes and types works on it.
    """
    zero = torch.zeros(())
    numbers = {each: nn.Parameter(zero.expand(each.shape), requires_grad=False) for each in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, numbers[parameter])  # tied parameters stay tied
    return model

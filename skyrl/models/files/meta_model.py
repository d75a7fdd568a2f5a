"""A model's modules without values, for a process that receives the weights from another one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from skyrl.models.files.loading import load_config
from skyrl.planning.model_shape import EXPERTS, NAMES, CountedWeights, ModelShape, shape_of
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
    numbers = {item: nn.Parameter(zero.expand(item.shape), requires_grad=False) for item in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, numbers[parameter])  # tied parameters stay tied
    return model


def counted_shape(config: PretrainedConfig) -> ModelShape:
    """Sizes of a causal language model, with its weights as its modules have them. Raises what transformers raises for
    a configuration from which it builds none.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    prefix, of_layers = _layers(model)
    layers = [list(weights.values()) for weights in of_layers.values()]
    inside = {id(weight) for weights in layers for weight in weights}
    linear = [item for name, item in model.named_modules() if name.startswith(prefix) and isinstance(item, nn.Linear)]
    counted = CountedWeights(
        layers=tuple(tuple(weight.numel() for weight in weights) for weights in layers),
        experts=tuple(
            sum(weight.numel() for name, weight in weights.items() if ".experts." in name)
            for weights in of_layers.values()
        ),
        outer=tuple(weight.numel() for weight in model.parameters() if id(weight) not in inside),
        sides=sum(entry.in_features + entry.out_features for entry in linear),
    )
    text: Any = config.get_text_config()
    values = _values(text.to_dict(), text.attribute_map)
    usual = {
        "num_hidden_layers": len(layers),
        "num_attention_heads": 1,  # of a model without attention
        "intermediate_size": max(max(element.in_features, element.out_features) for element in linear) if linear else 1,
    }
    shape = shape_of(usual | {name: value for name, value in values.items() if value is not None})
    if shape is None:
        raise ValueError(f"a configuration of {text.model_type} does not have its sizes")
    heads = shape.key_heads if values.get("num_attention_heads") else 0
    return attrs.evolve(shape, counted=counted, is_estimated=False, key_heads=heads)


def _layers(model: nn.Module) -> tuple[str, dict[int, dict[str, nn.Parameter]]]:
    """Name of the list of the model's layers, with its dot, and the weights of each by number and name."""
    lists: dict[str, dict[int, dict[str, nn.Parameter]]] = defaultdict(lambda: defaultdict(dict))
    for name, weight in model.named_parameters():
        if match := re.match(r"(.*?\.)(\d+)\.", name):
            lists[match[1]][int(match[2])][name] = weight
    return max(lists.items(), key=lambda item: sum(w.numel() for weights in item[1].values() for w in weights.values()))


def _values(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of a configuration under the usual names of sizes; of sizes that differ by layer, the largest."""
    usual = dict(values)
    for name in (*NAMES.values(), *EXPERTS, "intermediate_size", "num_key_value_heads", "head_dim"):
        value = values.get(name) or values.get(names.get(name, name))
        usual[name] = max(value) if isinstance(value, list | tuple) and value else value
    return usual

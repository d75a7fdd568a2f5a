"""The linear layers that a LoRA adapter of the training service has, by the parts of the model that its client names.

The client names attention, feed-forward blocks and output head; a model's layers are assigned to them by the names that
transformers gives their modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skyrl.models.files.naming import tied_names
from skyrl.models.lora import is_linear
from skyrl.models.onednn import OneDnnLinear

Part = Literal["attn", "mlp", "unembed"]

_MIXES_TOKENS = ("attn", "attention", "mixer", "mamba", "conv")
"""Words in the names of blocks in which tokens see each other; every other block is a feed-forward block."""


def adaptable_layers(model: nn.Module) -> dict[str, tuple[Part, nn.Linear]]:
    """The linear layers of a transformers causal language model and their parts, by name, in the model's order.

    Linear layers of blocks in which tokens see each other are the attention, all others except the output head the
    feed-forward part. Left out is a layer whose weight is also used elsewhere: a head that is tied to the embedding has
    no adapter. The experts of a mixture of experts are no linear layers and have none either.
    """
    transformer: Any = model
    head, tied = transformer.get_output_embeddings(), tied_names(model)
    shared = {*tied, *tied.values()}
    layers: dict[str, tuple[Part, nn.Linear]] = {}
    for name, module in model.named_modules():
        if (is_linear(module) or isinstance(module, OneDnnLinear)) and f"{name}.weight" not in shared:
            mixes = any(word in name.lower() for word in _MIXES_TOKENS)
            layers[name] = ("unembed" if module is head else "attn" if mixes else "mlp"), module
    return layers


def drawn_factors(layers: Mapping[str, nn.Linear], *, rank: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """New factors A (rank, in) and B (out, rank) of each layer, in float32 on the host: B is 0, and A is what
    `models/lora.py` draws for the same layers and seed.
    """
    factors = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in layers.items():  # PEFT makes both layers, each of which draws, and then draws A again
            a = nn.Linear(layer.in_features, rank, bias=False)
            b = nn.Linear(rank, layer.out_features, bias=False)
            nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
            factors[name] = (a.weight.detach(), torch.zeros_like(b.weight.detach()))
    return factors

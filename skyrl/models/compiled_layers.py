"""Decoder layers through `torch.compile`: each kind of layer is compiled once, for all layers and all lengths.

Attention over segments stays outside, between the compiled parts of a layer: its choice of a kernel depends on the
rows.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import AttentionInterface

from skyrl.models.attention.segment_attention import SEGMENTS, segment_attention

WARNINGS: dict[type[Warning], str] = {
    DeprecationWarning: ".*torch.jit.script_method",
    UserWarning: "The .grad attribute of a Tensor that is not a leaf",
}
"""Warnings of the compiler about itself: deprecated names, and gradients that it reads."""


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> int:
    """Compile the decoder layers of a transformers model in place, on their first use. Returns their number.

    Passes with and without gradient are compiled separately. Recomputation of activations and the weights of each pass
    are outside of what is compiled.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for kind, text in WARNINGS.items():
        warnings.filterwarnings("ignore", text, kind)
    AttentionInterface.register(SEGMENTS, torch.compiler.disable(segment_attention))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    return len(layers)

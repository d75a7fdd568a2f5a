"""Tensor parallelism by the layers of DeepSpeed's AutoTP: each has this rank's part of a matrix as a plain parameter,
which DeepSpeed's optimizers flatten and shard further.

The cuts follow the same plan of transformers as under FSDP2 (`tensor_parallel.py`). DeepSpeed's layers must be set to
training mode by a switch for the whole process, which only they read.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from skyrl.errors import ModelError, UserError
from skyrl.installation import package_command
from skyrl.models.output_head import PlainHead, output_embeddings
from skyrl.models.parallel.tensor_parallel import (
    COLUMNS,
    EMBEDDINGS,
    GATHERED,
    PARTIAL,
    ROWS,
    SPLIT,
    module_styles,
    whole_outputs,
)


class CutHead(PlainHead):
    """The output matrix, cut by rows into equal parts over the ranks of a one-dimensional mesh."""

    def __init__(self, own: nn.Parameter, mesh: DeviceMesh) -> None:
        """`own` (V / ranks, H) are this rank's rows."""
        super().__init__()
        self.weight, self._mesh = own, mesh

    @property
    def matrix(self) -> Tensor:
        """The output matrix (V, H), distributed by rows."""
        return DTensor.from_local(self.weight, self._mesh, [Shard(0)], run_check=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H), the same on every rank -> logits of the whole vocabulary (..., V) on every rank."""
        return whole_outputs(hidden, self.matrix, None, self._mesh)


def cut_by_deepspeed(model: nn.Module, mesh: DeviceMesh, field: str) -> dict[str, int]:
    """Replace layers of a transformers model by those of AutoTP, with this rank's parts on its device.

    The mesh has one dimension, whose ranks have the same model. A vocabulary that cannot be cut evenly stays whole.
    Returns the dimension along which each cut parameter is cut into equal parts, keyed by its name in
    `named_parameters`.
    Raises `ModelError`, which names `field`, for embeddings that DeepSpeed cannot cut.
    """
    layers = _layers(field)
    full_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    cuts_vocabulary = _can_cut_vocabulary(model, mesh.size())
    for name, style in sorted(module_styles(model), key=lambda named: named[1] != EMBEDDINGS):  # then a tied head
        module = model.get_submodule(name)
        if style == PARTIAL:
            _sum_gradients(module, mesh)
        elif style in (COLUMNS, ROWS) or (style != SPLIT and cuts_vocabulary):  # DeepSpeed has no layer for SPLIT
            model.set_submodule(name, _cut_layer(layers, module, style, mesh, field))
    return {
        name: next(dim for dim, length in enumerate(item.shape) if length != full_shapes[name][dim])
        for name, item in model.named_parameters()
        if item.shape != full_shapes[name]
    }


def _can_cut_vocabulary(model: Any, size: int) -> bool:
    """Whether the vocabulary divides into equal parts, and no head with a bias shares the embeddings."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = output_embeddings(model)
    ties_biased = head is not None and head.bias is not None and head.weight is embeddings.weight
    return embeddings.num_embeddings % size == 0 and not ties_biased


def _cut_layer(layers: ModuleType, full_layer: nn.Module, style: str, mesh: DeviceMesh, field: str) -> nn.Module:
    """The layer of AutoTP that replaces a whole layer and takes over its parameters."""
    module: Any = full_layer
    group = mesh.get_group()
    new: nn.Module
    if style == EMBEDDINGS:
        try:
            new = layers.VocabParallelEmbedding(module, group)
            vars(new)["num_embeddings"] = module.num_embeddings  # size of the whole table, as in torch's embedding
        except NotImplementedError as error:
            raise ModelError(f"DeepSpeed cannot cut the embeddings of this model: set {field} = 1 ({error})") from error
    elif style == ROWS:
        new = layers.LinearAllreduce(module, group)
    elif len(module.weight) < module.out_features:  # it shares the embeddings, which are cut
        new = CutHead(module.weight, mesh)
    else:
        new = layers.LinearLayer(module, group, gather_output=style != COLUMNS)
        if style == GATHERED and module.bias is None:
            new = CutHead(module.weight, mesh)
    return new


def _sum_gradients(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a module that sees the heads of this rank only."""

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=mesh.get_group())
        return total

    for parameter in norm.parameters():
        if parameter.requires_grad:
            parameter.register_hook(summed)


def _layers(field: str) -> ModuleType:
    """The module with AutoTP's layers, set to training. Raises `UserError`, naming `field`, for an old DeepSpeed."""
    layers = importlib.import_module("deepspeed.module_inject.layers")
    if not hasattr(layers, "VocabParallelEmbedding"):
        raise UserError(f"{field} above 1 needs a newer DeepSpeed: {package_command('-U deepspeed')}, or set it to 1")
    importlib.import_module("deepspeed").init_distributed(verbose=False)  # DeepSpeed's collectives use torch's group
    layers.set_autotp_mode(training=True)
    return layers

"""Names of weights: during transfer those of the stored model, with each tied tensor only once; and names of expert
weights in model files, which servers read.

transformers holds all experts of a layer in two tensors, and so do learners and the torch engine:

    X.mlp.experts.gate_up_proj    (experts, 2 x inner, hidden): gate above up
    X.mlp.experts.down_proj       (experts, hidden, inner)

Files and vLLM have one matrix per expert and projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from attrs import frozen
from torch import Tensor, nn

from skyrl.errors import ModelError


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every entry of the state dict, in its order; tied entries once, under the first name.

    The tensors, of any shape, are the model's own, without their gradient history: writing into one changes the model.
    """
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():
        if name not in tied:
            yield name, tensor


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every second name of a tied tensor -> its first name; the second is usually `lm_head.weight`."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    return tied


_FUSED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.+)\.mlp\.(gate\.weight)")


@frozen
class _Names:
    """Names of the parts of a mixture of experts in the files of one model family."""

    block: str
    gate: str
    up: str
    down: str


_QWEN = _Names("mlp", "gate_proj", "up_proj", "down_proj")
_FAMILIES: Mapping[str, _Names] = {
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "olmoe": _QWEN,
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
}

EXPERT_MATRICES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of the matrices of an expert, in files and in transformers."""


def is_experts(name: str) -> bool:
    """Whether a weight of this name holds the matrices of all experts of a layer."""
    return _FUSED.fullmatch(name) is not None


def refuse_unnamed_experts(names: Iterator[str], model_type: str) -> None:
    """Raises `ModelError` for a mixture of experts whose names in files are unknown."""
    if model_type not in _FAMILIES and any(is_experts(name) for name in names):
        raise ModelError(
            f"the names of the experts of a {model_type} in inference servers are unknown; supported: "
            f"{', '.join(_FAMILIES)}: set generator.inference_engine.backend = torch"
        )


def stored_names(weights: Iterator[tuple[str, Tensor]], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model of this transformers type under the names of its files, with experts one by one, as views
    of the tensors that hold all of them. Weights of a type without experts pass unchanged.
    """
    names = _FAMILIES.get(model_type)
    for name, tensor in weights:
        fused, router = _FUSED.fullmatch(name), _ROUTER.fullmatch(name)
        if names is not None and fused is not None:
            for number, matrix in enumerate(tensor):
                expert = f"{fused[1]}.{names.block}.experts.{number}"
                if fused[2] == "down_proj":
                    yield f"{expert}.{names.down}.weight", matrix
                    continue
                gate, up = matrix.chunk(2)
                yield f"{expert}.{names.gate}.weight", gate
                yield f"{expert}.{names.up}.weight", up
        elif names is not None and router is not None:
            yield f"{router[1]}.{names.block}.{router[2]}", tensor
        else:
            yield name, tensor


def place_in_files(name: str, rows: range, shape: torch.Size, model_type: str) -> tuple[str, range, torch.Size]:
    """Location in files of rows of a transformers weight of this `shape`: name, rows and shape of the stored weight.
    `rows` are counted over all experts of a layer, one below the other, and lie inside one of their matrices.
    """
    names = _FAMILIES.get(model_type)
    fused, router = _FUSED.fullmatch(name), _ROUTER.fullmatch(name)
    if names is not None and router is not None:
        return f"{router[1]}.{names.block}.{router[2]}", rows, shape
    if names is None or fused is None:
        return name, rows, shape
    height = shape[1] if fused[2] == "down_proj" else shape[1] // 2
    number, first = divmod(rows.start, height)
    kind, expert = names.down, number
    if fused[2] != "down_proj":
        kind, expert = (names.gate, names.up)[number % 2], number // 2
    stored = f"{fused[1]}.{names.block}.experts.{expert}.{kind}.weight"
    return stored, range(first, first + len(rows)), torch.Size((height, shape[2]))

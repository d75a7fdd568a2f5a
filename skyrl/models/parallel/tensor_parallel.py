"""Tensor parallelism (arXiv:1909.08053): several ranks hold a part of every large matrix, and compute on the same rows.

transformers has a plan for most of its decoders, which says for each module whether its matrix is cut by outputs
("colwise") or by inputs ("rowwise"), and functions that cut matrices and sum the results of the ranks. Here the plan is
completed for adapters, for tied heads, and for heads of other kinds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PretrainedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from skyrl.errors import ModelError
from skyrl.models.files.facts import sizes_to_cut
from skyrl.models.files.naming import tied_names
from skyrl.models.small_copy import (
    LONGEST,
    TOLERANCE,
    VOCABULARY,
    NoCopyError,
    is_rounding,
    log_probabilities,
    small_copy,
    tried,
)
from skyrl.planning.batches import uneven_parts

COLUMNS, ROWS = "colwise", "rowwise"
"""Styles of transformers: a matrix is cut by outputs, so that each rank has some of them, or by inputs, so that the
results of the ranks are summed."""

PARTIAL = "replicated_with_grad_allreduce"
"""Style of a norm that sees only the heads of this rank, so that its gradient is the sum over ranks. The hook of
transformers would sum after every backward pass, when FSDP2 has already moved the gradient; these gradients are summed
once instead, before the step.
"""

EMBEDDINGS = "embedding_rowwise"
"""Style of the embeddings: each rank has those of some tokens."""

GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
"""Styles of matrices that are cut, by outputs or by inputs, while their inputs and outputs are whole on every rank: the
output head, and layers whose outputs are divided, normalized or mixed in a way that needs all of them.
"""

_BETWEEN_WHOLE = {GATHERED: Shard(0), SPLIT: Shard(1)}

_KNOWN = {COLUMNS, ROWS, PARTIAL, EMBEDDINGS, *_BETWEEN_WHOLE, "colwise_rep"}


def cut(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Cut the parameters of a model on the meta device over the ranks of a one-dimensional mesh.

    Returns the names of the parameters that every rank has whole and whose gradient is the sum over the mesh.
    """
    plan = dict(_plan(model))
    partial = {name for name, style in plan.items() if style == PARTIAL}
    ties = tied_names(model)
    own_ways = (PARTIAL, *_BETWEEN_WHOLE)
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style not in own_ways})
    for name, style in list(module_styles(model)):
        if style in _BETWEEN_WHOLE:
            _cut_between_whole(model.get_submodule(name), mesh, _BETWEEN_WHOLE[style])
    _share_inputs(model, plan, mesh)
    for second, first in ties.items():  # cutting unties them
        module, _, name = second.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(first))
    return [
        name
        for name, _ in model.named_parameters()
        if replace_layer_number_by_wildcard(name.rpartition(".")[0]) in partial
    ]


def _share_inputs(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Give the matrices of one module that are cut by outputs a common distributed input. Its gradient is then summed
    over the ranks once for queries, keys and values, and once for gate and up projection.
    """
    siblings: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if plan.get(replace_layer_number_by_wildcard(name)) == COLUMNS and isinstance(module, nn.Linear):
            siblings.setdefault(name.removesuffix(".base_layer").rpartition(".")[0], []).append(module)
    for modules in siblings.values():
        shared = _SharedInput(mesh, len(modules))
        for module in modules:
            module.register_forward_pre_hook(shared)


class _SharedInput:
    """A hook for modules that are called with the same tensor one after the other."""

    def __init__(self, mesh: DeviceMesh, modules: int) -> None:
        self._mesh, self._modules = mesh, modules
        self._own: Tensor | None = None
        self._common: Tensor | None = None
        self._left = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        own, *others = args
        if isinstance(own, DTensor) or not own.requires_grad:
            return None
        if own is not self._own:
            self._own, self._left = own, self._modules
            self._common = DTensor.from_local(own, self._mesh, [Replicate()], run_check=False)
        common, self._left = self._common, self._left - 1
        if self._left == 0:
            self._own = self._common = None  # so that neither outlives the pass
        return common, *others


def _cut_between_whole(module: nn.Module, mesh: DeviceMesh, weight: Shard) -> None:
    """Cut a matrix whose inputs and outputs are whole on every rank. By outputs, in any number of them: each rank has
    the rows of some. By inputs: its bias is whole.
    """
    linear: Any = module
    assert isinstance(module, nn.Linear), "the plan calls it a matrix"
    for name, parameter in list(module.named_parameters()):
        placement = Replicate() if name == "bias" and weight.dim == 1 else Shard(weight.dim)
        own = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))

    linear.forward = lambda hidden: whole_outputs(hidden, module.weight, module.bias, mesh)


def whole_outputs(inputs: Tensor, matrix: Tensor, bias: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """Outputs (..., V) on every rank, from inputs (..., H), the same on every rank, and a distributed matrix (V, H) and
    bias (V,). Logits, if the matrix is the output head.
    """
    common = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False)
    outputs: Any = nn.functional.linear(common, matrix, bias)
    full: Tensor = outputs.redistribute(placements=[Replicate()]).to_local()
    return full


def module_styles(model: nn.Module) -> list[tuple[str, str]]:
    """Name and style of every module in the model's plan."""
    plan = dict(_plan(model))
    named = ((name, plan.get(replace_layer_number_by_wildcard(name))) for name, _ in model.named_modules())
    return [(name, style) for name, style in named if style is not None]


def refuse_uncuttable(model: nn.Module, size: int, ranks: int, field: str) -> None:
    """Raises `ModelError`, which names `field`, if no `size` of the `ranks` can cut this transformers model."""
    config: Any = model.config
    config = config.get_text_config()
    plan = _model_plan(model)
    if not any("*" in name for name in plan) or not _KNOWN.issuperset(plan.values()):
        raise ModelError(
            f"transformers has no tensor-parallel plan for a {config.model_type}, or one that is not supported here: "
            f"set {field} = 1"
        )
    if mismatch := uneven_parts(sizes_to_cut(config.to_dict()), size, ranks):
        name, uneven = mismatch
        sizes = " or ".join(map(str, uneven.nearest))
        raise ModelError(f"{size} ranks cannot share the model's {uneven.total} {name}: set {field} = {sizes}")


def refuse_wrong_cut(model: nn.Module, mesh: DeviceMesh, field: str) -> None:
    """Raises `ModelError`, which names `field`, if the ranks of a one-dimensional mesh would not compute together what
    one rank computes alone with this transformers model. Every rank calls this.

    A plan can be wrong silently: it may pass over a module that sees only this rank's part of a layer. A small copy of
    the model is therefore cut, and its log-probabilities and gradients are compared with those of the whole copy.
    """
    config: Any = model.config
    if fault := _fault_of_cut(config, mesh):
        raise ModelError(
            f"transformers' tensor-parallel plan for a {config.model_type} is not right ({fault}): set {field} = 1"
        )


def _fault_of_cut(config: PretrainedConfig, mesh: DeviceMesh) -> str:
    """How a cut copy of the model differs from the whole one; empty if it does not."""
    ids = torch.randint(1, VOCABULARY, (2, LONGEST), generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
    try:
        full_model: nn.Module = small_copy(config, times=mesh.size() // math.gcd(mesh.size(), 2))
        full_model.to(mesh.device_type).requires_grad_(True)
        parts = copy.deepcopy(full_model)
        partial = tried(lambda: cut(parts, mesh))
        expected, actual = tried(lambda: (_learned(full_model, ids), _learned(parts, ids)))
    except NoCopyError as error:
        return f"a small copy fails: {error}"
    nats = float((actual - expected).abs().max())
    if not is_rounding(nats, expected):
        return f"log-probabilities of a small copy differ by {nats:.2g} nats"
    gradients = {
        name: _whole_gradient(parameter, name in partial, mesh) for name, parameter in parts.named_parameters()
    }
    norm = math.sqrt(sum(float(item.grad.square().sum()) for item in full_model.parameters() if item.grad is not None))
    for name, parameter in full_model.named_parameters():
        if parameter.grad is None:
            continue
        difference = float((gradients[name] - parameter.grad).norm())
        if not difference <= TOLERANCE * (float(parameter.grad.norm()) + TOLERANCE * norm):
            return f"the gradient of {name} is another one in a small copy"
    return ""


def _learned(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probabilities (rows, tokens, V) of a model, whose gradients are then those of the log-likelihood of `ids`."""
    log_probs = log_probabilities(model(input_ids=ids, use_cache=False).logits)
    log_probs[:, :-1].gather(-1, ids[:, 1:].unsqueeze(-1)).sum().backward()
    return log_probs.detach()


def _whole_gradient(parameter: Tensor, partial: bool, mesh: DeviceMesh) -> Tensor:
    """Gradient of the whole parameter; zeros if it has none."""
    gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    if partial:
        dist.all_reduce(gradient, group=mesh.get_group())
    result: Tensor = gradient
    return result


def _plan(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Module, with * for the number of a layer, and its style. An adapter follows the matrix that it adapts."""
    plan = _model_plan(model)
    adapted = {
        replace_layer_number_by_wildcard(name) for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    for name, style in plan.items():
        if name not in adapted:
            yield name, style
            continue
        yield f"{name}.base_layer", style
        yield (f"{name}.lora_B.default", style) if style == COLUMNS else (f"{name}.lora_A.default", style)


def _model_plan(model: Any) -> dict[str, str]:
    """transformers' plan, also for a model with another head; the embeddings are cut like the output head."""
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if plan is None:
        name: str = model.body_name
        plan = {f"{name}.{key}": style for key, style in getattr(model, name).tp_plan.items()}
    names = {id(module): item for item, module in model.named_modules()}
    return {**plan, names[id(model.get_input_embeddings())]: EMBEDDINGS} if plan else {}

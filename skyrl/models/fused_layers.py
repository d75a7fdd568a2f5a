"""Faster layers for a learner's model: fused kernels, and decoder layers through `torch.compile`.

Norms, gated feed-forward layers and rotary embeddings run in the Triton kernels of Liger Kernel (arXiv:2410.10989): one
kernel where transformers launches two to ten, with less memory traffic. A module gets a kernel only if the kernel
computes what the module computes: both are compared on random numbers first. So a norm that adds one to its weight, or
another activation, keeps its own code, whatever the class is called.

Each kind of layer is compiled once, for all layers and all lengths. Attention over segments stays outside, between the
compiled parts of a layer: its choice of a kernel depends on the rows.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl.errors import UserError
from skyrl.installation import install_command
from skyrl.models.attention.segment_attention import SEGMENTS, segment_attention

_log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"
"""Name under which the modules of transformers hold the rotation of queries and keys."""

TOLERANCE = 0.05
"""Largest difference from a module's own results, relative to the largest number: a few roundings to bfloat16."""

ROWS = 8
"""Rows of random numbers that are compared."""


_verdicts: dict[object, bool] = {}
"""Whether a kernel computes what a module computes, by class and settings, shapes of the weights, device and type."""


def fuse_layers(model: nn.Module, device: torch.device, dtype: torch.dtype, *, field: str) -> Counter[str]:
    """Let norms, feed-forward layers and rotations of `model`, which computes in `dtype`, run in fused kernels on
    `device`. The model itself may be on the meta device.

    Returns the number of changed modules of each kind. The kernels of rotations belong to a module of transformers:
    all its models use them where they learn on a GPU. Raises `UserError`, which names `field`, without the package.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError(
            f"{field} = true needs the package liger-kernel: {install_command('liger')}, or set it to false"
        )
    changed: Counter[str] = Counter()
    for module in model.modules():
        for kind, fits, forward in (("norms", _is_norm, _norm), ("feed-forward layers", _is_gated, _gated)):
            if fits(module):
                key = (_settings(module), tuple(parameter.shape for parameter in module.parameters()), device, dtype)
                if key not in _verdicts:
                    _verdicts[key] = _computes_the_same(module, forward, device, dtype)
                if _verdicts[key]:
                    module.forward = MethodType(forward, module)
                    changed[kind] += 1
        head = getattr(module, "head_dim", None)
        if isinstance(head, int):
            changed["rotations"] += _fuse_rotation(sys.modules[type(module).__module__], head, device, dtype)
    _log.info("fused kernels for %s", ", ".join(f"{count} {kind}" for kind, count in changed.items()) or "no module")
    return changed


def _settings(module: nn.Module) -> tuple[object, ...]:
    """Class of the module, its activation and the plain values of its attributes."""
    plain = ((name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str))
    return type(module), repr(getattr(module, "act_fn", None)), *sorted(plain)


def _takes(function: Callable[..., Any], *names: str) -> bool:
    """Whether a function has parameters of these names first, or one of any name, and no others that need a value."""
    parameters = list(inspect.signature(function).parameters.values())
    if not names:
        return len(parameters) == 1
    needed = [parameter for parameter in parameters[len(names) :] if parameter.default is parameter.empty]
    return [parameter.name for parameter in parameters[: len(names)]] == list(names) and not needed


def _is_norm(module: nn.Module) -> bool:
    named = "RMSNorm" in type(module).__name__ and hasattr(module, "variance_epsilon")
    return named and isinstance(getattr(module, "weight", None), Tensor) and _takes(module.forward)


def _norm(module: nn.Module, hidden: Tensor) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    normalized: Tensor = LigerRMSNormFunction.apply(
        hidden, module.weight, module.variance_epsilon, 0.0, "llama", False, None
    )
    return normalized


def _is_gated(module: nn.Module) -> bool:
    linear = all(hasattr(getattr(module, name, None), "in_features") for name in ("gate_proj", "up_proj", "down_proj"))
    return linear and hasattr(module, "act_fn") and _takes(module.forward)


def _gated(module: Any, hidden: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    result: Tensor = module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(hidden), module.up_proj(hidden)))
    return result


def _computes_the_same(
    module: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether `forward` gives the module's output and gradients, for random weights and numbers."""
    generator = torch.Generator(device).manual_seed(0)
    try:
        plain: Any = copy.deepcopy(module).to_empty(device=device).to(dtype)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0, generator=generator)
        width = plain.weight.shape[-1] if _is_norm(module) else plain.gate_proj.in_features
        numbers = torch.randn(ROWS, width, device=device, generator=generator)
        learned = [item for item in plain.parameters() if item.requires_grad]
        # large numbers, too: some layers clamp
        return all(
            _close(*pair)
            for scale in (1.0, 10.0 if dtype is torch.float16 else 100.0)  # whose products overflow
            for pair in zip(
                *(
                    _results(compute, (numbers * scale).to(dtype).requires_grad_(), learned)
                    for compute in (plain, partial(forward, plain))
                ),
                strict=True,
            )
        )
    except Exception as error:  # noqa: BLE001 - whatever code of a model does, it then keeps its own
        _log.info("%s keeps its own code, which cannot be compared: %s", type(module).__name__, error)
        return False


def _results(compute: Callable[[Tensor], Tensor], hidden: Tensor, learned: list[Tensor]) -> list[Tensor]:
    """The output for `hidden`, and the gradients of a weighted sum of it."""
    output = compute(hidden)
    slope = torch.linspace(-1, 1, output.shape[-1], device=output.device, dtype=output.dtype)
    gradients = torch.autograd.grad((output * slope).sum(), [hidden, *learned], materialize_grads=True)
    return [output, *gradients]


def _close(one: Tensor, other: Tensor) -> bool:
    largest = one.float().abs().max()
    return bool((one.float() - other.float()).abs().max() <= TOLERANCE * largest)


def _fuse_rotation(code: ModuleType, head: int, device: torch.device, dtype: torch.dtype) -> int:
    """Replace the rotation in a module of transformers, unless that is done or it rotates otherwise. Returns 1 if its
    rotation is fused.
    """
    plain = getattr(code, ROTARY, None)
    if isinstance(plain, _Rotation):
        return 1
    if plain is None or not _takes(plain, "q", "k", "cos", "sin"):
        return 0
    generator = torch.Generator(device).manual_seed(0)
    numbers = (torch.randn(1, 2, ROWS, head, device=device, generator=generator).to(dtype) for _ in range(2))
    angles = torch.randn(1, ROWS, head // 2, device=device, generator=generator).repeat(1, 1, 2)
    query, key, cosine, sine = *numbers, angles.cos().to(dtype), angles.sin().to(dtype)
    fused = _Rotation(plain)
    try:
        rotated = fused.in_one_kernel(query.clone(), key.clone(), cosine, sine)
        same = all(_close(*pair) for pair in zip(plain(query, key, cosine, sine), rotated, strict=True))
    except Exception as error:  # noqa: BLE001 - as above
        _log.info("%s keeps its own rotation, which cannot be compared: %s", code.__name__, error)
        return 0
    if same:
        setattr(code, ROTARY, fused)
    return int(same)


@frozen
class _Rotation:
    """The rotation of queries and keys in a module of transformers: fused on a GPU, its own otherwise."""

    plain: Callable[..., tuple[Tensor, Tensor]]

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **others: object) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys: (B, heads, T, D) each, by `cos` and `sin` (B, T, D)."""
        rotates_all = cos.shape[-1] == q.shape[-1] and not others  # not only a part of each head
        learns = not torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()
        if q.device.type == "cuda" and rotates_all and learns:
            return self.in_one_kernel(q, k, cos, sin)
        return self.plain(q, k, cos, sin, **others)

    @staticmethod
    def in_one_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys, which may be written over the given ones."""
        from liger_kernel.ops import LigerRopeFunction

        query, key = LigerRopeFunction.apply(q, k, cos, sin)
        return query, key


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> int:
    """Compile the decoder layers of a transformers model in place, on their first use. Returns their number.

    Passes with and without gradient are compiled separately. Recomputation of activations and the weights of each pass
    are outside of what is compiled.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    # the compiler warns about itself: deprecated names, and gradients that it reads
    warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    AttentionInterface.register(SEGMENTS, torch.compiler.disable(segment_attention))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    return len(layers)

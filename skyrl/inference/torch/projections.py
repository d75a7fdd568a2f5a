"""Linear layers of a prepared forward pass, with weights in the layout of the device's fastest kernel.

On a CPU, weights are packed once for oneDNN, which then also adds the residual and applies the gate while it writes the
product: 2.2 times `torch.nn.functional.linear` in float32 on AMD's Zen 5, where MKL computes with half the width of
the vector units, and 1.2 to 1.6 times in bfloat16. Elsewhere, and in types that oneDNN does not pack on this processor,
weights are fused into one matrix, of which the model's parameters become views.

Shapes: x (T, in), weight (out, in), bias (out,).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from skyrl.errors import ModelError
from skyrl.models import low_rank, onednn

_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ROWS = 64
"""Number of rows for which oneDNN chooses the layout of packed weights; other numbers of rows work as well."""

_LEVELS, _ZERO = 127, 128
"""Largest integer of an operand in eight bits, and the zero point of unsigned activations."""


class Projection(Protocol):
    """A linear layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b: (T, in) -> (T, out)."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x W^T + b: (T, in), (T, out) -> (T, out)."""


class GateUp(ABC):
    """The first half of a gated feed-forward layer (SwiGLU, arXiv:2002.05202)."""

    def __call__(self, x: Tensor) -> Tensor:
        """silu(x W_gate^T) * (x W_up^T): (T, in) -> (T, intermediate)."""
        gate, up = self.halves(x)
        return nn.functional.silu(gate) * up

    @abstractmethod
    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x W_gate^T and x W_up^T, (T, intermediate) each."""


class Packed:
    """A projection whose weight oneDNN holds in its own layout: a copy, which must be rebuilt after weights change."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = onednn.packed(weight, _ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return onednn.product(x, self._weight, self._bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._combined(x, residual, "add")

    def silu(self, x: Tensor) -> Tensor:
        """The product with its activation applied before it is written: (T, in) -> (T, out)."""
        return onednn.product(x, self._weight, self._bias, "swish")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times `factor`, elementwise: (T, in), (T, out) -> (T, out)."""
        return self._combined(x, factor, "mul")

    def _combined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, operation)
        return product


class PackedGateUp(GateUp):
    """Gate and up projection, packed separately: activation and product are computed by the matrix kernels."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        self._gate, self._up = Packed(gate.weight, gate.bias), Packed(up.weight, up.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._up.times(x, self._gate.silu(x))

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._gate(x), self._up(x)


class Dense:
    """A projection with torch's own linear function, for every device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)


class Float32(Dense):
    """A projection of 16-bit rows by a 16-bit weight with a result in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        self._packed = Packed(weight.float(), self._bias) if _packs(weight.device, torch.float32) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed(onednn.filled(x.float()))[: len(x)]  # `filled` leaves 16-bit rows that are not packed
        if x.is_cuda and self._bias is None and x.dtype != torch.float32:  # no copy of the weight in float32
            product: Tensor = torch.mm(x, self._weight.t(), out_dtype=torch.float32)
            return product
        return nn.functional.linear(x.float(), self._weight.float(), self._bias)


class JoinedGateUp(GateUp):
    """Gate and up projection as one matrix product."""

    def __init__(self, both: Projection) -> None:
        self._both = both

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self._both(x).chunk(2, dim=-1)
        return gate, up


class Adapted:
    """A projection plus the low-rank updates of its layers: the base weight is not changed."""

    def __init__(self, base: Projection, layers: Sequence[nn.Linear]) -> None:
        self._base, self._layers = base, tuple(layers)
        self._updates = low_rank.of_layers(layers)

    def __call__(self, x: Tensor) -> Tensor:
        return self._base(x) + low_rank.whole(self._updates, self._layers, x)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._base.plus(x, residual) + low_rank.whole(self._updates, self._layers, x)


class AdaptedGateUp(GateUp):
    """Gate and up projection, each with its own low-rank updates."""

    def __init__(self, base: GateUp, gate: nn.Linear, up: nn.Linear) -> None:
        self._base, self._layers = base, ((gate,), (up,))
        self._updates = [low_rank.of_layers(layer) for layer in self._layers]

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (
            half + low_rank.whole(updates, layers, x)
            for half, updates, layers in zip(self._base.halves(x), self._updates, self._layers, strict=True)
        )
        return gate, up


class Sided:
    """A projection plus the updates of the adapters of the current batch."""

    def __init__(self, inner: Projection, layers: tuple[nn.Linear, ...], side: low_rank.SideBySide) -> None:
        self._inner, self._layers, self._side = inner, layers, side

    def __call__(self, x: Tensor) -> Tensor:
        y = self._inner(x)
        return y if self._side.mix is None else self._side.mix.plus(self._layers, x, y)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self._inner.plus(x, residual)
        return y if self._side.mix is None else self._side.mix.plus(self._layers, x, y)


class SidedGateUp(GateUp):
    """Gate and up projection plus the updates of the adapters of the current batch."""

    def __init__(self, inner: GateUp, gate: nn.Linear, up: nn.Linear, side: low_rank.SideBySide) -> None:
        self._inner, self._gate, self._up, self._side = inner, (gate,), (up,), side

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(x) if self._side.mix is None else super().__call__(x)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self._inner.halves(x)
        mix = self._side.mix
        return (gate, up) if mix is None else (mix.plus(self._gate, x, gate), mix.plus(self._up, x, up))


def packs(weight: Tensor) -> bool:
    """Whether weights of this type and device are packed for oneDNN."""
    return weight.dtype in _PACKED_DTYPES and _packs(weight.device, weight.dtype)


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and onednn.packs(dtype)


def filled(rows: Tensor) -> Tensor:
    """The rows (T, ...), padded with zero rows if their weights are packed: oneDNN compiles a kernel for each T."""
    return onednn.filled(rows) if packs(rows) else rows


def projection(*layers: nn.Linear, float32: bool = False) -> Projection:
    """One projection with the concatenated outputs of the layers, low-rank updates included. With `float32`, the result
    is in float32.
    """
    base: Projection
    if float32:
        base = Float32(*_fused(layers))
    else:
        base = Packed(*_copied(layers)) if packs(layers[0].weight) else Dense(*_fused(layers))
    return Adapted(base, layers) if any(low_rank.of_layers(layers)) else base


def _copied(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """A copy of the layers' weights and biases, concatenated: (sum of out, in) and (sum of out,)."""
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return torch.cat([layer.weight for layer in layers]), bias


def gate_up(gate: nn.Linear, up: nn.Linear) -> GateUp:
    """The gated half of a feed-forward layer, low-rank updates included."""
    half: GateUp = PackedGateUp(gate, up) if packs(gate.weight) else JoinedGateUp(Dense(*_fused([gate, up])))
    return AdaptedGateUp(half, gate, up) if any(low_rank.of_layers([gate, up])) else half


def _fused(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of all layers as one tensor each, of which the layers' own parameters become views."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    biases = [] if layers[0].bias is None else [layer.bias for layer in layers]
    return _joined([layer.weight for layer in layers]), _joined(biases) if biases else None


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """The concatenated parameters, of which they become views. If they are, nothing is copied: CUDA graphs that read
    the result stay valid after weights were replaced in place.
    """
    if (adjacent := _adjacent(parameters)) is not None:
        return adjacent
    combined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, combined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return combined


def _adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose parts are these parameters, in order; None if there is none."""
    first, end = parameters[0].data, parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and parameter.is_contiguous() and parameter.data_ptr() == end):
            return None
        end += parameter.nbytes
    size = (sum(map(len, parameters)), *first.shape[1:])
    return first.as_strided(size, first.stride(), first.storage_offset())


class Quantized:
    """The concatenated projections of the layers in eight bits on a CPU; must be rebuilt after weights change.

    Weights have a scale for each output, activations one for each token: a sample does not depend on what is computed
    beside it, as it would with one scale for a whole batch. This is the W8A8 of LLM.int8() (arXiv:2208.07339, section
    2.1, vector-wise quantization) without its outlier columns. The product of integers is exact; rounding its operands
    changes it by about 1 %. oneDNN multiplies unsigned activations with signed weights: activations are stored as
    x / scale + 128, in 1..255.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        weight, bias = _copied(layers)
        levels, scales = quantized(weight.float())
        self._weight = torch.ops.onednn.qlinear_prepack(levels.to(torch.int8), [_ROWS, weight.shape[1]])
        self._scales, self._zeros = scales.squeeze(1), torch.zeros(len(weight), dtype=torch.int64)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x).to(x.dtype)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._product(x).add_(residual).to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        levels, scales = quantized(x.float())
        product = self._multiply_levels(levels.add_(_ZERO).to(torch.uint8)).mul_(scales)
        return product if self._bias is None else product.add_(self._bias)

    def _multiply_levels(self, levels: Tensor) -> Tensor:
        """Unsigned levels times the weights, float32, in units of each row's scale."""
        weights = self._weight, self._scales, self._zeros, None
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, _ZERO, *weights, 1.0, 0, torch.float32, "none", [], ""
        )
        return product


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in -127..127 as float32, and the scale (T, 1) of each row, in whose units they are."""
    scales = rows.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny * _LEVELS) / _LEVELS
    return (rows / scales).round_(), scales


def refuse_without_kernels(device: torch.device) -> None:
    """Raises `ModelError` if products of eight bits cannot be computed, or not exactly.

    A processor without VNNI adds pairs of products in sixteen bits, where large sums are cut off.
    """
    reason = ""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        reason = "needs a CPU, and torch with oneDNN"
    elif not _is_exact():
        reason = "needs a processor with VNNI, which adds 8-bit products without saturating"
    if reason:
        raise ModelError(f'generator.inference_engine.rollout_dtype = "int8" {reason}: set it to "bfloat16"')


def _is_exact() -> bool:
    """Whether a sum of the largest products is exact: 64 * 127 * 127, for rows and weights of ones."""
    layer = nn.Linear(64, 16, bias=False, device="cpu", dtype=torch.float32)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        return bool(torch.allclose(Quantized(layer)(torch.ones(8, 64)), torch.full((8, 16), 64.0), rtol=1e-4))

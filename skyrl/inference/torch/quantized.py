"""Linear layers in eight bits on a CPU: weights with a scale for each output, activations with one for each token.

A token's scale comes from that token alone, so a sample does not depend on what is computed beside it, as it would with
one scale for a whole batch. This is the W8A8 of LLM.int8() (arXiv:2208.07339, section 2.1, vector-wise quantization)
without its outlier columns. The product of integers is exact; rounding its operands changes it by about 1 %.

oneDNN multiplies unsigned activations with signed weights: activations are stored as x / scale + 128, in 1..255.

Shapes: x (T, in), weight (out, in), bias (out,).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skyrl.errors import ModelError
from skyrl.inference.torch.projections import GateUp, joined

_LEVELS, _ZERO = 127, 128
"""Largest integer of an operand, and the zero point of unsigned activations."""

_ROWS = 64
"""Number of rows for which oneDNN chooses the layout of the weights."""


class Quantized:
    """The concatenated projections of the layers in eight bits; must be rebuilt after weights change."""

    def __init__(self, *layers: nn.Linear) -> None:
        weight, bias = joined(layers)
        levels, scales = quantized(weight.float())
        self._weight = torch.ops.onednn.qlinear_prepack(levels.to(torch.int8), [_ROWS, weight.shape[1]])
        self._scales, self._zeros = scales.squeeze(1), torch.zeros(len(weight), dtype=torch.int64)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b: (T, in) -> (T, out), in the type of x."""
        return self._product(x).to(x.dtype)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x W^T + b: (T, in), (T, out) -> (T, out)."""
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


class QuantizedGateUp(GateUp):
    """Gate and up projection as one product in eight bits: silu(x W_gate^T) * (x W_up^T)."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        self._both = Quantized(gate, up)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x W_gate^T and x W_up^T: (T, in) -> (T, intermediate) each."""
        gate, up = self._both(x).chunk(2, dim=-1)
        return gate, up


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

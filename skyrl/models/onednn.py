"""Matrix products of linear layers by oneDNN, for CPUs on which it is faster.

torch multiplies float32 matrices by MKL, which on AMD's processors uses half the width of the vector units: on Zen 5
with one thread, oneDNN reaches 140 to 225 GFLOP/s where MKL reaches 87 to 108, for each of the three products of a
linear layer. `compute_with_onednn` is for a model that learns; the torch engine packs its weights, which do not change
between two updates, in `skyrl.inference.torch.projections`.

Shapes: x (T, in), weight (out, in), bias (out,).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEWEST_ROWS = 64
"""Least number of rows of a product for oneDNN; compiling a kernel for fewer rows is not worth the time."""

SMALLEST_SIDE = 64
"""Least number of inputs and of outputs of a layer for oneDNN; the matrices of an adapter (LoRA) have fewer."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x W^T + b) by oneDNN: (..., in) -> (..., out). `weight` may be transposed, or packed by `packed`."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
    return result


def packed(weight: Tensor, rows: int) -> Tensor:
    """A copy of the weight in the layout that oneDNN prefers for `rows` rows; other numbers of rows may use it."""
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return result


def is_available() -> bool:
    """Whether this build of torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this type on this processor.

    torch refuses 16-bit types without their instructions: bfloat16 needs AVX-512 (bw, vl, dq) or AVX-NE-CONVERT, and
    float16 needs AVX-512 FP16 or AVX-NE-CONVERT.
    """
    if not is_available():
        return False
    matrix = torch.ones(1, 1, dtype=dtype, device="cpu")
    try:
        product(matrix, packed(matrix, 1))
    except RuntimeError:
        return False
    return True


def compute_with_onednn(model: nn.Module) -> None:
    """Switch every plain linear layer of a model on the CPU to oneDNN, if that is faster on this machine.

    Parameters, their names and hooks stay. The choice depends only on the kind of processor and on shapes, never on a
    measurement, so that a repeated run has the same bits.
    """
    if not (is_available() and outruns_mkl()):
        return
    for module in model.modules():
        if type(module) is nn.Linear and min(module.in_features, module.out_features) >= SMALLEST_SIDE:
            module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """`nn.Linear` by oneDNN. Falls back to `nn.Linear` for few rows, types other than float32, and autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b: (..., in) -> (..., out)."""
        float32 = x.dtype is self.weight.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
        if not float32 or x.numel() < FEWEST_ROWS * self.in_features:
            return super().forward(x)
        apply: Any = _Product.apply
        result: Tensor = apply(x, self.weight, self.bias)
        return result


def padded_rows(rows: int) -> int:
    """Number of rows with which a product of `rows` is computed: a power of two up to 8; above, at most an eighth or 7
    more than `rows`.

    oneDNN compiles and keeps a kernel for each shape. Eight shapes between two powers of two bound their number.
    """
    power = 1 << max(rows - 1, 0).bit_length()
    step = min(power, max(8, power // 16))
    return -(-rows // step) * step


def filled(rows: Tensor) -> Tensor:
    """The rows (T, ...) with zeros behind them, up to `padded_rows(T)`; contiguous."""
    missing = padded_rows(len(rows)) - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


class _Product(torch.autograd.Function):
    """x W^T + b. Rows are not padded, since the shapes of mini-batches hardly repeat even with padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        output = product(x.reshape(-1, x.shape[-1]), weight, bias)
        unviewed: Tensor = torch.ops.aten._unsafe_view(output, (*x.shape[:-1], len(weight)))  # FSDP2 warns of views
        return unviewed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        errors = gradient.reshape(-1, len(weight))
        return (
            product(errors, weight.t()).view(x.shape) if wants_x else None,
            product(errors.t(), x.reshape(-1, x.shape[-1]).t()) if wants_weight else None,
            errors.sum(0) if wants_bias else None,
        )


@cache
def outruns_mkl() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL here: on AMD's processors with AVX-512."""
    cpuinfo = Path("/proc/cpuinfo")
    described = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "AuthenticAMD" in described and "avx512f" in described

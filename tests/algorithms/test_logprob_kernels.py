"""Triton's kernels for log-probabilities, interpreted on a CPU and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.whole_tables import check
from tests.triton_interpreter import run_interpreted


@pytest.mark.long
def test_interpreted_kernels_compute_what_the_whole_table_gives() -> None:
    run_interpreted("tests/algorithms/interpreted_logprob_kernels.py")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(("temperature", "slope"), [(1.0, 0.0), (0.7, 0.5)])
def test_a_gpu_computes_the_same(dtype: torch.dtype, tolerance: float, temperature: float, slope: float) -> None:
    check(dtype, temperature, slope, "cuda", tolerance)

"""Attention of ranks that have the tokens of a row among them: together they compute what one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.models.attention.blocks import AttentionBlock, backward_of, forward_of
from skyrl.models.attention.segment_attention import Segments, segment_attention
from skyrl.models.attention.segments import Segment
from skyrl.models.attention.shared_rows import ContextGroup, RowSharing, SequenceGroup
from tests.long_cases import long_except

ROW = (Segment(0, 7, (11, 3)), Segment(21, 2), Segment(23, 5, (4,)))
"""32 tokens: a prompt with two answers, a short sequence, a prompt with one answer."""

SCALE = 0.25


class Unmet:
    """Some ranks that never meet, in the place of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def member(rank: int, ranks: int) -> ContextGroup:
    unmet: Any = Unmet(rank, ranks)
    return ContextGroup(unmet)


def order(ranks: int, tokens: int = 32) -> Tensor:
    """Columns of the row, those of the first rank first."""
    return RowSharing(everyone=SequenceGroup(member(0, ranks).group), context=member(0, ranks)).order(tokens)


def drawn(device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output, of 4 heads and 2 key heads of 8 numbers."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 4, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8), (1, 4, 32, 8)]
    query, key, value, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return query, key, value, gradient


def of_one(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients of a rank that has the whole row."""
    inputs = query, key, value = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    mixed, _ = segment_attention(
        torch.nn.Module(), query, key, value, None, segments=Segments(ROW, query.device), scaling=SCALE
    )
    mixed = mixed.transpose(1, 2)
    return [mixed.detach(), *torch.autograd.grad(mixed, inputs, gradient)]


def of_all(ranks: int, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """The same, put together from what each of the ranks computes."""
    totals = [torch.zeros_like(tensor) for tensor in (query, query, key, value)]
    for rank, columns in enumerate(order(ranks).view(ranks, -1)):
        blocks = member(rank, ranks).blocks(ROW, len(columns))
        own = query[:, :, columns]
        mixed, norms = forward_of(blocks, own, key, value, SCALE)
        grads = backward_of(blocks, gradient[:, :, columns], own, key, value, mixed, norms, SCALE)
        totals[0][:, :, columns], totals[1][:, :, columns] = mixed, grads[0]
        totals[2] += grads[1]
        totals[3] += grads[2]
    return totals


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_output_and_gradients_are_those_of_one_rank(ranks: int) -> None:
    for result, expected in zip(of_all(ranks, *drawn()), of_one(*drawn()), strict=True):
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_the_kernels_of_cuda_give_the_output_and_gradients_of_one_rank(dtype: torch.dtype, bound: float) -> None:
    expected = of_one(*drawn())
    for result, exact in zip(of_all(2, *drawn("cuda", dtype)), expected, strict=True):
        torch.testing.assert_close(result.cpu().double(), exact, atol=bound, rtol=bound)


@pytest.mark.parametrize("ranks", long_except([2, 3, 4, 8], 4))
def test_every_rank_sees_about_as_many_keys_of_one_long_sequence(ranks: int) -> None:
    tokens = 64 * ranks

    def pairs(block: AttentionBlock) -> int:
        queries: int = block.queries.stop - block.queries.start
        keys: int = block.keys.stop - block.keys.start
        return queries * (queries + 1) // 2 if block.causal else queries * keys

    segment = (Segment(0, tokens),)
    seen = [sum(map(pairs, member(rank, ranks).blocks(segment, 64))) for rank in range(ranks)]
    assert sum(seen) == tokens * (tokens + 1) // 2
    assert max(seen) == min(seen)


def test_a_rank_has_a_chunk_from_the_front_and_one_from_the_back() -> None:
    assert order(2, tokens=14).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]

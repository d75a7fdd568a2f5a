"""Packed rows through kernels that tell sequences apart by where they begin; on a CPU the kernel is a plain loop."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from skyrl.models import segment_attention, varlen_attention
from skyrl.models.segment_attention import KERNELS, Segments
from skyrl.models.segments import Segment

SHARED = (Segment(0, 5, (3, 1, 9)), Segment(18, 4))
APART = (Segment(0, 4), Segment(4, 3))


def loop(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor, *longest: int, **kwargs: Any
) -> Tensor:
    """The kernel as torch documents it: (tokens, heads, D), causal from the last query and the last key backwards."""
    assert kwargs.pop("window_size") == (-1, 0)
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert longest == tuple(int(bounds.diff().max()) for bounds in (query_bounds, key_bounds))
    mixed = []
    for begin, end, first, last in zip(query_bounds, query_bounds[1:], key_bounds, key_bounds[1:], strict=False):
        own, keys, values = query[begin:end], key[first:last], value[first:last]
        seen = torch.ones(len(own), len(keys), dtype=torch.bool).tril(len(keys) - len(own))
        own, keys, values = (each.transpose(0, 1) for each in (own, keys, values))
        mixed.append(scaled_dot_product_attention(own, keys, values, attn_mask=seen, **kwargs).transpose(0, 1))
    return torch.cat(mixed)


def row(segments: tuple[Segment, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Query of 4 heads, key and value of 2."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, segments[-1].stop, 16) for heads in (4, 2, 2)]
    return [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]


def attended(segments: tuple[Segment, ...], tensors: list[Tensor]) -> list[Tensor]:
    """The result, and the gradient of its sum of squares by query, key and value."""
    made = Segments(segments, tensors[0].device)
    query, key, value = tensors
    found, _ = segment_attention.segment_attention(torch.nn.Identity(), query, key, value, None, segments=made)
    return [found, *torch.autograd.grad(found.float().square().sum(), tensors)]


def loop_of_old(
    query: Tensor, key: Tensor, value: Tensor, *bounds: Any, scale: float | None, window_size: tuple[int, int]
) -> Tensor:
    """The kernel of torch 2.11, which shares heads without being told."""
    return loop(query, key, value, *bounds, scale=scale, window_size=window_size, enable_gqa=True)


def loop_of_new(*tensors: Any, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
    """The kernel of torch 2.13."""
    return loop(*tensors, scale=scale, window_size=window_size, enable_gqa=enable_gqa)


def patched(monkeypatch: pytest.MonkeyPatch, kernel: Any = loop_of_new) -> None:
    monkeypatch.setattr(varlen_attention, "_kernel", lambda: kernel)
    monkeypatch.setattr(segment_attention, "has_varlen_kernels", lambda device: True)


@pytest.mark.parametrize("kernel", [loop_of_old, loop_of_new])
@pytest.mark.parametrize("segments", [SHARED, APART], ids=["shared", "apart"])
def test_sequences_are_told_apart_by_where_they_begin(
    segments: tuple[Segment, ...], kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attended(segments, row(segments, torch.bfloat16))
    patched(monkeypatch, kernel)
    for found, wanted in zip(attended(segments, row(segments, torch.bfloat16)), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def test_a_prompt_is_computed_once_and_read_by_each_answer() -> None:
    made = Segments(SHARED, torch.device("cpu")).sequences
    assert made.query_bounds.tolist() == [0, 5, 8, 9, 18, 22]
    assert made.key_bounds.tolist() == [0, 5, 13, 19, 33, 37]
    assert made.keys is not None
    assert made.keys[5:13].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # the prompt, then the first answer
    assert made.keys[13:19].tolist() == [0, 1, 2, 3, 4, 8]
    assert (made.longest_query, made.longest_key) == (9, 14)


def test_nothing_is_gathered_where_nothing_is_shared() -> None:
    made = Segments(APART, torch.device("cpu")).sequences
    assert made.keys is None and made.query_bounds.tolist() == made.key_bounds.tolist() == [0, 4, 7]


@pytest.mark.parametrize(
    ("dtype", "head", "kernels", "chosen"),
    [
        (torch.bfloat16, 64, True, 0),
        (torch.float16, 128, True, 0),
        (torch.float32, 64, True, 1),  # the kernels compute in 16 bits
        (torch.bfloat16, 20, True, 1),
        (torch.bfloat16, 512, True, 1),
        (torch.bfloat16, 64, False, 1),  # a CPU, or an older GPU
    ],
)
def test_the_kernel_is_what_the_device_and_the_type_allow(
    dtype: torch.dtype, head: int, kernels: bool, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_attention, "has_varlen_kernels", lambda device: kernels)
    segments, query = Segments(APART, torch.device("cpu")), torch.empty(1, 4, 7, head, dtype=dtype)
    assert [kernel.suits(segments, query) for kernel in KERNELS].index(True) == chosen


def test_what_autocast_computes_in_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        found = attended(SHARED, row(SHARED, torch.float32))[0]
    assert found.dtype == torch.bfloat16


def test_the_arguments_are_those_of_this_torch() -> None:
    named = inspect.signature(varlen_attn).parameters
    assert list(named)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(named)


def test_a_cpu_has_no_such_kernels() -> None:
    assert not varlen_attention.has_varlen_kernels(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [SHARED, APART, (Segment(0, 600, (200, 31)),)], ids=["shared", "apart", "long"])
def test_a_gpu_computes_what_a_cpu_does(segments: tuple[Segment, ...]) -> None:
    assert varlen_attention.has_varlen_kernels(torch.device("cuda", torch.cuda.current_device()))
    on_gpu = row(segments, torch.bfloat16, "cuda")
    expected = attended(segments, [each.detach().cpu().float().requires_grad_() for each in on_gpu])
    for found, wanted in zip(attended(segments, on_gpu), expected, strict=True):
        assert (found.float().cpu() - wanted).norm() < 0.02 * wanted.norm()  # bfloat16 has 8 bits


@pytest.mark.gpu
def test_float32_on_a_gpu_takes_a_mask_and_computes_the_same() -> None:
    for found, wanted in zip(
        attended(SHARED, row(SHARED, torch.float32, "cuda")), attended(SHARED, row(SHARED, torch.float32)), strict=True
    ):
        torch.testing.assert_close(found.cpu(), wanted, atol=1e-2, rtol=1e-2)  # TF32 where the GPU has it

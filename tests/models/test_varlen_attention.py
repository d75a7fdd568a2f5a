"""Packed rows through kernels that tell sequences apart by where they begin; on a CPU the kernel is a plain loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl.models.attention import segment_attention, varlen_attention
from skyrl.models.attention.segment_attention import WHOLE, KeyBounds, Segments, Weighing, kernel_for
from skyrl.models.attention.segments import Segment

SHARED = (Segment(0, 5, (3, 1, 9)), Segment(18, 4))
APART = (Segment(0, 4), Segment(4, 3))


def loop(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor, *others: Any, **kwargs: Any
) -> tuple[Tensor]:
    """The kernel as torch documents it: (tokens, heads, D), causal from the last query and the last key backwards."""
    window = kwargs.pop("window_size_left") + 1
    assert kwargs.pop("window_size_right") == 0
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert others == (*(int(bounds.diff().max()) for bounds in (query_bounds, key_bounds)), 0.0, False, False)
    mixed = []
    for begin, end, first, last in zip(query_bounds, query_bounds[1:], key_bounds, key_bounds[1:], strict=False):
        own, keys, values = query[begin:end], key[first:last], value[first:last]
        before = len(keys) - len(own)
        seen = torch.ones(len(own), len(keys), dtype=torch.bool).tril(before)
        if window:
            seen &= torch.ones_like(seen).triu(before - window + 1)
        own, keys, values = (tensor.transpose(0, 1) for tensor in (own, keys, values))
        mixed.append(
            scaled_dot_product_attention(own, keys, values, attn_mask=seen, enable_gqa=True, **kwargs).transpose(0, 1)
        )
    return (torch.cat(mixed),)


def row(segments: tuple[Segment, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Query of 4 heads, key and value of 2."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, segments[-1].stop, 16) for heads in (4, 2, 2)]
    return [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]


def attended(segments: tuple[Segment, ...], tensors: list[Tensor]) -> list[Tensor]:
    """The result, and the gradient of its sum of squares by query, key and value."""
    layout = Segments(segments, tensors[0].device)
    query, key, value = tensors
    output, _ = segment_attention.segment_attention(torch.nn.Identity(), query, key, value, None, segments=layout)
    return [output, *torch.autograd.grad(output.float().square().sum(), tensors)]


def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "_flash_attention", loop)
    monkeypatch.setattr(segment_attention, "has_varlen_kernels", lambda device: True)


def chosen_on_a_gpu(
    rows: tuple[Segment, ...], dtype: torch.dtype, head: int, weighing: Weighing, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Name of the kernel for a query on a GPU that has all kernels."""
    for name in ("has_varlen_kernels", "has_cudnn_attention"):
        monkeypatch.setattr(segment_attention, name, lambda device: True)
    query: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 4, rows[-1].stop, head))
    return kernel_for(Segments(rows, torch.device("cpu")), query, weighing).__name__


@pytest.mark.parametrize("segments", [SHARED, APART], ids=["shared", "apart"])
def test_sequences_are_told_apart_by_where_they_begin(
    segments: tuple[Segment, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attended(segments, row(segments, torch.bfloat16))
    patched(monkeypatch)
    for result, reference in zip(attended(segments, row(segments, torch.bfloat16)), expected, strict=True):
        torch.testing.assert_close(result, reference, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "bounds", [KeyBounds(window=4), KeyBounds(chunk=4), KeyBounds(chunk=5), KeyBounds(window=1)], ids=str
)
@pytest.mark.parametrize("segments", [SHARED, APART], ids=["shared", "apart"])
def test_windows_and_chunks_are_those_of_masks(
    segments: tuple[Segment, ...], bounds: KeyBounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is an argument of the kernel; chunks are sequences of their own."""
    patched(monkeypatch)
    weighing = Weighing(None, bounds=bounds)
    query, key, value = (tensor.detach() for tensor in row(segments, torch.float32))
    by_kernel, by_masks = (
        attend(Segments(segments, query.device), query, key, value, weighing)
        for attend in (segment_attention._varlen, segment_attention._attend_per_segment)
    )
    torch.testing.assert_close(by_kernel, by_masks, atol=1e-5, rtol=1e-5)
    long = (Segment(0, 8192),)
    with_windows = "_efficient" if bounds.window is None else "_attend_per_segment"
    assert chosen_on_a_gpu(long, torch.bfloat16, 64, weighing, monkeypatch) == "_varlen"
    assert chosen_on_a_gpu(long, torch.float32, 64, weighing, monkeypatch) == with_windows


def test_a_prompt_is_computed_once_and_read_by_each_answer() -> None:
    sequences = Segments(SHARED, torch.device("cpu")).sequences(WHOLE)
    assert sequences.query_bounds.tolist() == [0, 5, 8, 9, 18, 22]
    assert sequences.key_bounds.tolist() == [0, 5, 13, 19, 33, 37]
    assert sequences.keys is not None
    assert sequences.keys[5:13].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # the prompt, then the first answer
    assert sequences.keys[13:19].tolist() == [0, 1, 2, 3, 4, 8]
    assert (sequences.longest_query, sequences.longest_key) == (9, 14)


def test_nothing_is_gathered_where_nothing_is_shared() -> None:
    sequences = Segments(APART, torch.device("cpu")).sequences(WHOLE)
    assert sequences.keys is None and sequences.query_bounds.tolist() == sequences.key_bounds.tolist() == [0, 4, 7]


@pytest.mark.parametrize(
    ("dtype", "head", "rows", "chosen"),
    [
        (torch.bfloat16, 64, APART, "_varlen"),
        (torch.float16, 128, APART, "_varlen"),
        (torch.float32, 64, APART, "_efficient"),
        (torch.bfloat16, 20, APART, "_side_by_side"),
        (torch.bfloat16, 512, APART, "_efficient"),
        (torch.bfloat16, 64, (Segment(0, 8192), Segment(8192, 9000)), "_long"),
        (torch.bfloat16, 64, (Segment(0, 8192), Segment(8192, 9)), "_varlen"),
        (torch.bfloat16, 64, (Segment(0, 9, (8192,)),), "_long"),
        (torch.float32, 64, (Segment(0, 8192),), "_efficient"),
    ],
)
def test_the_kernel_is_what_a_gpu_has_for_the_type_and_the_lengths(
    dtype: torch.dtype, head: int, rows: tuple[Segment, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_on_a_gpu(rows, dtype, head, Weighing(None), monkeypatch) == chosen


def test_a_cpu_computes_with_masks_and_small_calls() -> None:
    segments, query = Segments(APART, torch.device("cpu")), torch.empty(1, 4, 7, 64)
    assert kernel_for(segments, query, Weighing(None)).__name__ == "_side_by_side"


@pytest.mark.parametrize("segments", [SHARED, APART], ids=["shared", "apart"])
def test_a_call_for_each_long_sequence_computes_the_same(
    segments: tuple[Segment, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is given whole causal sequences: an answer comes with its prompt, whose results are dropped."""
    expected = attended(segments, row(segments, torch.float32))
    lengths: list[int] = []

    def whole(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        assert query.shape[2] == key.shape[2] == value.shape[2]
        lengths.append(query.shape[2])
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)

    monkeypatch.setattr(segment_attention, "_are_long", lambda *_: True)
    monkeypatch.setattr(segment_attention, "LONG", 4)
    monkeypatch.setattr(segment_attention, "cudnn_attention", whole)
    for result, reference in zip(attended(segments, row(segments, torch.float32)), expected, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-5)
    assert lengths == ([5, 8, 6, 14, 4] if segments is SHARED else [4])


def test_the_arguments_are_those_of_this_torch() -> None:
    named = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert named[:7] == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    assert named[7:10] == ["dropout_p", "is_causal", "return_debug_mask"]
    assert {"scale", "window_size_left", "window_size_right"} <= set(named)
    memory_efficient = torch.ops.aten._efficient_attention_forward.default._schema.arguments
    assert [argument.name for argument in memory_efficient[3:10]] == [
        "bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "custom_mask_type"
    ]  # fmt: skip


def test_gradients_of_gathered_rows_add_up_in_float32() -> None:
    sequences = attrs.evolve(Segments(APART, torch.device("cpu")).sequences(WHOLE), keys=torch.tensor([0, 1, 1, 1]))
    key, value = (torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    keys, values = sequences.gathered(key, value)
    weights = torch.tensor([1.0, 256.0, 1.0, 1.0], dtype=torch.bfloat16).view(4, 1, 1)
    ((keys * weights).sum() - (values * weights).sum()).backward()
    assert key.grad is not None and value.grad is not None
    assert key.grad.flatten().tolist() == [1.0, 258.0]  # 257 has no bfloat16
    assert value.grad.flatten().tolist() == [-1.0, -258.0]


def test_a_cpu_has_no_such_kernels() -> None:
    assert not varlen_attention.has_varlen_kernels(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [SHARED, APART, (Segment(0, 600, (200, 31)),)], ids=["shared", "apart", "long"])
def test_a_gpu_computes_what_a_cpu_does(segments: tuple[Segment, ...]) -> None:
    assert varlen_attention.has_varlen_kernels(torch.device("cuda", torch.cuda.current_device()))
    on_gpu = row(segments, torch.bfloat16, "cuda")
    expected = attended(segments, [tensor.detach().cpu().float().requires_grad_() for tensor in on_gpu])
    for result, reference in zip(attended(segments, on_gpu), expected, strict=True):
        assert (result.float().cpu() - reference).norm() < 0.02 * reference.norm()  # bfloat16 has 8 bits


@pytest.mark.gpu
def test_a_gpu_computes_long_sequences_by_cudnn() -> None:
    segments = (Segment(0, 40, (8200, 8300)), Segment(16540, 8192))
    wide = [torch.cat([tensor] * 4, -1).detach().requires_grad_() for tensor in row(segments, torch.bfloat16, "cuda")]
    assert segment_attention._are_long(Segments(segments, wide[0].device), wide[0])
    result = attended(segments, wide)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_attention, "_are_long", lambda *_: False)
        expected = attended(segments, wide)
    for one, other in zip(result, expected, strict=True):
        assert (one.float() - other.float()).norm() < 0.02 * other.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [SHARED, APART], ids=["shared", "apart"])
def test_float32_on_a_gpu_computes_the_same_in_one_call(segments: tuple[Segment, ...]) -> None:
    layout, query = Segments(segments, torch.device("cuda")), torch.empty(1, 4, 9, 16, device="cuda")
    assert kernel_for(layout, query, Weighing(None)).__name__ == "_efficient"
    for result, reference in zip(
        attended(segments, row(segments, torch.float32, "cuda")),
        attended(segments, row(segments, torch.float32)),
        strict=True,
    ):
        torch.testing.assert_close(result.cpu(), reference, atol=1e-2, rtol=1e-2)  # TF32 where the GPU has it

"""Attention inside segments is attention under the mask that says the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl.models.attention.segment_attention import Segments, segment_attention
from skyrl.models.attention.segments import Segment


@pytest.mark.parametrize(
    ("segments", "together"),
    [
        ((Segment(0, 4), Segment(4, 3)), True),  # sequences on their own
        ((Segment(0, 5, (3, 1, 9)), Segment(18, 4)), True),  # answers to one prompt, some longer than it
        ((Segment(0, 9, (3, 2)), Segment(14, 200)), False),  # answers much shorter than their prompt
        ((Segment(0, 600), Segment(600, 560)), False),  # causally, where a mask would have more pairs than are seen
        ((Segment(0, 40, (90, 30, 60, 70)), Segment(290, 7)), False),
        ((Segment(0, 600, (200,)), Segment(800, 2, (300, 520))), False),  # long answers, which are computed causally
    ],
)
def test_every_token_sees_its_own_prompt_and_its_own_answer_so_far(
    segments: tuple[Segment, ...], together: bool
) -> None:
    """Short groups go through one call, `together`; long ones are computed answer by answer."""
    generator = torch.Generator().manual_seed(0)
    tokens = segments[-1].stop
    query = torch.randn(1, 4, tokens, 8, generator=generator)
    key, value = (torch.randn(1, 2, tokens, 8, generator=generator) for _ in range(2))
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for segment in segments:
        prompt = range(segment.start, segment.start + segment.prompt)
        stretches = [prompt]
        for length in segment.answers:
            stretches.append(range(stretches[-1].stop, stretches[-1].stop + length))
        for stretch in stretches:
            for token in stretch:
                seen[token, stretch.start : token + 1] = True
                if stretch is not prompt:
                    seen[token, prompt.start : prompt.stop] = True
    row = Segments(segments, query.device)
    assert row.fit_together == together
    output, _ = segment_attention(torch.nn.Identity(), query, key, value, None, segments=row)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


SHORT_AND_LONG = [
    (Segment(0, 5, (3, 1, 9)), Segment(18, 4), Segment(22, 12)),  # side by side
    (Segment(0, 40, (90, 30)), Segment(160, 7), Segment(167, 30, (2, 2))),  # one by one
    (Segment(0, 3, (200,)), Segment(203, 210)),
]


@pytest.mark.parametrize("segments", SHORT_AND_LONG)
@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention", "full_attention", None])
@pytest.mark.parametrize("weights", ["plain", "capped", "with sinks"])
def test_bounds_count_from_the_start_of_each_sequence(
    segments: tuple[Segment, ...], kind: str | None, weights: str
) -> None:
    """Each sequence, a prompt with one answer, on its own: by a mask of positions and the formulas of the weights."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, segments[-1].stop, 8, generator=generator)
    key, value = (torch.randn(1, 2, segments[-1].stop, 8, generator=generator) for _ in range(2))
    cap, sinks = 1.5 if weights == "capped" else None, torch.randn(4) if weights == "with sinks" else None
    bounds: dict[str | None, int] = {"sliding_attention": 6, "chunked_attention": 7, None: 5}
    module: Any = torch.nn.Identity()
    module.num_key_value_groups = 2  # which transformers' function reads
    if kind is not None:
        module.layer_idx = 0
        module.config = SimpleNamespace(layer_types=[kind], sliding_window=6, attention_chunk_size=7)
    window = bounds[None] if kind is None else None  # what a module of an older kind passes to its attention
    kwargs: Any = {"sliding_window": window, "softcap": cap, "s_aux": sinks}
    row = Segments(segments, query.device)
    output, _ = segment_attention(module, query, key, value, None, segments=row, **kwargs)
    single, _ = segment_attention(module, query[:, :, :20], key[:, :, :20], value[:, :, :20], None, **kwargs)
    torch.testing.assert_close(single, by_hand(query[0], key[0], value[0], torch.arange(20), bounds, kind, cap, sinks))
    for segment in segments:
        prompt, first = torch.arange(segment.start, segment.start + segment.prompt), segment.start + segment.prompt
        for answer in segment.answers or (0,):
            own = torch.cat((prompt, torch.arange(first, first + answer)))
            expected = by_hand(query[0], key[0], value[0], own, bounds, kind, cap, sinks)
            torch.testing.assert_close(output[:, own], expected, atol=1e-5, rtol=1e-5)
            first += answer


def by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    bounds: dict[str | None, int],
    kind: str | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """(1, n, heads, D): attention of one sequence at these places of the row."""
    query, key, value = (
        query[:, positions],
        key[:, positions].repeat_interleave(2, 0),
        value[:, positions].repeat_interleave(2, 0),
    )
    scores = query @ key.transpose(1, 2) / 8**0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    later, earlier = torch.arange(len(positions)).unsqueeze(1), torch.arange(len(positions))
    seen = earlier <= later
    if kind in ("sliding_attention", None):
        seen &= earlier > later - bounds[kind]
    if kind == "chunked_attention":
        seen &= earlier // bounds[kind] == later // bounds[kind]
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp().view(-1, 1, 1))
    return (weights / total @ value).transpose(0, 1).unsqueeze(0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("segments", [(Segment(0, 4, (2, 3)), Segment(9, 3)), (Segment(0, 60), Segment(60, 2))])
def test_dropout_of_attention_weights_leaves_the_mean_as_it_is(segments: tuple[Segment, ...]) -> None:
    """By either kernel: a weight is 0 or twice itself, so that the mean of many draws is what attention is without."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, segments[-1].stop, 8).unbind()
    row = Segments(segments, query.device)

    def attended(dropout: float) -> torch.Tensor:
        return segment_attention(torch.nn.Identity(), query, key, value, None, segments=row, dropout=dropout)[0]

    full, draws = attended(0.0), torch.stack([attended(0.5) for _ in range(2000)])
    assert (draws[0] - draws[1]).abs().max() > 0.1
    torch.testing.assert_close(draws.mean(0), full, atol=0.15, rtol=0)

"""Attention inside segments is attention under the mask that says the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from skyrl.models.segment_attention import Segments, segment_attention
from skyrl.models.segments import Segment


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
    found, _ = segment_attention(torch.nn.Identity(), query, key, value, None, segments=row)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments", [(Segment(0, 4, (2, 3)), Segment(9, 3)), (Segment(0, 60), Segment(60, 2))])
def test_dropout_of_attention_weights_leaves_the_mean_as_it_is(segments: tuple[Segment, ...]) -> None:
    """By either kernel: a weight is 0 or twice itself, so that the mean of many draws is what attention is without."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, segments[-1].stop, 8).unbind()
    row = Segments(segments, query.device)

    def attended(dropout: float) -> torch.Tensor:
        return segment_attention(torch.nn.Identity(), query, key, value, None, segments=row, dropout=dropout)[0]

    whole, draws = attended(0.0), torch.stack([attended(0.5) for _ in range(2000)])
    assert (draws[0] - draws[1]).abs().max() > 0.1
    torch.testing.assert_close(draws.mean(0), whole, atol=0.15, rtol=0)
